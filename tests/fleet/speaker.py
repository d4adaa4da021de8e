"""Anybody on the bus who knows subjects: says what it likes, and keeps the answers.

It runs on the loop of the warehouse and knows nothing of what a message means.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse

from enginehouse.bus.nats import BusOptions, NatsBus
from enginehouse.ports import Message

PACE = 100  # messages between two looks whether the bus has taken them: a client may not queue without end


class Speaker:
    """Anybody on the bus: what it says, and the answers it gets."""

    def __init__(self, warehouse: Warehouse, bus: NatsBus) -> None:
        self._warehouse = warehouse
        self._bus = bus
        self._prefix = f"_INBOX.{uuid.uuid4().hex}"
        self._awaited: dict[str, asyncio.Future[bytes]] = {}
        self.answers: list[bytes] = []
        warehouse.run(bus.subscribe(f"{self._prefix}.>", self._take))

    def _take(self, message: Message) -> None:
        waiting = self._awaited.get(message.subject)
        if waiting is None:
            self.answers.append(message.payload)
        elif not waiting.done():
            waiting.set_result(b"" if message.no_responders else message.payload)

    async def said(self, messages: list[tuple[str, bytes, bool]]) -> None:
        """Subject, payload, and whether an answer is asked for; as fast as the bus takes them."""
        for number, (subject, payload, asks) in enumerate(messages):
            await self._bus.publish(subject, payload, f"{self._prefix}.all" if asks else "")
            if number % PACE == 0:
                await self._ask("nobody.listens", b"", 10.0)  # everything before it has reached the bus

    def ask(self, subject: str, payload: bytes = b"{}", limit_seconds: float = 10.0) -> bytes:
        """The answer; empty where nobody listens or none came in time."""
        return self._warehouse.run(self._ask(subject, payload, limit_seconds))

    async def _ask(self, subject: str, payload: bytes, limit_seconds: float) -> bytes:
        reply = f"{self._prefix}.{uuid.uuid4().hex}"
        self._awaited[reply] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(limit_seconds):
                await self._bus.publish(subject, payload, reply)
                return await self._awaited[reply]
        except TimeoutError:
            return b""
        finally:
            del self._awaited[reply]


@contextmanager
def speaking(fleet: Fleet, warehouse: Warehouse) -> Iterator[Speaker]:
    bus = warehouse.run(NatsBus.connect(BusOptions(url=fleet.nats_url, name="anybody"), limit_seconds=10.0))
    try:
        yield Speaker(warehouse, bus)
    finally:
        warehouse.run(bus.close())
