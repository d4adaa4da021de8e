"""Requests to LocalAI's workers over the bus that a caller waits for, with a limit.

Replies travel on subjects of this frontend, as those to polls do: a reply subject of an intent is only for its outcome.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.errors import Malformed, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.ports import Bus, Message

T = TypeVar("T")
NO_SUBSCRIBER = "no_subscriber"  # the code of the error: the worker is away, or too old for this message


class WorkerRequests:
    def __init__(self, bus: Bus, owner: str) -> None:
        self._bus = bus
        self._name = f"{owner}-carrier"
        self._number = 0
        self._open: dict[tuple[NodeId, int], asyncio.Future[Message]] = {}

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.all_polls(self._name), self._take)

    async def ask(self, node_id: NodeId, verb: str, request: Struct, kind: type[T], limit_seconds: float) -> T:
        """Send a request and return its reply. Raises `Unavailable` (`no_subscriber`, `stalled`)."""
        self._number = (self._number + 1) % 10**9
        key = node_id, self._number
        answer = self._open[key] = asyncio.get_running_loop().create_future()
        reply = subjects.poll_subject(node_id, self._name, verb, key[1])
        try:
            async with asyncio.timeout(limit_seconds):
                await self._bus.publish(subjects.node_subject(node_id, verb), wire.encode(request), reply)
                message = await answer
        except TimeoutError:
            raise Unavailable(f"no answer to {verb} within {limit_seconds:.0f} s", code="stalled") from None
        finally:
            self._open.pop(key, None)
        if message.no_responders:
            raise Unavailable(f"the worker is offline or does not know {verb}", code=NO_SUBSCRIBER)
        return wire.decode(message.payload, kind, f"the reply to {verb}", limit_bytes=wire.MAX_REPLY_BYTES)

    async def tell(self, node_id: NodeId, verb: str, message: Struct) -> None:
        await self._bus.publish(subjects.node_subject(node_id, verb), wire.encode(message))

    def _take(self, message: Message) -> None:
        try:
            reply = subjects.parse_poll_subject(message.subject)
        except Malformed:
            return
        waiting = self._open.get((reply.node_id, reply.number))
        if waiting is not None and not waiting.done():
            waiting.set_result(message)
