"""Builds one frontend: its objects, its loops and its routes, and starts and stops them in order.

The only place that chooses the frontend's adapters. `make_frontend` gets everything outside as an argument (`Outside`),
so the program, the tests and the simulation run the same objects.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from contextlib import nullcontext
from functools import partial
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.api import openapi
from enginehouse.api.accounts import Accounts
from enginehouse.api.app import build
from enginehouse.api.audit import AuditRoutes
from enginehouse.api.backend_jobs import BackendJobRoutes
from enginehouse.api.backends import BackendRoutes
from enginehouse.api.doctor import DoctorRoutes
from enginehouse.api.events import EventRoutes
from enginehouse.api.history import HistoryRoutes
from enginehouse.api.metrics import Metrics
from enginehouse.api.model_definitions import DefinitionRoutes
from enginehouse.api.models import ModelRoutes
from enginehouse.api.node_logs import NodeLogRoutes
from enginehouse.api.nodes import NodeRoutes
from enginehouse.api.openai import OpenAI
from enginehouse.api.operations import OperationRoutes
from enginehouse.api.pages import PageRoutes
from enginehouse.api.program import ProgramRoutes
from enginehouse.api.replicas import ReplicaRoutes
from enginehouse.api.routes import ApiRoute, RouteObjects, make_routes
from enginehouse.api.schedules import ScheduleRoutes
from enginehouse.api.serving import LINGER_SECONDS, answering, serve
from enginehouse.api.system import SystemRoutes
from enginehouse.api.tokens import TokenRoutes
from enginehouse.api.uploads import UploadRoutes
from enginehouse.api.usage import UsageRoutes
from enginehouse.api.waiting import Waiting
from enginehouse.api.workers import WorkerRoutes
from enginehouse.build_access import (
    AccessParts,
    access_loops,
    make_access,
    program_log_routes,
    session_routes,
    setting_routes,
)
from enginehouse.build_localai import CarrierSite, make_carrier, make_tokens
from enginehouse.build_outside import Outside, address_rules, make_outside, store_schedules, with_localai
from enginehouse.build_serving import (
    ModelRows,
    make_loader,
    make_metrics,
    make_model_rows,
    make_pulse,
    make_reconciler,
    make_routing,
)
from enginehouse.bus import credentials
from enginehouse.bus.credentials import BusAccounts
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.bus.violations import LOOK_SECONDS, ViolationLog
from enginehouse.core import subjects
from enginehouse.engine.engines import Engines
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.media import fetch_media
from enginehouse.fetch.pip_wheel import PipWheel
from enginehouse.fetch.worker_files import WorkerFileServers
from enginehouse.frontend.acceptance import Acceptance
from enginehouse.frontend.delivery.collector import LATE_SECONDS, PROGRESS_WRITE_SECONDS, Collector
from enginehouse.frontend.delivery.dispatcher import Dispatcher
from enginehouse.frontend.delivery.reports import WorkerReports
from enginehouse.frontend.diagnosis import Diagnosis
from enginehouse.frontend.fleet.admission import Rejections
from enginehouse.frontend.fleet.bus_credentials import STEP_SECONDS as REVOKING_SECONDS
from enginehouse.frontend.fleet.bus_credentials import BusCredentials
from enginehouse.frontend.fleet.heartbeats import Heartbeats
from enginehouse.frontend.fleet.key_files import HeldKeys, check_keys, held_keys, record_keys
from enginehouse.frontend.fleet.labels import NodeLabels
from enginehouse.frontend.fleet.node_http import NodeDoors
from enginehouse.frontend.fleet.node_views import NodeViews
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.fleet.rate_limits import RateLimits
from enginehouse.frontend.fleet.token_files import renew_token_file, take_tokens
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.galleries import STEP_SECONDS, Galleries
from enginehouse.frontend.localai import lingering
from enginehouse.frontend.localai.carrier import Carrier
from enginehouse.frontend.localai.listings import Listings
from enginehouse.frontend.localai.poller import Poller
from enginehouse.frontend.localai.worker_tokens import WorkerTokens
from enginehouse.frontend.operations.canary import CANARY_STEP_SECONDS, Canaries
from enginehouse.frontend.operations.canary_choice import CanaryRules
from enginehouse.frontend.operations.cancel import PRUNE_SECONDS, Cancellation
from enginehouse.frontend.operations.plan import Planner
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.operations.targets import Targets
from enginehouse.frontend.operations.upgrades import CHECK_SECONDS, FIRST_SECONDS, Upgrades
from enginehouse.frontend.operations.versions import Versions
from enginehouse.frontend.quiet_loops import GLANCE_SECONDS, QuietLoops, QuietParts
from enginehouse.frontend.readiness import unready_reasons
from enginehouse.frontend.serving.counts import TELL_SECONDS, SharedCounts
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.reconciler import STEP_SECONDS as RECONCILE_SECONDS
from enginehouse.frontend.serving.reconciler import USES_SECONDS, Reconciler
from enginehouse.frontend.serving.replica_views import ReplicaViews
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.serving.schedules import Schedules
from enginehouse.frontend.serving.uploads import STEP_SECONDS as UPLOADS_SECONDS
from enginehouse.frontend.watching.board import CATCH_UP_SECONDS, HINTED_SECONDS, PUBLISH_SECONDS, Board
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.hints import HINT_SECONDS, ChangeHints
from enginehouse.frontend.watching.pulse import PULSE_SECONDS, Pulse
from enginehouse.frontend.watching.summaries import Summaries
from enginehouse.frontend.watching.traffic import TrafficCounts
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.host import data_files, disk, listen
from enginehouse.host.inherited import inherited_keys, inherited_listener, inherited_port
from enginehouse.host.program import pinned_pip
from enginehouse.loop import Loop, Wakes
from enginehouse.ports import Bus, Engine
from enginehouse.settings.programs import FrontendSettings
from enginehouse.settings.shown import sqlite_url
from enginehouse.store.db import Store
from enginehouse.store.limits import StoreLimits

# After a start workers join and requests arrive, which have waited; housekeeping can wait a little longer.
CALM_SECONDS = 1.0
HOPELESS_SECONDS = 60.0  # ends intents that can never run; not urgent


class Frontend(Struct, frozen=True, kw_only=True):
    """The objects of one frontend."""

    store: Store
    board: Board
    events: Events
    hints: ChangeHints
    keys: Keys
    nodes: Nodes
    acceptance: Acceptance
    targets: Targets
    versions: Versions
    operations: Requests
    cancellation: Cancellation
    models: ModelViews
    model_rows: ModelRows
    loader: Loader
    router: Router
    collector: Collector
    reports: WorkerReports
    dispatcher: Dispatcher
    galleries: Galleries
    listings: Listings
    poller: Poller
    proofs: Proofs
    planner: Planner
    upgrades: Upgrades
    metrics: Metrics
    access: AccessParts
    violation_log: ViolationLog | None
    bus_credentials: BusCredentials
    worker_tokens: WorkerTokens | None = None
    carrier: Carrier | None = None
    labels: NodeLabels
    schedules: Schedules
    reconciler: Reconciler
    canaries: Canaries
    counts: SharedCounts
    traffic: TrafficCounts
    pulse: Pulse


async def run(settings: FrontendSettings) -> int:
    disk.make_usable(settings.data)
    data_files.refuse_unfinished(settings.data)
    inherited, listener = _listener(settings)
    accounts = credentials.load_existing(settings.data / "bus")
    wakes = Wakes()
    # With a parent, connections wait or go to other frontends until this one is ready. Alone, it answers with the
    # reason why it is not ready yet.
    waiting = Waiting()
    async with nullcontext() if inherited else answering(waiting, listener):
        waiting.reason = "the database does not answer yet"
        limits = StoreLimits(settings.store_timeout_seconds, settings.start_wait_seconds)
        store = await Store.open(settings.database_url or sqlite_url(settings.data), limits)
        store.on_back = wakes.wake_all
        held = _held_keys(settings)
        await check_keys(store, settings.data, held)
        waiting.reason = "the bus is not connected yet"
        bus = await _open_bus(settings, accounts, wakes)
    media = Client(Rules(settings.allowed_hosts))
    engine = Engines(partial(fetch_media, media))
    servers = WorkerFileServers()
    addresses = await asyncio.to_thread(address_rules, settings, listener.getsockname()[1])
    outside = with_localai(settings, make_outside(settings, store, bus, accounts, addresses), engine, servers)
    frontend = make_frontend(settings, outside, wakes)
    frontend.router.on_gone(engine.forget)
    # The first connection was made before this.
    wakes.on_connected += (frontend.bus_credentials.send_again, frontend.metrics.bus_reconnected)
    await take_tokens(frontend.keys, {"admin": settings.admin_token, "join": settings.join_token}, settings.data)
    await record_keys(store, settings.data, held)
    await frontend.galleries.restore()
    await frontend.model_rows.catalogue.restore()
    await store_schedules(frontend.schedules, settings.schedules)
    await frontend.board.restore()
    await frontend.router.step()
    await frontend.collector.listen(bus)
    await frontend.poller.listen(bus)
    await frontend.proofs.listen()
    await frontend.counts.listen()
    await frontend.hints.listen()
    if frontend.carrier is not None:
        await frontend.carrier.listen()
    wakes.loops = make_loops(settings, frontend)
    app = build(
        make_entries(settings, frontend, engine, bus, wakes, listener.getsockname()[1]),
        frontend.keys,
        frontend.metrics,
        frontend.access.audit,
        is_loopback=listen.is_loopback(settings.host),
    )
    try:
        await serve(
            app,
            listener,
            wakes.loops,
            on_notice=wakes.note_stop,
            on_stop=wakes.stop_with(frontend.events.close),
            linger_seconds=0.0 if inherited == "listening" else LINGER_SECONDS,
        )
    finally:
        await frontend.access.finish()
        await frontend.reconciler.finish()
        await bus.close()
        await engine.close()
        await servers.close()
        await media.close()
        await frontend.galleries.close()
        store.close()
    return 0


def _listener(settings: FrontendSettings) -> tuple[Literal["", "listening", "port"], socket.socket]:
    """The socket to serve on, and what a parent has given for it: the socket itself, a port to share, or nothing."""
    given = inherited_listener()
    if given is not None:
        return "listening", given
    port = inherited_port()
    if port is not None:
        return "port", listen.share(settings.host, port)
    return "", listen.bind(settings.host, settings.port)


def _held_keys(settings: FrontendSettings) -> HeldKeys:
    given = {"admin.token": settings.admin_token, "join.token": settings.join_token}
    return held_keys(
        inherited_keys(),
        is_local=not settings.database_url,
        given_tokens=[name for name, token in given.items() if token],
    )


async def _open_bus(settings: FrontendSettings, accounts: BusAccounts | None, wakes: Wakes) -> NatsBus:
    options = BusOptions(url=settings.nats_url, name="enginehouse-frontend", on_connected=wakes.connected)
    if accounts is not None:
        name = f"enginehouse-frontend-{uuid.uuid4()}"
        # Without an expiry: this process has the key that signs credentials anyway.
        made = credentials.mint_user(accounts.account_seed, name, subjects.frontend_permissions())
        options = msgspec.structs.replace(options, jwt=made.jwt, seed=made.seed)
    return await NatsBus.connect(options, limit_seconds=settings.start_wait_seconds)


def make_frontend(settings: FrontendSettings, outside: Outside, wakes: Wakes) -> Frontend:
    """Create the objects of one frontend. The program, the tests and the simulation use it."""
    store, bus, clock, owner, lease = outside.store, outside.bus, outside.clock, outside.owner, settings.lease_seconds
    events = Events()
    limits = _silence_limits(settings)
    board = Board(store, events, clock, limits)
    board.on_changes_elsewhere(nodes=wakes.of("route", "dispatch", "reconcile"), replicas=wakes.of("route"))
    hints = ChangeHints(bus, owner, wakes.of("catch-up"))
    board.on_own_changes(hints.note)
    nodes = _nodes(settings, outside, board, wakes)
    loader = make_loader(outside, board, wakes, lease)
    tokens = make_tokens(store, outside.localai)
    routing = make_routing(settings, outside, loader, tokens)
    router = routing.router
    collector = Collector(store, board, nodes, clock, owner, lingering)
    # The router first, because a request may be waiting for the route.
    collector.on_settled(wakes.of("route", "load", "dispatch", "reconcile", "canary"))
    dispatcher = Dispatcher(store, bus, board, owner=owner, lease_seconds=lease, addresses=outside.addresses)
    dispatcher.on_more(wakes.of("dispatch"))
    collector.on_old_worker(dispatcher.send_forced)
    heartbeats = Heartbeats(store, nodes)
    reports = WorkerReports(store, board, nodes, clock, collector, lingering, heartbeats)
    listings = Listings(store, reports, owner, outside.galleries.has)
    poller = Poller(store, nodes, collector, listings, limits, owner=owner, lease_seconds=lease)
    poller.on_due(wakes.of("poll-answers"))
    collector.on_ended(poller.note_ended)
    acceptance = Acceptance(store, board, wakes.of("dispatch", "route", "reconcile"), outside.pace)
    versions = Versions(outside.ask_registry, clock)
    canaries = _canaries(settings, outside, board, wakes)
    targets = Targets(outside.galleries, versions, canaries.rules)
    freshen = outside.freshen or listings.freshen
    model_rows = make_model_rows(outside, board, loader, wakes)
    site = CarrierSite(store, bus, nodes, collector, outside.galleries, router, model_rows.uploads, owner, limits)
    carrier = make_carrier(site, tokens, outside.localai)
    dispatcher.carry_with(carrier)
    keys = Keys(store)
    return Frontend(
        store=store,
        board=board,
        events=events,
        hints=hints,
        keys=keys,
        access=make_access(settings, outside, keys, RateLimits(store, keys.now, wakes.of("rates"))),
        nodes=nodes,
        acceptance=acceptance,
        targets=targets,
        versions=versions,
        operations=Requests(acceptance, targets, freshen),
        cancellation=Cancellation(
            acceptance, dispatcher.send_cancels, targets, versions, owner=owner, lease_seconds=lease
        ),
        canaries=canaries,
        listings=listings,
        poller=poller,
        planner=Planner(store, targets, versions, freshen),
        upgrades=Upgrades(store, targets, versions, freshen),
        models=ModelViews(store, outside.galleries, events),
        model_rows=model_rows,
        loader=loader,
        router=router,
        proofs=routing.proofs,
        collector=collector,
        reports=reports,
        dispatcher=dispatcher,
        galleries=outside.galleries,
        metrics=make_metrics(outside, router, loader, collector, carrier),
        violation_log=outside.violation_log,
        bus_credentials=BusCredentials(store, outside.bus_issuer, wall=time.time),
        worker_tokens=tokens,
        carrier=carrier,
        labels=NodeLabels(store, nodes, wakes.of("load", "reconcile", "route")),
        schedules=Schedules(
            store, outside.galleries, wakes.of("reconcile", "route"), has_carrier=outside.localai is not None
        ),
        reconciler=make_reconciler(outside, board, loader, router, wakes.of("load", "dispatch", "route"), lease),
        counts=routing.counts,
        traffic=routing.traffic,
        pulse=make_pulse(settings, outside, events, routing),
    )


def _nodes(settings: FrontendSettings, outside: Outside, board: Board, wakes: Wakes) -> Nodes:
    return Nodes(
        outside.store,
        board,
        stale_seconds=settings.stale_seconds,
        approve_keys=settings.approve_keys,
        verify=outside.verify,
        wake=wakes.of("dispatch", "load", "route", "reconcile"),
        addresses=outside.addresses,
    )


def _canaries(settings: FrontendSettings, outside: Outside, board: Board, wakes: Wakes) -> Canaries:
    rules = CanaryRules(seconds=settings.canary_seconds, limit_seconds=settings.canary_limit_seconds)
    lease, wake = settings.lease_seconds, wakes.of("dispatch", "reconcile")
    return Canaries(outside.store, board, rules, wake, owner=outside.owner, lease_seconds=lease)


def _silence_limits(settings: FrontendSettings) -> SilenceLimits:
    return SilenceLimits(
        settings.stall_seconds, settings.backend_install_timeout_seconds, settings.backend_upgrade_timeout_seconds
    )


def make_quiet_loops(frontend: Frontend) -> QuietLoops:
    return QuietLoops(
        QuietParts(
            store=frontend.store,
            board=frontend.board,
            keys=frontend.keys,
            router=frontend.router,
            reconciler=frontend.reconciler,
            poller=frontend.poller,
            bus_credentials=frontend.bus_credentials,
            carrier=frontend.carrier,
        )
    )


def make_loops(settings: FrontendSettings, frontend: Frontend) -> dict[str, Loop]:
    every, quiet = settings.reconcile_seconds, make_quiet_loops(frontend)
    calm = partial(Loop, first_seconds=CALM_SECONDS, is_housekeeping=True)
    loops = [
        Loop("glance", quiet.step, GLANCE_SECONDS),
        # Also bounds the delay of waiting intents: a due one is sent at most this late.
        Loop("dispatch", frontend.dispatcher.step, min(1.0, every)),
        Loop("renew", frontend.dispatcher.renew_step, settings.lease_seconds / 6),
        Loop("collect", frontend.collector.replies_step, 0.0),
        Loop("late-replies", frontend.collector.late_step, LATE_SECONDS),
        Loop("write-progress", frontend.collector.write_progress_step, PROGRESS_WRITE_SECONDS),
        Loop("health", frontend.nodes.step, max(0.2, settings.stale_seconds / 10)),
        # Registrations and reports wake these, and a fleet may have a thousand of them at once.
        Loop("load", frontend.loader.step, every, rests=1.0),
        Loop("route", frontend.router.step, every, rests=1.0),
        Loop("reconcile", frontend.reconciler.step, max(every, RECONCILE_SECONDS), rests=4.0),
        Loop("canary", frontend.canaries.step, min(every, CANARY_STEP_SECONDS)),
        Loop("note-uses", frontend.reconciler.uses_step, USES_SECONDS),
        Loop("tell-counts", frontend.counts.step, TELL_SECONDS),
        Loop("pulse", frontend.pulse.step, PULSE_SECONDS, is_housekeeping=True),
        *access_loops(frontend.access, every),
        Loop("revoke", frontend.bus_credentials.step, REVOKING_SECONDS, is_housekeeping=True),
        Loop("publish", frontend.board.step, PUBLISH_SECONDS),
        Loop("publish-models", frontend.models.step, CATCH_UP_SECONDS),
        Loop("catch-up", frontend.board.catch_up_step, CATCH_UP_SECONDS, spacing_seconds=HINTED_SECONDS),
        Loop("hint", frontend.hints.step, HINT_SECONDS),
        Loop("galleries", frontend.galleries.step, STEP_SECONDS, is_housekeeping=True),
        Loop("model-galleries", frontend.model_rows.catalogue.step, STEP_SECONDS, is_housekeeping=True),
        calm("uploads", frontend.model_rows.uploads.step, UPLOADS_SECONDS),
        calm("prune", frontend.cancellation.prune_step, PRUNE_SECONDS),
        calm("hopeless", frontend.cancellation.hopeless_step, HOPELESS_SECONDS),
        Loop("poll", frontend.poller.step, every),
        Loop("poll-answers", frontend.poller.answers_step, every),
        Loop("upgrades", frontend.upgrades.step, CHECK_SECONDS, first_seconds=FIRST_SECONDS, is_housekeeping=True),
    ]
    if frontend.carrier is not None:
        loops.append(Loop("carry", frontend.carrier.step, every))
    if frontend.violation_log is not None:
        loops.append(calm("violations", partial(asyncio.to_thread, frontend.violation_log.count_new), LOOK_SECONDS))
    quiet.hold(loops)
    return {loop.name: loop for loop in loops}


def make_entries(
    settings: FrontendSettings, frontend: Frontend, engine: Engine, bus: Bus, wakes: Wakes, port: int | None = None
) -> list[ApiRoute]:
    store, board, requests, cancellation = frontend.store, frontend.board, frontend.operations, frontend.cancellation
    unready, access = partial(unready_reasons, store, bus, frontend.nodes, wakes, settings.data), frontend.access
    workers = WorkerRoutes(
        frontend.nodes,
        frontend.reports,
        frontend.keys,
        frontend.bus_credentials,
        frontend.worker_tokens,
        heartbeat_seconds=settings.heartbeat_seconds,
    )
    diagnosis = Diagnosis(store, bus, frontend.galleries, frontend.nodes.addresses, settings.data)
    objects = RouteObjects(
        pages=PageRoutes(),
        program=ProgramRoutes(PipWheel(pinned_pip(), settings.data / "program").fetch),
        system=SystemRoutes(frontend.metrics, unready),
        workers=workers,
        nodes=NodeRoutes(
            frontend.nodes, NodeViews(store), requests, cancellation, board, frontend.labels, Rejections(store, board)
        ),
        operations=OperationRoutes(
            requests, cancellation, frontend.planner, board, frontend.canaries, Summaries(store)
        ),
        events=EventRoutes(frontend.board, frontend.models, frontend.events, frontend.pulse),
        history=HistoryRoutes(frontend.pulse.past),
        backends=BackendRoutes(frontend.nodes, frontend.galleries, frontend.upgrades),
        jobs=BackendJobRoutes(frontend.operations, frontend.galleries, frontend.board),
        models=ModelRoutes(frontend.models, frontend.loader, frontend.operations, frontend.board),
        definitions=DefinitionRoutes(
            frontend.model_rows.definitions, frontend.model_rows.installs, frontend.models, requests, board
        ),
        uploads=UploadRoutes(frontend.model_rows.uploads),
        schedules=ScheduleRoutes(frontend.schedules, frontend.loader),
        replicas=ReplicaRoutes(ReplicaViews(frontend.store, frontend.router)),
        tokens=TokenRoutes(frontend.keys, partial(renew_token_file, settings.data)),
        sessions=session_routes(access),
        audit=AuditRoutes(access.audit),
        settings=setting_routes(settings, access, port),
        usage=UsageRoutes(access.usage),
        node_logs=NodeLogRoutes(NodeDoors(frontend.store, frontend.nodes.addresses), engine),
        program_logs=program_log_routes(settings, wakes),
        doctor=DoctorRoutes(diagnosis, workers.own_node),
        inference=OpenAI(
            frontend.router,
            engine,
            Accounts(frontend.metrics, access.rate_limits, access.usage, frontend.traffic),
        ),
    )
    routes = make_routes(objects)
    objects.system.make_openapi = partial(openapi.document, routes)
    return routes
