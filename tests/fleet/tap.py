"""The bus as tests hear, speak and spoil it: a tap that keeps what went over it, and a way to it that loses messages.

Both run on the loop of the warehouse. Nothing here knows what a message means beyond its subject.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.ports import Message

_LINE_LIMIT = 1024 * 1024  # a CONNECT with a credential is one line
_PUBLISHING = (b"PUB", b"HPUB")


class Tap:
    """`heard` has every message since it was opened, in order."""

    def __init__(self, warehouse: Warehouse, bus: NatsBus) -> None:
        self.heard: list[Message] = []
        self._warehouse = warehouse
        self._bus = bus

    def say(self, subject: str, payload: bytes) -> None:
        self._warehouse.run(self._bus.publish(subject, payload))

    def sent_to(self, node_id: str) -> list[str]:
        """What a node was told to do so far: the last parts of the subjects of commands."""
        self.settle()
        prefix = f"nodes.{node_id}."
        mine = [one.subject.removeprefix(prefix) for one in self.heard if one.subject.startswith(prefix)]
        return [verb for verb in mine if not verb.endswith(".progress")]

    def progress_of(self, node_id: str) -> list[Message]:
        prefix = f"nodes.{node_id}."
        return [one for one in self.heard if one.subject.startswith(prefix) and one.subject.endswith(".progress")]

    def settle(self) -> None:
        """Until everything that was said before has been heard."""
        subject = f"nodes.{uuid.uuid4()}.settled"
        self.say(subject, b"")
        wait_for("the tap to hear itself", lambda: any(one.subject == subject for one in self.heard))


@contextmanager
def tapped(fleet: Fleet, warehouse: Warehouse) -> Iterator[Tap]:
    """Everything that is said to and by nodes."""
    bus = warehouse.run(NatsBus.connect(BusOptions(url=fleet.nats_url, name="tap"), limit_seconds=10.0))
    try:
        tap = Tap(warehouse, bus)
        warehouse.run(bus.subscribe("nodes.>", tap.heard.append))
        yield tap
    finally:
        warehouse.run(bus.close())


class Leak:
    """A way to the bus on which messages to some subjects are lost; `url` is where clients find it."""

    def __init__(self, port: int, is_lost: Callable[[str], bool]) -> None:
        self.url = ""
        self.lost: list[str] = []
        self._port = port
        self._is_lost = is_lost
        self._writers: set[asyncio.StreamWriter] = set()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {writer, there_writer}
        try:
            async with asyncio.TaskGroup() as group:
                down = group.create_task(_pass_on(there_reader, writer))
                await self._pass_up(reader, there_writer)
                down.cancel()
        except* (OSError, EOFError):
            pass  # one of the two ends is gone
        finally:
            for end in (writer, there_writer):
                end.close()
                self._writers.discard(end)

    async def _pass_up(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            words = line.split()
            if words and words[0] in _PUBLISHING:
                line += await reader.readexactly(int(words[-1]) + 2)
                subject = words[1].decode()
                if self._is_lost(subject):
                    self.lost.append(subject)
                    continue
            writer.write(line)
            await writer.drain()

    def abort(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while received := await reader.read(65536):
        writer.write(received)
        await writer.drain()


@contextmanager
def leaking(fleet: Fleet, warehouse: Warehouse, is_lost: Callable[[str], bool]) -> Iterator[Leak]:
    leak = Leak(fleet.nats_port, is_lost)

    async def opened() -> asyncio.Server:
        return await asyncio.start_server(leak.accept, "127.0.0.1", 0, limit=_LINE_LIMIT)

    async def closed() -> None:
        server.close()
        leak.abort()
        await server.wait_closed()

    server = warehouse.run(opened())
    leak.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield leak
    finally:
        warehouse.run(closed())
