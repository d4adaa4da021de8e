"""Builds one frontend: its objects, its loops and its routes, and starts and stops them in order.

The only place that chooses the frontend's adapters. `make_frontend` gets everything outside as an argument (`Outside`),
so the program, the tests and the simulation run the same objects.
"""

from __future__ import annotations

import asyncio
import socket
import time
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from enginehouse import frontends, parent
from enginehouse.api import openapi
from enginehouse.api.app import build
from enginehouse.api.backend_jobs import BackendJobRoutes
from enginehouse.api.backends import BackendRoutes
from enginehouse.api.events import EventRoutes
from enginehouse.api.metrics import Metrics
from enginehouse.api.model_definitions import DefinitionRoutes
from enginehouse.api.models import ModelRoutes
from enginehouse.api.node_logs import NodeLogRoutes
from enginehouse.api.nodes import NodeRoutes
from enginehouse.api.openai import OpenAI
from enginehouse.api.operations import OperationRoutes
from enginehouse.api.routes import ApiRoute, RouteObjects, make_routes
from enginehouse.api.serving import LINGER_SECONDS, answering, serve
from enginehouse.api.system import SystemRoutes
from enginehouse.api.tokens import TokenRoutes
from enginehouse.api.uploads import UploadRoutes
from enginehouse.api.waiting import Waiting
from enginehouse.api.workers import WorkerRoutes
from enginehouse.build_models import (
    ModelOutside,
    ModelRowParts,
    ModelRows,
    make_model_rows,
    model_outside,
    registries_of,
)
from enginehouse.bus import credentials, revocation
from enginehouse.bus.address import parse_address, worker_url
from enginehouse.bus.credentials import BusAccounts
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.bus.violations import LOOK_SECONDS, ViolationLog
from enginehouse.core import subjects
from enginehouse.core.address import Endpoint, plain_host
from enginehouse.core.artifact import Artifact
from enginehouse.core.ids import NodeId
from enginehouse.engine.engines import Engines
from enginehouse.fetch.galleries.sources import Sources, load_builtin
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.media import fetch_media
from enginehouse.fetch.origins import open_origin
from enginehouse.frontend.acceptance import Acceptance
from enginehouse.frontend.delivery.collector import LATE_SECONDS, PROGRESS_WRITE_SECONDS, Collector
from enginehouse.frontend.delivery.dispatcher import Dispatcher
from enginehouse.frontend.fleet.bus_credentials import STEP_SECONDS as REVOKING_SECONDS
from enginehouse.frontend.fleet.bus_credentials import BusCredentials, BusIssuer, Minted
from enginehouse.frontend.fleet.node_http import NodeDoors
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules, Nodes, Verify
from enginehouse.frontend.fleet.token_files import take_tokens
from enginehouse.frontend.fleet.tokens import WATCH_SECONDS, Keys
from enginehouse.frontend.galleries import STEP_SECONDS, Galleries
from enginehouse.frontend.localai import lingering
from enginehouse.frontend.localai.listings import Listings
from enginehouse.frontend.localai.poller import Poller
from enginehouse.frontend.operations.cancel import PRUNE_SECONDS, Cancellation
from enginehouse.frontend.operations.plan import Planner
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.operations.targets import Freshen, Targets
from enginehouse.frontend.operations.upgrades import CHECK_SECONDS, FIRST_SECONDS, Upgrades
from enginehouse.frontend.operations.versions import AskRegistry, Versions
from enginehouse.frontend.readiness import unready_reasons
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.serving.uploads import STEP_SECONDS as UPLOADS_SECONDS
from enginehouse.frontend.watching.board import CATCH_UP_SECONDS, PUBLISH_SECONDS, Board
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.statistics import Statistics
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.host import disk, listen, signing
from enginehouse.host.clock import SystemClock
from enginehouse.loop import Loop, Wakes
from enginehouse.ports import Bus, Clock, Engine
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store
from enginehouse.store.limits import StoreLimits

POSTGRES_PORT = 5432
RESOLVE_SECONDS = 2.0  # for the name that a worker advertises; a name that does not resolve in time has no addresses
REVOKE_SECONDS = 2.0  # for the server on this machine; the loop retries a failure
HOPELESS_SECONDS = 60.0  # ends intents that can never run; not urgent


class Outside(Struct, frozen=True, kw_only=True):
    """Everything outside of a frontend. Tests and the simulation pass their own."""

    store: Store
    bus: Bus
    clock: Clock
    ask_registry: AskRegistry  # resolves a tag to a version
    galleries: Galleries
    owner: str  # of this frontend's leases
    verify: Verify = signing.verify
    addresses: AddressRules = ANYWHERE
    bus_issuer: BusIssuer = BusIssuer()
    violation_log: ViolationLog | None = None  # of the embedded bus server
    models: ModelOutside = ModelOutside()
    freshen: Freshen | None = None  # None asks LocalAI's workers before targets are chosen


class Frontend(Struct, frozen=True, kw_only=True):
    """The objects of one frontend."""

    store: Store
    board: Board
    events: Events
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
    dispatcher: Dispatcher
    galleries: Galleries
    listings: Listings
    poller: Poller
    proofs: Proofs
    planner: Planner
    upgrades: Upgrades
    metrics: Metrics
    violation_log: ViolationLog | None
    bus_credentials: BusCredentials


async def run(settings: FrontendSettings) -> int:
    disk.make_usable(settings.data)
    inherited, listener = _listener(settings)
    accounts = credentials.load_existing(settings.data / "bus")
    wakes = Wakes()
    # With a parent, connections wait or go to other frontends until this one is ready. Alone, it answers with the
    # reason why it is not ready yet.
    waiting = Waiting()
    async with nullcontext() if inherited else answering(waiting, listener):
        waiting.reason = "the database does not answer yet"
        limits = StoreLimits(settings.store_timeout_seconds, settings.start_wait_seconds)
        store = await Store.open(settings.database_url or f"sqlite:///{settings.data / 'enginehouse.db'}", limits)
        store.on_back = wakes.wake_all
        waiting.reason = "the bus is not connected yet"
        bus = await _open_bus(settings, accounts, wakes)
    media = Client(Rules(settings.allowed_hosts))
    engine = Engines(partial(fetch_media, media))
    addresses = await asyncio.to_thread(_address_rules, settings, listener.getsockname()[1])
    outside = make_outside(settings, store, bus, accounts, addresses)
    frontend = make_frontend(settings, outside, wakes)
    wakes.on_connected.append(frontend.bus_credentials.send_again)
    await take_tokens(frontend.keys, {"admin": settings.admin_token, "join": settings.join_token}, settings.data)
    await frontend.galleries.restore()
    await frontend.model_rows.catalogue.restore()
    await frontend.board.restore()
    await frontend.router.step()
    await frontend.collector.listen(bus)
    await frontend.poller.listen(bus)
    await frontend.proofs.listen()
    wakes.loops = make_loops(settings, frontend)
    app = build(
        make_entries(settings, frontend, engine, bus, wakes),
        frontend.keys,
        frontend.metrics,
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
        await bus.close()
        await engine.close()
        await media.close()
        await frontend.galleries.close()
        store.close()
    return 0


def _listener(settings: FrontendSettings) -> tuple[Literal["", "listening", "port"], socket.socket]:
    """The socket to serve on, and what a parent has given for it: the socket itself, a port to share, or nothing."""
    given = parent.inherited_listener()
    if given is not None:
        return "listening", given
    port = frontends.inherited_port()
    if port is not None:
        return "port", listen.share(settings.host, port)
    return "", listen.bind(settings.host, settings.port)


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
    limits = SilenceLimits(
        settings.stall_seconds, settings.backend_install_timeout_seconds, settings.backend_upgrade_timeout_seconds
    )
    board = Board(store, events, clock, limits)
    board.on_nodes_changed(wakes.of("route", "dispatch"))
    galleries = outside.galleries
    nodes = Nodes(
        store,
        board,
        stale_seconds=settings.stale_seconds,
        approve_keys=settings.approve_keys,
        verify=outside.verify,
        wake=wakes.of("dispatch", "load", "route"),
        addresses=outside.addresses,
    )
    loader = Loader(store, board, galleries, owner=owner, lease_seconds=lease)
    loader.on_step(wakes.of("load", "dispatch", "route"))
    proofs = Proofs(bus, clock, owner)
    router = Router(
        store,
        loader,
        wait_seconds=settings.model_load_wait_seconds or None,
        memory_seconds=settings.route_memory_seconds,
        proofs=proofs,
        key_of=outside.models.key_of,
    )
    collector = Collector(store, board, nodes, clock, owner, lingering)
    # The router first, because a request may be waiting for the route.
    collector.on_settled(wakes.of("route", "load", "dispatch"))
    dispatcher = Dispatcher(store, bus, board, owner=owner, lease_seconds=lease)
    dispatcher.on_more(wakes.of("dispatch"))
    collector.on_old_worker(dispatcher.send_forced)
    listings = Listings(store, collector, owner, galleries.has)
    poller = Poller(store, nodes, collector, listings, limits, owner=owner, lease_seconds=lease)
    poller.on_due(wakes.of("poll-answers"))
    collector.on_ended(poller.note_ended)
    acceptance = Acceptance(store, board, wakes.of("dispatch", "route"))
    versions = Versions(outside.ask_registry, clock)
    targets = Targets(galleries, versions)
    freshen = outside.freshen or listings.freshen
    violations = [collector.violations, *([outside.violation_log.counts] if outside.violation_log is not None else [])]
    return Frontend(
        store=store,
        board=board,
        events=events,
        keys=Keys(store),
        nodes=nodes,
        acceptance=acceptance,
        targets=targets,
        versions=versions,
        operations=Requests(acceptance, targets, freshen),
        cancellation=Cancellation(
            acceptance, dispatcher.send_cancels, targets, versions, owner=owner, lease_seconds=lease
        ),
        listings=listings,
        poller=poller,
        planner=Planner(store, targets, versions, freshen),
        upgrades=Upgrades(store, targets, versions, freshen),
        models=ModelViews(store, galleries, events),
        model_rows=_model_rows(outside, board, loader, wakes),
        loader=loader,
        router=router,
        proofs=proofs,
        collector=collector,
        dispatcher=dispatcher,
        galleries=galleries,
        metrics=Metrics(Statistics(store), router, violations),
        violation_log=outside.violation_log,
        bus_credentials=BusCredentials(store, outside.bus_issuer, wall=time.time),
    )


def _model_rows(outside: Outside, board: Board, loader: Loader, wakes: Wakes) -> ModelRows:
    parts = ModelRowParts(
        store=outside.store,
        board=board,
        galleries=outside.galleries,
        loader=loader,
        wake=wakes.of("load", "dispatch", "route"),
    )
    return make_model_rows(parts, outside.models)


def make_loops(settings: FrontendSettings, frontend: Frontend) -> dict[str, Loop]:
    every = settings.reconcile_seconds
    loops = [
        # Also bounds the delay of waiting intents: a due one is sent at most this late.
        Loop("dispatch", frontend.dispatcher.step, min(1.0, every)),
        Loop("renew", frontend.dispatcher.renew_step, settings.lease_seconds / 6),
        Loop("collect", frontend.collector.replies_step, 0.0),
        Loop("late-replies", frontend.collector.late_step, LATE_SECONDS),
        Loop("write-progress", frontend.collector.write_progress_step, PROGRESS_WRITE_SECONDS),
        Loop("health", frontend.nodes.step, max(0.2, settings.stale_seconds / 10)),
        Loop("load", frontend.loader.step, every),
        Loop("route", frontend.router.step, every),
        Loop("keys", frontend.keys.step, every),
        Loop("watch-keys", frontend.keys.watch_step, WATCH_SECONDS),
        Loop("revoke", frontend.bus_credentials.step, REVOKING_SECONDS, is_housekeeping=True),
        Loop("publish", frontend.board.step, PUBLISH_SECONDS),
        Loop("publish-models", frontend.models.step, CATCH_UP_SECONDS),
        Loop("catch-up", frontend.board.catch_up_step, CATCH_UP_SECONDS),
        Loop("galleries", frontend.galleries.step, STEP_SECONDS, is_housekeeping=True),
        Loop("model-galleries", frontend.model_rows.catalogue.step, STEP_SECONDS, is_housekeeping=True),
        Loop("uploads", frontend.model_rows.uploads.step, UPLOADS_SECONDS, is_housekeeping=True),
        Loop("prune", frontend.cancellation.prune_step, PRUNE_SECONDS, is_housekeeping=True),
        Loop("hopeless", frontend.cancellation.hopeless_step, HOPELESS_SECONDS, is_housekeeping=True),
        Loop("poll", frontend.poller.step, every),
        Loop("poll-answers", frontend.poller.answers_step, every),
        Loop("upgrades", frontend.upgrades.step, CHECK_SECONDS, first_seconds=FIRST_SECONDS, is_housekeeping=True),
    ]
    if frontend.violation_log is not None:
        count = partial(asyncio.to_thread, frontend.violation_log.count_new)
        loops.append(Loop("violations", count, LOOK_SECONDS, is_housekeeping=True))
    return {loop.name: loop for loop in loops}


def make_entries(
    settings: FrontendSettings, frontend: Frontend, engine: Engine, bus: Bus, wakes: Wakes
) -> list[ApiRoute]:
    unready = partial(unready_reasons, frontend.store, bus, frontend.nodes, wakes)
    objects = RouteObjects(
        system=SystemRoutes(frontend.metrics, unready),
        workers=WorkerRoutes(
            frontend.nodes,
            frontend.collector,
            frontend.keys,
            frontend.bus_credentials,
            heartbeat_seconds=settings.heartbeat_seconds,
        ),
        nodes=NodeRoutes(frontend.nodes, frontend.operations, frontend.cancellation, frontend.board),
        operations=OperationRoutes(frontend.operations, frontend.cancellation, frontend.planner, frontend.board),
        events=EventRoutes(frontend.board, frontend.models, frontend.events),
        backends=BackendRoutes(frontend.nodes, frontend.galleries, frontend.upgrades),
        jobs=BackendJobRoutes(frontend.operations, frontend.galleries, frontend.board),
        models=ModelRoutes(frontend.models, frontend.loader, frontend.operations, frontend.board),
        definitions=DefinitionRoutes(
            frontend.model_rows.definitions,
            frontend.model_rows.installs,
            frontend.models,
            frontend.operations,
            frontend.board,
        ),
        uploads=UploadRoutes(frontend.model_rows.uploads),
        tokens=TokenRoutes(frontend.keys),
        node_logs=NodeLogRoutes(NodeDoors(frontend.store, frontend.nodes.addresses), engine),
        inference=OpenAI(frontend.router, engine, frontend.metrics),
    )
    routes = make_routes(objects)
    objects.system.openapi = openapi.document(routes)
    return routes


def make_outside(
    settings: FrontendSettings,
    store: Store,
    bus: Bus,
    accounts: BusAccounts | None = None,
    addresses: AddressRules = ANYWHERE,
) -> Outside:
    """Create the outside of the program: real registries and galleries."""
    client = Client(rules := Rules(settings.allowed_hosts))
    return Outside(
        store=store,
        bus=bus,
        clock=SystemClock(),
        ask_registry=_registry_question(client, rules, settings),
        galleries=Galleries([load_builtin()], Sources(settings.backend_galleries, client, settings.data / "galleries")),
        owner=parent.inherited_owner() or str(uuid.uuid4()),
        addresses=addresses,
        bus_issuer=_bus_issuer(settings, accounts),
        violation_log=ViolationLog(settings.data / "logs" / "nats.log"),
        models=model_outside(settings, client, rules, addresses),
    )


def _registry_question(client: Client, rules: Rules, settings: FrontendSettings) -> AskRegistry:
    """Return a function that resolves a tag by a query to its registry."""
    registries = registries_of(rules, settings)

    async def ask(uri: str, platform: str, sha256: str) -> Artifact:
        return await open_origin(uri, client=client, registries=registries, sha256=sha256).resolve(platform)

    return ask


def _bus_issuer(settings: FrontendSettings, accounts: BusAccounts | None) -> BusIssuer:
    """Create the issuer of bus credentials. `accounts` are those of the embedded server; None for another bus."""
    life = settings.bus_credential_seconds
    is_embedded = accounts is not None
    url_for = partial(worker_url, url=settings.nats_url, advertised=settings.advertise_nats, is_embedded=is_embedded)
    if accounts is None:
        return BusIssuer(life_seconds=life, url_for=url_for)
    embedded_accounts, seed = accounts, accounts.account_seed

    def mint(node_id: NodeId) -> Minted:
        allowed = subjects.worker_permissions(node_id)
        made = credentials.mint_user(seed, credentials.worker_name(node_id), allowed, life_seconds=life)
        return Minted(made.jwt, made.seed, made.user, made.expires_at or 0.0)

    async def revoke(revoked: Mapping[str, int]) -> None:
        await revocation.revoke(settings.nats_url, embedded_accounts, revoked, limit_seconds=REVOKE_SECONDS)

    return BusIssuer(mint=mint, life_seconds=life, url_for=url_for, revoke=revoke)


def _address_rules(settings: FrontendSettings, port: int) -> AddressRules:
    """Return the rules for addresses that nodes advertise. Blocks: resolves names."""
    taken = [(settings.host, port), *parse_address(settings.nats_url).endpoints]
    if settings.database_url.startswith("postgres"):
        parts = urlsplit(settings.database_url)
        taken.append((parts.hostname or "127.0.0.1", parts.port or POSTGRES_PORT))
    resolve = partial(listen.resolve_within, limit_seconds=RESOLVE_SECONDS)
    endpoints = {Endpoint(plain_host(one), number) for host, number in taken for one in listen.addresses_of(host)}
    return AddressRules(settings.node_networks, frozenset(endpoints), resolve)
