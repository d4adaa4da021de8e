"""A crowd around a fleet: workers that only report, and watchers that read, stop reading, or come back elsewhere.

Everybody here runs on the loop of the warehouse. Stub workers register, listen and answer like real ones and do nothing
between; a watcher keeps which operations it has seen end, nothing else.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Iterable

from nacl.signing import SigningKey

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.core import node_api, subjects, wire
from enginehouse.core.ids import NodeId
from enginehouse.core.progress import Progress
from enginehouse.core.report import Report
from enginehouse.link.client import FrontendClient
from enginehouse.link.worker import WorkerLink
from enginehouse.ports import Message
from enginehouse.worker.identity import Identity

_TERMINAL = re.compile(rb'"jobID":"([0-9a-f-]{36})"[^\n]*?"status":"succeeded"')
_ID = re.compile(rb"^id: ([0-9.]+)$", re.MULTILINE)
_LINE_LIMIT = 8 * 1024 * 1024


class StubWorker:
    """A node whose installs report so often and end when they are told to."""

    def __init__(self, name: str, join_token: str) -> None:
        self.name = name
        self._token = join_token
        self._key = SigningKey.generate()
        self._bus: NatsBus | None = None
        self._node_id = NodeId("")
        self._asked: dict[str, tuple[wire.BackendInstallRequest, str]] = {}

    @property
    def public_key(self) -> str:
        return self._key.verify_key.encode().hex()

    @property
    def busy(self) -> int:
        return len(self._asked)

    async def join(self, url: str, nats_url: str) -> None:
        client = FrontendClient(url, self._token, user_agent="stub")
        link = WorkerLink(client)
        request = node_api.RegisterRequest(
            name=self.name,
            address="127.0.0.1:50051",
            token=self._token,
            platform="linux/amd64",
            capability="default",
            challenge=await link.challenge(),
        )
        reply = await link.register(Identity(self._key).signed(request))
        self._node_id = reply.id
        self._bus = await NatsBus.connect(BusOptions(url=nats_url, name=self.name), limit_seconds=10.0)
        await self._bus.subscribe(subjects.node_subject(reply.id, subjects.INSTALL), self._take)
        report = Report(boot_id=self.name, sequence=1, mark=reply.mark)
        await link.heartbeat(reply.id, reply.node_token, node_api.HeartbeatRequest(report=report))
        client.close()

    def _take(self, message: Message) -> None:
        request = wire.decode(message.payload, wire.BackendInstallRequest, "the install request")
        self._asked[request.backend] = request, message.reply

    async def report(self, number: int) -> None:
        """One event of progress for everything under way."""
        assert self._bus is not None
        for request, _ in list(self._asked.values()):
            assert request.command is not None
            told = Progress("downloading", "layer", number * 1000, 10**9, request.command.attempt, number)
            event = wire.progress_event(request.op_id, self._node_id, request.backend, request.command.intent, told)
            await self._bus.publish(subjects.progress_subject(self._node_id, request.op_id), wire.encode(event))

    async def finish(self, backend: str) -> None:
        assert self._bus is not None
        _, reply = self._asked.pop(backend)
        await self._bus.publish(reply, wire.encode(wire.BackendInstallReply(success=True)))

    async def leave(self) -> None:
        if self._bus is not None:
            await self._bus.close()


async def report_all(workers: Iterable[StubWorker], per_second: float) -> None:
    """For ever: everything that is under way anywhere, so often."""
    number = 0
    workers = list(workers)
    while True:
        number += 1
        began = time.monotonic()
        for worker in workers:
            await worker.report(number)
        await asyncio.sleep(max(0.01, 1 / per_second - (time.monotonic() - began)))


class Watcher:
    """One stream of events. `ended` has the operations whose success it has seen."""

    def __init__(self, ports: list[int], token: str) -> None:
        self.ended: set[str] = set()
        self.position = b""
        self.port = 0  # its own, where it stopped reading
        self._ports = ports
        self._token = token
        self._moves = False

    async def read(self) -> None:
        """Until it is cancelled. Whoever `moves` goes on at the next frontend, from where it was."""
        while True:
            reader, writer = await self._open(limit=_LINE_LIMIT)
            rest = b""
            try:
                while not self._moves and (received := await reader.read(1024 * 1024)):
                    whole, _, rest = (rest + received).rpartition(b"\n\n")
                    self._take(whole)
            except OSError:
                pass  # as any watcher: come back and look
            finally:
                writer.close()
            self._moves = False
            self._ports.append(self._ports.pop(0))

    def _take(self, events: bytes) -> None:
        self.ended |= {found.decode() for found in _TERMINAL.findall(events)}
        for position in _ID.findall(events):
            self.position = position

    def move(self) -> None:
        self._moves = True

    async def stop_reading(self) -> None:
        """Connect with little room, and read nothing until it is cancelled."""
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(plain, ("127.0.0.1", self._ports[0]))
            await loop.sock_sendall(plain, self._head())
            self.port = plain.getsockname()[1]
            await asyncio.Event().wait()
        finally:
            plain.close()

    async def _open(self, limit: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._ports[0], limit=limit)
        writer.write(self._head())
        return reader, writer

    def _head(self) -> bytes:
        position = b"Last-Event-ID: %s\r\n" % self.position if self.position else b""
        return (
            b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n" % self._token.encode()
            + position
            + b"\r\n"
        )
