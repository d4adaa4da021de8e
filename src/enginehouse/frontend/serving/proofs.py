"""Proves that the process behind a route is still the one that was started, for engines that do not check a key.

An engine that checks its key refuses requests meant for another, so its routes need no proof. For the others the worker
is asked over the bus which processes it has. An answer is valid for a moment, far less than a port stays unused after
its process has ended. Only a negative answer or a missing subscriber disproves a route: a silent bus does not stop
requests to running engines.
"""

from __future__ import annotations

import asyncio
import logging

from msgspec import Struct, field

from enginehouse.core import subjects, wire
from enginehouse.core.errors import EnginehouseError, Malformed
from enginehouse.core.ids import NodeId
from enginehouse.core.replica import RunningReplica, is_process
from enginehouse.core.routing import Route
from enginehouse.ports import Bus, Clock, Message

log = logging.getLogger(__name__)

HOLDS_SECONDS = 1.0  # validity of an answer
ANSWER_SECONDS = 0.5  # timeout of an answer; a worker on a busy machine takes a tenth of that
SILENT_SECONDS = 10.0  # before a silent worker is asked again, so that not every request waits for it


class _Question(Struct):
    """The last poll of one node. `running` is None without an answer."""

    number: int = 0
    running: tuple[RunningReplica, ...] | None = None
    asked_until: float = 0.0  # the result is valid until then
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    def allows(self, route: Route) -> bool:
        return self.running is None or any(is_process(one, route) for one in self.running)


class Proofs:
    def __init__(self, bus: Bus, clock: Clock, owner: str) -> None:
        self._bus = bus
        self._clock = clock
        self._name = f"{owner}-proofs"
        self._questions: dict[str, _Question] = {}

    async def listen(self) -> None:
        await self._bus.subscribe(subjects.all_polls(self._name), self._take)

    async def holds(self, route: Route) -> bool:
        """Whether requests may be sent to this route now."""
        if route.checks_key or not self._bus.is_connected:
            return True
        question = self._questions.setdefault(route.node_id, _Question())
        if self._clock.monotonic() < question.asked_until and question.allows(route):
            return True
        # A negative answer older than this request proves nothing about a process started since.
        before = question.number
        async with question.asking:
            # After waiting for the lock, the previous holder's answer is used.
            if question.number == before:
                await self._ask(route.node_id, question)
        return question.allows(route)

    async def _ask(self, node_id: NodeId, question: _Question) -> None:
        question.number = (question.number + 1) % 10**9
        question.running = None
        question.answered.clear()
        reply = subjects.poll_subject(node_id, self._name, subjects.RUNNING, question.number)
        lasts = HOLDS_SECONDS
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._bus.publish(subjects.node_subject(node_id, subjects.RUNNING), b"{}", reply)
                await question.answered.wait()
        except (TimeoutError, EnginehouseError) as error:
            log.warning("route.unproven node=%s error=%r", node_id, error)
            lasts = SILENT_SECONDS
        question.asked_until = self._clock.monotonic() + lasts

    def _take(self, message: Message) -> None:
        try:
            answer = subjects.parse_poll_subject(message.subject)
            question = self._questions.get(answer.node_id)
            if question is None or answer.number != question.number:
                return  # an answer to an older question
            if message.no_responders:
                question.running = ()
            else:
                running = wire.decode(message.payload, wire.ModelsRunningReply, "a list of processes")
                if running.error:
                    return
                question.running = running.models or ()
        except Malformed as error:
            log.warning("proof.dropped subject=%s error=%s", message.subject, error)
            return
        question.answered.set()
