"""One frontend with a real SQLite store, a bus in memory that records and delivers, and a clock that tests move.

Steps are called by hand, so a test says exactly what happens in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from nacl.signing import SigningKey
from tests.bus.memory import MemoryBus, MemoryNetwork

from enginehouse.build_frontend import make_frontend
from enginehouse.build_localai import LocalaiOutside
from enginehouse.build_outside import Outside
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import Unavailable, Upstream
from enginehouse.core.gallery_entry import Gallery, GalleryEntry
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.node import Node, registration_message
from enginehouse.core.operation import BackendRequest
from enginehouse.core.progress import Progress
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report
from enginehouse.core.views import OperationView
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules, Registered
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.targets import use_last_reports
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import RouteProofs, RouterParts
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.loop import Loop, Wakes
from enginehouse.ports import Message
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store import db, nodes, operations
from enginehouse.store.db import Connection, Store

T = TypeVar("T")
ADDRESS = "h:1"  # of every machine of ours; replicas listen there, or on one of the ports after it
STALE_SECONDS = 30.0
LEASE_SECONDS = 30.0
MODEL = Model(name="tiny", backend="llama-cpp", files=(ModelFile("tiny.gguf", "builtin:tiny.gguf", "ab", 3),))
GALLERY = Gallery(
    name="builtin",
    url="builtin:",
    backends=(
        GalleryEntry(name="llama-cpp", capabilities={"default": "engine"}),
        GalleryEntry(name="engine", uri="pypi:engine==1", requirements=("engine==1 --hash=sha256:0",), version="1"),
        GalleryEntry(name="cuda-only", capabilities={"nvidia": "engine"}),
        GalleryEntry(name="other", uri="pypi:other==1", platforms=("linux/amd64",)),
    ),
    models=(MODEL,),
)
IMAGES = Gallery(
    name="images",
    url="https://images.example/index.yaml",
    backends=(GalleryEntry(name="image", uri="registry.example/image:latest", version="2"),),
)
UNREAD = Gallery(name="images", url=IMAGES.url, problem="it has not been fetched yet", is_expected=True)


class Time:
    """The store's clock and the monotonic one, both ahead of the real ones by what a test has let pass."""

    def __init__(self) -> None:
        self.passed = 0.0

    def monotonic(self) -> float:
        return self.passed

    def random(self) -> float:
        return 0.5


PATIENCE = SilenceLimits()


class Registry:
    """What a registry would say; a test sets the digests, and takes it away."""

    def __init__(self) -> None:
        self.digests: dict[str, str] = {}
        self.asked: list[tuple[str, str]] = []

    async def ask(self, uri: str, platform: str, sha256: str) -> Artifact:
        self.asked.append((uri, platform))
        if uri not in self.digests:
            raise Upstream(f"cannot ask for {uri}: nobody answers")
        layer = Layer(digest="sha256:" + "1" * 64, size_bytes=1000, compression="gzip")
        return Artifact(uri=uri, digest=self.digests[uri], platform=platform, layers=(layer,))


class WatchedStore(Store):
    """The real store; a test may take it away, or look at what every transaction left behind."""

    is_away = False
    after: Callable[[Connection], None] | None = None

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        self._check()
        result = await super().transaction(work)
        if self.after is not None:
            await super().transaction(self.after)
        return result

    async def read(self, work: Callable[[Connection], T]) -> T:
        self._check()
        return await super().read(work)

    async def look(self, work: Callable[[Connection], T]) -> T:
        self._check()
        return await super().look(work)

    def _check(self) -> None:
        if self.is_away:
            raise Unavailable("cannot use the database", code="store_unavailable")


class World:
    def __init__(
        self,
        store: WatchedStore,
        time: Time,
        *,
        owner: str = "me",
        approve_keys: Sequence[str] = (),
        addresses: AddressRules = ANYWHERE,
        galleries: Sequence[Gallery] = (GALLERY, IMAGES),
        localai: LocalaiOutside | None = None,
    ) -> None:
        self.store = store
        self.time = time
        # Steps are taken by hand and workers answer by hand, so that nothing is said unless the test says it.
        self.bus = MemoryBus(MemoryNetwork(tells_no_responders=False))
        self.registry = Registry()
        self.wakes = Wakes()
        settings = FrontendSettings(
            data=Path("/nowhere"),
            stale_seconds=STALE_SECONDS,
            lease_seconds=LEASE_SECONDS,
            approve_keys=tuple(approve_keys),
            model_load_wait_seconds=5.0,
        )
        outside = Outside(
            store=store,
            bus=self.bus,
            clock=time,
            ask_registry=self.registry.ask,
            galleries=Galleries(galleries),
            owner=owner,
            addresses=addresses,
            freshen=use_last_reports,
            localai=localai,
        )
        made = self.frontend = make_frontend(settings, outside, self.wakes)
        self.events, self.board, self.galleries = made.events, made.board, made.galleries
        self.traffic, self.pulse = made.traffic, made.pulse
        self.nodes, self.keys = made.nodes, made.keys
        self.versions, self.targets, self.acceptance = made.versions, made.targets, made.acceptance
        self.operations, self.cancellation, self.canaries = made.operations, made.cancellation, made.canaries
        self.upgrades, self.planner = made.upgrades, made.planner
        self.collector, self.reports, self.dispatcher = made.collector, made.reports, made.dispatcher
        self.listings, self.poller = made.listings, made.poller
        self.carrier, self.worker_tokens, self.proofs = made.carrier, made.worker_tokens, made.proofs
        self.loader, self.models, self.router = made.loader, made.models, made.router
        self.reconciler, self.schedules, self.labels, self.counts = (
            made.reconciler,
            made.schedules,
            made.labels,
            made.counts,
        )
        for shared in (made.reports.transactions, made.reports.heartbeats.transactions):
            shared.gather_seconds = 0.0
        self.wakes.loops["dispatch"] = Loop("dispatch", self.dispatcher.step, 60.0)  # never run: `woken` looks at it

    @property
    def woken(self) -> bool:
        """Whether the dispatcher was told that there is something to send."""
        return self.wakes.loops["dispatch"]._woken.is_set()

    async def start(self) -> None:
        await self.collector.listen(self.bus)
        await self.poller.listen(self.bus)
        if self.carrier is not None:
            await self.carrier.listen()
        await self.board.restore()

    # Nodes ----------------------------------------------------------------------------------------

    async def join(self, name: str, *, approve: bool = True, heartbeat: bool = True, is_localai: bool = False) -> Node:
        """A worker of ours, or one of LocalAI's, which has no key."""
        # The same name is the same machine.
        key = SigningKey(hashlib.sha256(name.encode()).digest())
        asked = registration(name) if is_localai else await self.signed(name, key)
        registered = await self.nodes.register(asked)
        if approve:
            await self.nodes.approve(registered.node.id)
        if heartbeat:
            await self.reports.heartbeat(registered.node.id, node_api.HeartbeatRequest())
        return (await self.nodes.get(registered.node.id))[0]

    async def join_many(self, *names: str) -> list[Node]:
        return [await self.join(name) for name in names]

    async def register(self, name: str, key: SigningKey) -> Registered:
        return await self.nodes.register(await self.signed(name, key))

    async def signed(self, name: str, key: SigningKey, **fields: object) -> node_api.RegisterRequest:
        return signed(name, key, challenge=await self.nodes.challenge(), **fields)

    async def health(self, node_id: NodeId) -> str:
        return (await self.nodes.get(node_id))[0].health

    async def now(self) -> float:
        return await self.store.transaction(db.now)

    async def report(self, node_id: NodeId, **fields: object) -> None:
        """A report taken now, unless it says otherwise."""
        plain: dict[str, object] = {"boot_id": "boot", "sequence": 1, "mark": await self.now(), "boot_mark": 1.0}
        await self.reports.report(node_id, Report(**(plain | fields)))  # type: ignore[arg-type]

    # Requests ---------------------------------------------------------------------------------------

    async def install(self, *node_names: str, name: str = "llama-cpp", force: bool = False) -> OperationView:
        return await self.request("install", *node_names, name=name, force=force)

    async def request(self, kind: str, *node_names: str, name: str = "llama-cpp", force: bool = False) -> OperationView:
        request = BackendRequest(
            kind=kind,  # type: ignore[arg-type]  # a plain word in the tests
            name=name,
            nodes=node_names or None,
            force=force or kind == "delete",  # also where models run
        )
        return await self.board.view(await self.operations.request(request, Requester(author="someone")))

    async def intent(self, view: OperationView, row: int = 0) -> Intent:
        assert isinstance(view.nodes, list)
        intent_id = view.nodes[row].intent
        found = await self.store.transaction(lambda connection: operations.intent(connection, intent_id))
        assert found is not None
        return found

    async def intent_now(self, intent: Intent) -> Intent:
        found = await self.store.transaction(lambda connection: operations.intent(connection, intent.id))
        assert found is not None
        return found

    async def open_intents(self, node_id: NodeId) -> list[Intent]:
        return await self.store.transaction(lambda connection: operations.open_on(connection, node_id))

    async def set_health(self, node_id: NodeId, health: str) -> None:
        now = await self.now()
        await self.store.transaction(lambda c: nodes.set_health(c, node_id, health, now))  # type: ignore[arg-type]

    # The worker's side ----------------------------------------------------------------------------

    async def reply(self, intent: Intent, outcome: Outcome | None, *, attempt: int | None = None) -> None:
        """A worker's answer to an attempt (None: nobody listens there), and what the frontend makes of it."""
        self.bus.deliver(self.reply_to(intent, outcome, attempt=attempt))
        await self.collector.replies_step()

    def reply_to(self, intent: Intent, outcome: Outcome | None, *, attempt: int | None = None) -> Message:
        subject = subjects.reply_subject(intent.node_id, intent.id, intent.attempt if attempt is None else attempt)
        payload = b"" if outcome is None else wire.encode(wire.AnyReply(outcome=outcome))
        return Message(subject, payload, no_responders=outcome is None)

    def progress(self, intent: Intent, progress: Progress, *, node_id: str | None = None) -> None:
        sender = node_id or intent.node_id
        event = wire.progress_event("op", NodeId(sender), "engine", intent.id, progress)
        self.bus.deliver(Message(subjects.progress_subject(NodeId(sender), "op"), wire.encode(event)))


def registration(name: str, **fields: object) -> node_api.RegisterRequest:
    plain: dict[str, object] = {"name": name, "platform": "linux/amd64", "capability": "default", "cores": 2}
    return node_api.RegisterRequest(**(plain | fields))  # type: ignore[arg-type]


def signed(name: str, key: SigningKey, **fields: object) -> node_api.RegisterRequest:
    public = key.verify_key.encode().hex()
    asked = registration(name, **({"public_key": public, "address": ADDRESS} | fields))
    message = registration_message(name, public, (asked.address, asked.http_address), asked.challenge)
    return msgspec.structs.replace(asked, signature=key.sign(message).signature.hex())


def installed(name: str, digest: str, generation: int = 0) -> InstalledBackend:
    return InstalledBackend(name=name, is_system=False, is_meta=False, digest=digest, generation=generation)


def pointer(name: str, directory: str) -> InstalledBackend:
    return InstalledBackend(name=name, is_system=False, is_meta=True, meta_backend_for=directory)


def running(nonce: str, model: str = "tiny", generation: int = 0) -> RunningReplica:
    return RunningReplica(model_id=model, replica_index=0, address="h:1", nonce=nonce, generation=generation)


def plain_parts(proofs: RouteProofs | None = None) -> RouterParts:
    """Without keys, and without regard to prefixes."""
    return RouterParts(rows=RouteRows(), proofs=proofs, prefixes=Prefixes(lambda: 0.0), queues=RequestQueues())
