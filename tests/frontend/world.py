"""One frontend with a real SQLite store, a bus in memory that records and delivers, and a clock that tests move.

Steps are called by hand, so a test says exactly what happens in which order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct
from nacl.signing import SigningKey

from enginehouse.build_frontend import verify
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import EnginehouseError, Unavailable, Upstream
from enginehouse.core.gallery import Gallery, GalleryEntry
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.node import Node, registration_message
from enginehouse.core.operation import BackendRequest
from enginehouse.core.progress import Progress
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.collector import Collector
from enginehouse.frontend.delivery.dispatcher import Dispatcher
from enginehouse.frontend.fleet.nodes import ANYWHERE, AddressRules, Nodes, Registered
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.listings import Listings
from enginehouse.frontend.localai.poller import Poller
from enginehouse.frontend.operations.acceptance import Acceptance, Requester
from enginehouse.frontend.operations.cancel import Cancellation
from enginehouse.frontend.operations.plan import Planner
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.operations.targets import Targets
from enginehouse.frontend.operations.upgrades import Upgrades
from enginehouse.frontend.operations.versions import Versions
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.serving.router import Router
from enginehouse.frontend.watching.board import Board, SilenceLimits
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.views import OperationView
from enginehouse.ports import Message
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


class Published(Struct, frozen=True):
    subject: str
    payload: bytes
    reply: str


class MemoryBus:
    """`ports.Bus`: keeps what is published; `deliver` hands a message to whoever subscribed."""

    def __init__(self) -> None:
        self.published: list[Published] = []
        self.is_connected = True
        self.is_refused = False
        self.renewed: list[tuple[str, str]] = []
        self.error: EnginehouseError | None = None
        self._receivers: dict[str, Callable[[Message], None]] = {}
        self._polls: Callable[[Message], None] | None = None

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if self.error is not None:
            raise self.error
        self.published.append(Published(subject, payload, reply))

    async def subscribe(self, subject: str, receive: Callable[[Message], None]) -> None:
        if subject.startswith(subjects.POLLS):
            self._polls = receive
        self._receivers[subject] = receive

    async def renew(self, jwt: str, seed: str) -> None:
        self.renewed.append((jwt, seed))

    async def close(self) -> None:
        self.is_connected = False

    def deliver(self, message: Message) -> None:
        if message.subject.startswith(subjects.POLLS):
            assert self._polls is not None
            self._polls(message)
            return
        kind = subjects.ALL_REPLIES if message.subject.startswith(subjects.INBOX) else subjects.ALL_PROGRESS
        self._receivers[kind](message)

    def take(self) -> list[Published]:
        taken, self.published = self.published, []
        return taken


class WatchedStore(Store):
    """The real store; a test may take it away, or look at what every transaction left behind."""

    is_away = False
    after: Callable[[Connection], None] | None = None

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        if self.is_away:
            raise Unavailable("cannot use the database", code="store_unavailable")
        result = await super().transaction(work)
        if self.after is not None:
            await super().transaction(self.after)
        return result


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
    ) -> None:
        self.store = store
        self.time = time
        self.woken = 0
        self.bus = MemoryBus()
        self.events = Events()
        self.board = Board(store, self.events, time, PATIENCE)
        self.galleries = Galleries(galleries)
        self.nodes = Nodes(
            store,
            self.board,
            stale_seconds=STALE_SECONDS,
            approve_keys=approve_keys,
            verify=verify,
            wake=self._wake,
            addresses=addresses,
        )
        self.registry = Registry()
        self.versions = Versions(self.registry.ask, time)
        self.targets = Targets(self.galleries, self.versions)
        self.acceptance = Acceptance(store, self.board, self._wake)
        self.operations = Requests(self.acceptance, self.targets, self.versions)
        self.collector = Collector(store, self.board, self.nodes, time, owner)
        self.dispatcher = Dispatcher(store, self.bus, self.board, owner=owner, lease_seconds=LEASE_SECONDS)
        self.collector.on_old_worker(self.dispatcher.send_forced)
        self.cancellation = Cancellation(
            self.acceptance,
            self.dispatcher.recall,
            self.targets,
            self.versions,
            owner=owner,
            lease_seconds=LEASE_SECONDS,
        )
        self.listings = Listings(store, self.collector, owner, self.galleries.has)
        self.poller = Poller(
            store, self.nodes, self.collector, self.listings, PATIENCE, owner=owner, lease_seconds=LEASE_SECONDS
        )
        self.collector.on_ended(self.poller.note_ended)
        self.upgrades = Upgrades(store, self.targets, self.versions)
        self.planner = Planner(store, self.targets, self.versions)
        self.loader = Loader(store, self.board, self.galleries, owner=owner, lease_seconds=LEASE_SECONDS)
        self.models = ModelViews(store, self.galleries, self.events)
        self.router = Router(store, self.loader, wait_seconds=5.0)
        self.keys = Keys(store)

    def _wake(self) -> None:
        self.woken += 1

    async def start(self) -> None:
        await self.collector.listen(self.bus)
        await self.poller.listen(self.bus)
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
            await self.nodes.heartbeat(registered.node.id, node_api.HeartbeatRequest())
        return (await self.nodes.get(registered.node.id))[0]

    async def join_many(self, *names: str) -> list[Node]:
        return [await self.join(name) for name in names]

    async def register(self, name: str, key: SigningKey) -> Registered:
        return await self.nodes.register(await self.signed(name, key))

    async def signed(self, name: str, key: SigningKey, **fields: object) -> node_api.RegisterRequest:
        return signed(name, key, challenge=await self.nodes.challenge(), **fields)

    async def health(self, node_id: str) -> str:
        return (await self.nodes.get(node_id))[0].health

    async def now(self) -> float:
        return await self.store.transaction(db.now)

    async def report(self, node_id: str, **fields: object) -> None:
        """A report taken now, unless it says otherwise."""
        plain: dict[str, object] = {"boot_id": "boot", "sequence": 1, "mark": await self.now(), "boot_mark": 1.0}
        await self.collector.report(node_id, Report(**(plain | fields)))  # type: ignore[arg-type]

    # Requests ---------------------------------------------------------------------------------------

    async def install(self, *node_names: str, name: str = "llama-cpp", force: bool = False) -> OperationView:
        return await self.request("install", *node_names, name=name, force=force)

    async def request(self, kind: str, *node_names: str, name: str = "llama-cpp", force: bool = False) -> OperationView:
        request = BackendRequest(
            kind=kind,  # type: ignore[arg-type]  # a plain word in the tests
            name=name,
            nodes=node_names or None,
            force=force,
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

    async def open_intents(self, node_id: str) -> list[Intent]:
        return await self.store.transaction(lambda connection: operations.open_on(connection, node_id))

    async def set_health(self, node_id: str, health: str) -> None:
        now = await self.now()
        await self.store.transaction(lambda c: nodes.set_health(c, node_id, health, now))  # type: ignore[arg-type]

    # The worker's side ----------------------------------------------------------------------------

    async def reply(self, intent: Intent, outcome: Outcome | None, *, attempt: int | None = None) -> None:
        """A worker's answer to an attempt (None: nobody listens there), and what the frontend makes of it."""
        subject = subjects.reply_subject(intent.node_id, intent.id, intent.attempt if attempt is None else attempt)
        payload = b"" if outcome is None else wire.encode(wire.AnyReply(outcome=outcome))
        self.bus.deliver(Message(subject, payload, no_responders=outcome is None))
        await self.collector.replies_step()

    def progress(self, intent: Intent, progress: Progress, *, node_id: str | None = None) -> None:
        sender = node_id or intent.node_id
        event = wire.progress_event("op", sender, "engine", intent.id, progress)
        self.bus.deliver(Message(subjects.progress_subject(sender, "op"), wire.encode(event)))


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
