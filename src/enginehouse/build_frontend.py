"""Builds one frontend: its objects, its loops, its routes, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import time
import uuid
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from functools import partial
from urllib.parse import urlsplit

from msgspec import Struct
from nacl.exceptions import CryptoError
from nacl.signing import VerifyKey

from enginehouse import parent
from enginehouse.api import openapi
from enginehouse.api.app import build
from enginehouse.api.backend_jobs import BackendJobRoutes
from enginehouse.api.backends import BackendRoutes
from enginehouse.api.events import EventRoutes
from enginehouse.api.metrics import Metrics
from enginehouse.api.models import ModelRoutes
from enginehouse.api.nodes import NodeRoutes
from enginehouse.api.openai import OpenAI
from enginehouse.api.operations import OperationRoutes
from enginehouse.api.routes import ApiRoute, RouteObjects, make_routes
from enginehouse.api.serving import LINGER_SECONDS, answering, serve
from enginehouse.api.system import SystemRoutes
from enginehouse.api.tokens import TokenRoutes
from enginehouse.api.waiting import Waiting
from enginehouse.api.workers import WorkerRoutes
from enginehouse.bus import credentials, embedded, revocation
from enginehouse.bus.address import parse_address
from enginehouse.bus.credentials import BusAccounts
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.bus.violations import LOOK_SECONDS, ViolationLog
from enginehouse.core import subjects
from enginehouse.core.address import Endpoint, plain_host
from enginehouse.core.artifact import Artifact
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.fetch.galleries.sources import Sources, load_builtin
from enginehouse.fetch.http.client import Client, Rules
from enginehouse.fetch.http.patience import RetryPolicy
from enginehouse.fetch.origins import open_origin
from enginehouse.fetch.registry.requests import Registries
from enginehouse.frontend.delivery.collector import LATE_SECONDS, PROGRESS_WRITE_SECONDS, Collector
from enginehouse.frontend.delivery.dispatcher import Dispatcher
from enginehouse.frontend.fleet.bus_credentials import STEP_SECONDS as REVOKING_SECONDS
from enginehouse.frontend.fleet.bus_credentials import BusCredentials, Minted
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules, Nodes
from enginehouse.frontend.fleet.tokens import WATCH_SECONDS, Keys, Role
from enginehouse.frontend.galleries import STEP_SECONDS, Galleries
from enginehouse.frontend.localai.listings import Listings
from enginehouse.frontend.localai.poller import Poller
from enginehouse.frontend.operations.acceptance import Acceptance
from enginehouse.frontend.operations.cancel import PRUNE_SECONDS, Cancellation
from enginehouse.frontend.operations.plan import Planner
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.operations.targets import Targets
from enginehouse.frontend.operations.upgrades import CHECK_SECONDS, FIRST_SECONDS, Upgrades
from enginehouse.frontend.operations.versions import LIMIT_SECONDS, AskRegistry, Versions
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.serving.proofs import Proofs
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.board import CATCH_UP_SECONDS, PUBLISH_SECONDS, Board, SilenceLimits
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.statistics import Statistics
from enginehouse.host import disk, listen
from enginehouse.loop import Loop, Wakes
from enginehouse.ports import Bus
from enginehouse.settings.file import read_credentials
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store, StoreLimits

log = logging.getLogger(__name__)

POSTGRES_PORT = 5432
RESOLVE_SECONDS = 2.0  # for the name that a worker advertises; one that nobody knows is nobody else's
REVOKE_SECONDS = 2.0  # for the server beside us; what fails is tried again
HOPELESS_SECONDS = 60.0  # what ends so was never going to run: nobody waits for it


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return random.random()


class Frontend(Struct, frozen=True):
    """The objects of one frontend."""

    store: Store
    board: Board
    events: Events
    keys: Keys
    nodes: Nodes
    operations: Requests
    models: ModelViews
    loader: Loader
    router: Router
    collector: Collector
    dispatcher: Dispatcher
    metrics: Metrics
    galleries: Galleries
    cancellation: Cancellation
    poller: Poller
    proofs: Proofs
    planner: Planner
    upgrades: Upgrades
    violation_log: ViolationLog
    bus_credentials: BusCredentials


async def run(settings: FrontendSettings) -> int:
    disk.make_usable(settings.data)
    is_inherited = parent.LISTEN_VARIABLE in os.environ  # then nobody finds the door closed, and the next one answers
    listener = _listener(settings)
    accounts = bus_accounts(settings)
    wakes = Wakes()
    # Whoever asks an `up` that is being started waits for its answer; alone, nobody else would say why.
    waiting = Waiting()
    async with nullcontext() if is_inherited else answering(waiting, listener):
        waiting.reason = "the database does not answer yet"
        limits = StoreLimits(settings.store_timeout_seconds, settings.start_wait_seconds)
        store = await Store.open(settings.database_url or f"sqlite:///{settings.data / 'enginehouse.db'}", limits)
        store.on_back = wakes.wake_all
        waiting.reason = "the bus is not connected yet"
        bus = await _open_bus(settings, accounts, wakes)
    engine = HttpEngine()
    addresses = await asyncio.to_thread(_address_rules, settings, listener.getsockname()[1])
    frontend = make_frontend(settings, store, bus, wakes, addresses)
    wakes.on_connected.append(frontend.bus_credentials.forget_told)
    await _take_tokens(settings, frontend.keys)
    await frontend.galleries.restore()
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
            linger_seconds=0.0 if is_inherited else LINGER_SECONDS,
        )
    finally:
        await bus.close()
        await engine.close()
        await frontend.galleries.close()
        store.close()
    return 0


async def _open_bus(settings: FrontendSettings, accounts: BusAccounts | None, wakes: Wakes) -> NatsBus:
    jwt, seed = "", ""
    if accounts is not None:
        name = f"enginehouse-frontend-{uuid.uuid4()}"
        # It does not end: this process has the key that makes credentials.
        made = credentials.mint_user(accounts.account_seed, name, subjects.frontend_permissions())
        jwt, seed = made.jwt, made.seed
    options = BusOptions(
        url=settings.nats_url,
        name="enginehouse-frontend",
        jwt=jwt,
        seed=seed,
        on_connected=wakes.connected,
    )
    return await NatsBus.connect(options, limit_seconds=settings.start_wait_seconds)


def make_frontend(
    settings: FrontendSettings, store: Store, bus: Bus, wakes: Wakes, addresses: AddressRules = ANYWHERE
) -> Frontend:
    clock = SystemClock()
    owner = _owner(settings)
    events = Events()
    patience = SilenceLimits(
        settings.stall_seconds, settings.backend_install_timeout_seconds, settings.backend_upgrade_timeout_seconds
    )
    board = Board(store, events, clock, patience)
    board.on_nodes_changed(wakes.of("route", "dispatch"))
    rules = Rules(settings.allowed_hosts)
    client = Client(rules)
    versions = Versions(_ask(client, rules, settings), clock)
    galleries = Galleries([load_builtin()], Sources(settings.backend_galleries, client, settings.data / "galleries"))
    nodes = Nodes(
        store,
        board,
        stale_seconds=settings.stale_seconds,
        approve_keys=settings.approve_keys,
        verify=verify,
        wake=wakes.of("dispatch", "load", "route"),
        addresses=addresses,
    )
    loader = Loader(store, board, galleries, owner=owner, lease_seconds=settings.lease_seconds)
    loader.on_step(wakes.of("load", "dispatch", "route"))
    proofs = Proofs(bus, clock, owner)
    router = Router(
        store,
        loader,
        wait_seconds=settings.model_load_wait_seconds or None,
        memory_seconds=settings.route_memory_seconds,
        proofs=proofs,
    )
    collector = Collector(store, board, nodes, clock, owner)
    # The router first: somebody may be waiting for the route.
    collector.on_settled(wakes.of("route", "load", "dispatch"))
    dispatcher = Dispatcher(store, bus, board, owner=owner, lease_seconds=settings.lease_seconds)
    dispatcher.on_more(wakes.of("dispatch"))
    collector.on_old_worker(dispatcher.send_forced)
    violation_log = ViolationLog(settings.data / "logs" / "nats.log")
    listings = Listings(store, collector, owner, galleries.has)
    poller = Poller(store, nodes, collector, listings, patience, owner=owner, lease_seconds=settings.lease_seconds)
    poller.on_due(wakes.of("poll-answers"))
    collector.on_ended(poller.note_ended)
    acceptance = Acceptance(store, board, wakes.of("dispatch", "route"))
    targets = Targets(galleries, versions)
    return Frontend(
        store=store,
        board=board,
        events=events,
        keys=Keys(store),
        nodes=nodes,
        operations=Requests(acceptance, targets, versions, listings.freshen),
        cancellation=Cancellation(
            acceptance, dispatcher.recall, targets, versions, owner=owner, lease_seconds=settings.lease_seconds
        ),
        poller=poller,
        planner=Planner(store, targets, versions, listings.freshen),
        upgrades=Upgrades(store, targets, versions, listings.freshen),
        models=ModelViews(store, galleries, events),
        loader=loader,
        router=router,
        proofs=proofs,
        collector=collector,
        dispatcher=dispatcher,
        metrics=Metrics(Statistics(store), router, (collector.violations, violation_log.counts)),
        violation_log=violation_log,
        bus_credentials=_bus_credentials(settings, store, bus_accounts(settings)),
        galleries=galleries,
    )


def make_loops(settings: FrontendSettings, frontend: Frontend) -> dict[str, Loop]:
    every = settings.reconcile_seconds
    loops = [
        # Also the clock of waits: a due intent is sent at most this much late.
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
        Loop("tell", frontend.board.step, PUBLISH_SECONDS),
        Loop("tell-models", frontend.models.step, CATCH_UP_SECONDS),
        Loop("catch-up", frontend.board.catch_up_step, CATCH_UP_SECONDS),
        Loop("galleries", frontend.galleries.step, STEP_SECONDS, is_housekeeping=True),
        Loop("prune", frontend.cancellation.prune_step, PRUNE_SECONDS, is_housekeeping=True),
        Loop("hopeless", frontend.cancellation.hopeless_step, HOPELESS_SECONDS, is_housekeeping=True),
        Loop("poll", frontend.poller.step, every),
        Loop("poll-answers", frontend.poller.answers_step, every),
        Loop("violations", partial(asyncio.to_thread, frontend.violation_log.look), LOOK_SECONDS, is_housekeeping=True),
        Loop("upgrades", frontend.upgrades.step, CHECK_SECONDS, first_seconds=FIRST_SECONDS, is_housekeeping=True),
    ]
    return {loop.name: loop for loop in loops}


def make_entries(
    settings: FrontendSettings, frontend: Frontend, engine: HttpEngine, bus: Bus, wakes: Wakes
) -> list[ApiRoute]:
    def unready() -> list[str]:
        reasons = ["this frontend is stopping"] if wakes.is_stopping else []
        # If no node has the bus either, other frontends are no better off, and warm requests do not need it.
        reasons += [] if bus.is_connected or frontend.nodes.is_bus_away else ["the bus is not connected"]
        reasons += ["the database does not answer"] if frontend.store.is_away else []
        return reasons + [f"the loop {loop.name} keeps failing" for loop in wakes.loops.values() if loop.is_stuck]

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
        tokens=TokenRoutes(frontend.keys),
        inference=OpenAI(frontend.router, engine, frontend.metrics),
    )
    routes = make_routes(objects)
    objects.system.openapi = openapi.document(routes)
    return routes


async def _take_tokens(settings: FrontendSettings, keys: Keys) -> None:
    """The tokens of the settings, or those kept in files, are known to the store under fixed names. A cluster that has
    none gets its first ones, in files of whichever frontend comes first.
    """
    given: dict[Role, str] = {"admin": settings.admin_token, "join": settings.join_token}
    for role, token in given.items():
        path = settings.data / f"{role}.token"
        if token or path.exists():
            await keys.create(role, role, token or path.read_text().strip())
            continue
        made = f"eh-{role}-{secrets.token_urlsafe(32)}"
        # The file first: a token that only a dead process knew would lock everybody out.
        disk.write_atomic(path, f"{made}\n".encode(), 0o600)
        if await keys.make_first(role, made):
            log.warning("token.made role=%s file=%s", role, path)
        else:
            path.unlink(missing_ok=True)
    await keys.step()


def _ask(client: Client, rules: Rules, settings: FrontendSettings) -> AskRegistry:
    """How registries are asked which version a tag is now."""
    registries = Registries(
        rules,
        environment=os.environ,
        credentials=read_credentials(settings.registry_credentials),
        patience=RetryPolicy(tries=2, total_seconds=LIMIT_SECONDS),
    )

    async def ask(uri: str, platform: str, sha256: str) -> Artifact:
        return await open_origin(uri, client=client, registries=registries, sha256=sha256).resolve(platform)

    return ask


def _listener(settings: FrontendSettings) -> socket.socket:
    """The socket that `up` opened and keeps open while frontends come and go, or one of our own."""
    inherited = os.environ.pop(parent.LISTEN_VARIABLE, "")
    if inherited:
        return socket.socket(fileno=int(inherited))
    return listen.bind(settings.host, settings.port)


def _owner(settings: FrontendSettings) -> str:
    """Who holds leases. Under `up` the same after a restart, because `up` sees to it that there is only one."""
    return os.environ.pop(parent.OWNER_VARIABLE, "") or str(uuid.uuid4())


def bus_accounts(settings: FrontendSettings) -> BusAccounts | None:
    """The keys of the embedded server, which sign bus credentials; None where the bus is not ours."""
    directory = settings.data / "bus"
    return credentials.load_or_create(directory) if (directory / "system.seed").exists() else None


def _bus_credentials(settings: FrontendSettings, store: Store, accounts: BusAccounts | None) -> BusCredentials:
    """What nodes get for the bus; `accounts` are those of the embedded server, None where the bus is another."""
    port = settings.nats_url.rpartition(":")[2]
    account_seed = accounts.account_seed if accounts is not None else ""
    life = settings.bus_credential_seconds

    def mint(node_id: str) -> Minted:
        allowed = subjects.worker_permissions(node_id)
        made = credentials.mint_user(account_seed, credentials.worker_name(node_id), allowed, life_seconds=life)
        return Minted(made.jwt, made.seed, made.user, made.expires_at or 0.0)

    async def revoke(revoked: Mapping[str, int]) -> None:
        assert accounts is not None
        await revocation.revoke(settings.nats_url, accounts, revoked, limit_seconds=REVOKE_SECONDS)

    def url_for(host: str) -> str:
        if settings.advertise_nats:
            told = settings.advertise_nats
            return f"nats://{told}" if ":" in told.strip("[]") else f"nats://{told}:{port}"
        if not account_seed:
            # Whatever this frontend says to get in is its own: workers of such a bus bring theirs.
            parts = urlsplit(settings.nats_url)
            return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return f"nats://[{host}]:{port}" if ":" in host else f"nats://{host}:{port}"

    return BusCredentials(
        store,
        mint=mint if account_seed else None,
        life_seconds=life,
        url_for=url_for,
        revoke=revoke if accounts is not None else None,
        wall=time.time,
    )


def _address_rules(settings: FrontendSettings, port: int) -> AddressRules:
    """What nodes may advertise. Blocks for name resolution."""
    taken = [(settings.host, port)]
    for server in parse_address(settings.nats_url).servers:
        parts = urlsplit(server)
        taken.append((parts.hostname or "", parts.port or embedded.DEFAULT_PORT))
    if settings.database_url.startswith("postgres"):
        parts = urlsplit(settings.database_url)
        taken.append((parts.hostname or "127.0.0.1", parts.port or POSTGRES_PORT))

    async def resolve(host: str) -> Collection[str]:
        try:
            async with asyncio.timeout(RESOLVE_SECONDS):
                return await asyncio.to_thread(listen.resolved, host)
        except TimeoutError:
            return ()

    endpoints = {Endpoint(plain_host(one), number) for host, number in taken for one in listen.addresses_of(host)}
    return AddressRules(settings.node_networks, frozenset(endpoints), resolve)


def verify(public_key: str, message: bytes, signature: str) -> bool:
    try:
        VerifyKey(bytes.fromhex(public_key)).verify(message, bytes.fromhex(signature))
    except (CryptoError, ValueError, TypeError):
        return False
    return True
