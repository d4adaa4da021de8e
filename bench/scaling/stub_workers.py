"""A thousand workers in one process that register, listen, report and answer like real ones, and only wait between.

Each has a key, signs its challenge, sends its heartbeats on its own connections as `link` does, and says what it has in
the product's own messages. Only the bus is shared: one connection takes the commands of all, because a thousand
connections would be the cost of the stubs and not of the frontend. After the first one, heartbeats are spread over the
interval, as in a fleet that has run for a while.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
from nacl.signing import SigningKey

from enginehouse.bus import credentials
from enginehouse.bus.credentials import BusAccounts
from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.progress import Progress
from enginehouse.core.report import CommandResult, Report
from enginehouse.core.subjects import Permissions
from enginehouse.link.client import REUSE_SECONDS
from enginehouse.ports import Message
from enginehouse.worker.identity import Identity

WORK_SECONDS = 1.0
HEARTBEAT_SECONDS = 10.0
ANSWER_SECONDS = 10.0  # as `link.worker` waits
RETRY_SECONDS = 0.5  # as a worker waits after a failed call
GIB = 1024**3


class Refused(Exception):
    """An answer that is no success."""


class HttpConnection:
    """One kept connection; requests one after the other. It is opened anew where a real client would not reuse it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._used_at = 0.0

    async def post(self, path: str, token: str, body: bytes) -> bytes:
        return await self.ask("POST", path, token, body)

    async def ask(self, method: str, path: str, token: str, body: bytes = b"") -> bytes:
        """The body of the answer."""
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode()
        loop = asyncio.get_running_loop()
        if loop.time() - self._used_at > REUSE_SECONDS:
            self.close()
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port, limit=64 * 1024 * 1024)
        reader, writer = self._streams
        try:
            writer.write(head + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            content = await reader.readexactly(_length_of(answer))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.close()
            raise Refused(f"{method} {path}: {error!r}") from error
        except asyncio.CancelledError:
            self.close()  # its answer may still come
            raise
        self._used_at = loop.time()
        if not answer.startswith(b"HTTP/1.1 2"):
            raise Refused(f"{method} {path}: {answer[:40]!r} {content[:300]!r}")
        return content

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _length_of(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


class StubNode:
    """One worker: what it knows and has."""

    def __init__(self, number: int) -> None:
        self.name = f"stub-{number:04d}"
        self.key = SigningKey.generate()
        self.node_id = NodeId("")
        self.token = ""
        self.mark = self.boot_mark = 0.0
        self.sequence = 0
        self.boot = 0
        self.backends: dict[str, InstalledBackend] = {}
        self.results: list[CommandResult] = []
        self.running: set[IntentId] = set()
        self.is_due = asyncio.Event()  # something changed that a report must tell

    @property
    def public_key(self) -> str:
        return self.key.verify_key.encode().hex()

    def registration(self, challenge: str, join_token: str) -> bytes:
        request = node_api.RegisterRequest(
            name=self.name,
            node_type="backend",
            address="127.0.0.1:50051",
            token=join_token,
            platform="linux/amd64",
            capability="default",
            challenge=challenge,
            total_ram=64 * GIB,
            available_ram=32 * GIB,
            total_disk=1000 * GIB,
            available_disk=500 * GIB,
        )
        return wire.encode(Identity(self.key).signed(request))

    def joined(self, answer: bytes) -> None:
        reply = wire.decode(answer, node_api.RegisterReply, "the answer to a registration")
        self.node_id, self.token = reply.id, reply.node_token
        self.mark = self.boot_mark = reply.mark
        self.boot += 1

    def heartbeat(self) -> bytes:
        """Everything it has, as the agent of a worker tells it. What is free changes all the time."""
        self.sequence += 1
        report = Report(
            boot_id=f"{self.name}-{self.boot}",
            sequence=self.sequence,
            mark=self.mark,
            boot_mark=self.boot_mark,
            version="bench",
            backends=tuple(self.backends.values()),
            results=tuple(self.results[-20:]),
            running=tuple(self.running),
        )
        free = random.randrange(30, 32) * GIB + random.randrange(1000) * 4096
        request = node_api.HeartbeatRequest(
            available_ram=free, available_disk=free * 16, total_disk=1000 * GIB, report=report
        )
        return wire.encode(request)

    def heard(self, answer: bytes) -> None:
        reply = wire.decode(answer, node_api.HeartbeatReply, "the answer to a heartbeat")
        self.mark = reply.mark
        self.token = reply.node_token or self.token

    def done(self, request: wire.BackendInstallRequest) -> Outcome:
        command, build = request.command, request.resolved
        assert command is not None
        assert build is not None
        self.backends[build.directory] = InstalledBackend(
            name=build.directory,
            is_system=False,
            is_meta=False,
            uri=build.uri,
            digest=build.digest,
            generation=command.generation,
        )
        outcome = Outcome(digest=build.digest)
        self.results.append(CommandResult(intent=command.intent, attempt=command.attempt, outcome=outcome))
        self.running.discard(command.intent)
        self.is_due.set()
        return outcome


class StubWorkers:
    """All of them, on one frontend."""

    def __init__(self, count: int, join_token: str, group: asyncio.TaskGroup) -> None:
        self.nodes = [StubNode(number) for number in range(count)]
        self.failures: list[str] = []  # of calls, which were repeated
        self.unanswered = 0  # heartbeats under way
        self._port = 0
        self._join_token = join_token
        self._group = group
        self._by_id: dict[NodeId, StubNode] = {}
        self._bus: NatsBus | None = None
        self._beating: dict[str, asyncio.Task[None]] = {}
        self._installs: set[asyncio.Task[None]] = set()

    async def begin(self, port: int, bus_url: str, accounts: BusAccounts) -> None:
        """Take the commands of all, with a credential that may. `port` is that of the frontend."""
        self._port = port
        everything = Permissions(publish=(">",), subscribe=(">",))
        minted = credentials.mint_user(accounts.account_seed, "stubs", everything)
        options = BusOptions(url=bus_url, name="stubs", jwt=minted.jwt, seed=minted.seed)
        self._bus = await NatsBus.connect(options, limit_seconds=ANSWER_SECONDS)
        await self._bus.subscribe(f"nodes.*.{subjects.INSTALL}", self._take)

    async def join(self, some: Sequence[StubNode]) -> None:
        """All of them at once, those that were there before as after a power cut; returns when each was heard."""
        for node in some:
            if beating := self._beating.pop(node.name, None):
                beating.cancel()
        async with asyncio.TaskGroup() as group:
            for node in some:
                group.create_task(self._join(node))
        for node in some:
            self._beating[node.name] = self._group.create_task(self._beat(node))

    async def leave(self) -> None:
        for task in (*self._beating.values(), *self._installs):
            task.cancel()
        if self._bus is not None:
            await self._bus.close()

    async def _join(self, node: StubNode) -> None:
        connection = HttpConnection(self._port)
        try:
            while True:
                try:
                    async with asyncio.timeout(3 * ANSWER_SECONDS):
                        answer = await connection.post("/api/node/challenge", self._join_token, b"")
                        challenge = msgspec.json.decode(answer, type=node_api.ChallengeReply).challenge
                        signed = node.registration(challenge, self._join_token)
                        node.joined(await connection.post("/api/node/register", self._join_token, signed))
                        self._by_id[node.node_id] = node
                        await self._tell(node, connection)
                    return
                except (Refused, TimeoutError, OSError) as error:
                    self.failures.append(f"join {node.name}: {error!r}")
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            connection.close()

    async def _beat(self, node: StubNode) -> None:
        """For ever: at its own moments, and after every change."""
        connection = HttpConnection(self._port)
        loop = asyncio.get_running_loop()
        due = loop.time() + random.random() * HEARTBEAT_SECONDS
        try:
            while True:
                try:
                    async with asyncio.timeout_at(due):
                        await node.is_due.wait()
                except TimeoutError:
                    due += HEARTBEAT_SECONDS
                node.is_due.clear()
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await self._tell(node, connection)
                except (Refused, TimeoutError, OSError) as error:
                    self.failures.append(f"heartbeat {node.name}: {error!r}")
                    await asyncio.sleep(RETRY_SECONDS)
                    node.is_due.set()
        finally:
            connection.close()

    async def _tell(self, node: StubNode, connection: HttpConnection) -> None:
        self.unanswered += 1
        try:
            node.heard(await connection.post(f"/api/node/{node.node_id}/heartbeat", node.token, node.heartbeat()))
        finally:
            self.unanswered -= 1

    def _take(self, message: Message) -> None:
        node = self._by_id.get(NodeId(message.subject.split(".")[1]))
        if node is not None:
            task = self._group.create_task(self._install(node, message))
            self._installs.add(task)
            task.add_done_callback(self._installs.discard)

    async def _install(self, node: StubNode, message: Message) -> None:
        request = wire.decode(message.payload, wire.BackendInstallRequest, "the install request")
        command = request.command
        assert command is not None
        assert self._bus is not None
        if command.intent in node.running:
            return  # the same again
        node.running.add(command.intent)
        for number in (1, 2):
            told = Progress("downloading", "layer", number * 10**6, 2 * 10**6, command.attempt, number)
            event = wire.progress_event(request.op_id, node.node_id, request.backend, command.intent, told)
            await self._bus.publish(subjects.progress_subject(node.node_id, request.op_id), wire.encode(event))
            await asyncio.sleep(WORK_SECONDS / 2)
        outcome = node.done(request)
        await self._bus.publish(message.reply, wire.encode(wire.BackendInstallReply(success=True, outcome=outcome)))
