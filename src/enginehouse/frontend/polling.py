"""Asks workers that send no reports what they have: LocalAI's, all of them at once.

The answers become a report without a worker's marks, taken when the question was asked, and settle what such a report
can. One frontend at a time asks, under a lease. Nothing is removed because an answer is missing.
"""

from __future__ import annotations

import logging

from msgspec import Struct, field

from enginehouse.core import wire
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import EnginehouseError, Malformed
from enginehouse.core.intent import Change, Intent
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report
from enginehouse.frontend.collector import Collector
from enginehouse.frontend.views import Patience
from enginehouse.ports import Bus, Message
from enginehouse.store import db, leases, nodes, operations
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

IDLE_ROUNDS = 6  # a node that nothing is asked of is looked at every so many rounds
# A command may have been lost before it was sent, by a frontend that died; a worker that says nothing cannot tell.
# Sending it again is harmless: such workers do one thing at a time per backend and skip what is there.
LOST_AFTER_BUDGETS = 2.0
UNHEARD_MESSAGE = "the worker said nothing for too long; it is sent again"


class _Question(Struct):
    """What one node was asked, and what has come back."""

    number: int
    asked_at: float
    replicas: tuple[RunningReplica, ...] | None
    backends: tuple[InstalledBackend, ...] | None = None


class _Looked(Struct):
    """What a round is to do."""

    at: float
    asked: list[str] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)  # something is asked of these
    resent: list[Intent] = field(default_factory=list)


class Poller:
    def __init__(
        self, store: Store, collector: Collector, patience: Patience, *, owner: str, lease_seconds: float
    ) -> None:
        self._store = store
        self._collector = collector
        self._patience = patience
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._bus: Bus | None = None
        self._round = 0
        self._busy: set[str] = set()
        self._questions: dict[str, _Question] = {}
        self._answered: list[str] = []

    async def listen(self, bus: Bus) -> None:
        self._bus = bus
        await bus.subscribe(wire.all_polls(self._owner), self._take)

    async def step(self) -> None:
        """Make reports of the answers that have come, and ask again."""
        for node_id in self._taken():
            question = self._questions.pop(node_id)
            report = Report(mark=question.asked_at, backends=question.backends or (), replicas=question.replicas or ())
            await self._collector.report(node_id, report)
        if self._bus is None or not self._bus.is_connected:
            return
        self._round += 1
        looked = await self._store.transaction(self._silent_nodes)
        self._busy = looked.busy
        if looked.resent:
            await self._collector.tell(looked.resent)
        for node_id in looked.asked:
            await self._ask(node_id, looked.at)

    def _taken(self) -> list[str]:
        taken, self._answered = self._answered, []
        return [one for one in dict.fromkeys(taken) if one in self._questions]

    def _silent_nodes(self, connection: Connection) -> _Looked:
        now = db.now(connection)
        looked = _Looked(now)
        if not leases.acquire(connection, "poll", self._owner, now, now + self._lease_seconds):
            return looked
        for node in nodes.every(connection):
            if not node.is_target or node.health != "healthy" or node.report.is_whole:
                continue
            open_ones = operations.open_on(connection, node.id)
            if open_ones:
                looked.busy.add(node.id)
            # Once more after the last one has ended: its reply says that it was done, not what is there now.
            if open_ones or node.id in self._busy or self._round % IDLE_ROUNDS == 1:
                looked.asked.append(node.id)
            for intent in open_ones:
                if intent.state == "running" and self._is_unheard(intent, now):
                    again = Change(kind="wait", now=now, reason="stalled", message=UNHEARD_MESSAGE, due_at=now)
                    looked.resent.append(operations.apply(connection, intent, again))
        return looked

    def _is_unheard(self, intent: Intent, now: float) -> bool:
        """Whether the command may have been lost. A worker that tells of its progress has it, however long it takes: it
        would do an upgrade twice, and its answer to the first sending would come too late to count.
        """
        limit = LOST_AFTER_BUDGETS * self._patience.budget_of(intent)
        heard_ago = self._collector.silence_of(intent)
        return now - intent.dispatched_at > limit and (heard_ago is None or heard_ago > limit)

    async def _ask(self, node_id: str, asked_at: float) -> None:
        assert self._bus is not None
        number = self._round
        self._questions[node_id] = _Question(number, asked_at, None)
        for verb in (wire.LIST, wire.RUNNING):
            reply = wire.poll_subject(node_id, self._owner, verb, number)
            try:
                await self._bus.publish(wire.node_subject(node_id, verb), b"{}", reply)
            except EnginehouseError as error:
                log.warning("poll.not_sent node=%s error=%s", node_id, error)
                return

    def _take(self, message: Message) -> None:
        try:
            answer = wire.parse_poll_subject(message.subject)
            question = self._questions.get(answer.node_id)
            if question is None or answer.number != question.number:
                return  # an answer to an older question
            if answer.verb == wire.token(wire.LIST):
                if message.no_responders:
                    return
                listed = wire.decode(message.payload, wire.BackendListReply, "a listing")
                if not listed.error:
                    question.backends = listed.backends or ()
            elif message.no_responders:
                question.replicas = ()  # older than that question; such a worker starts nothing for us anyway
            else:
                running = wire.decode(message.payload, wire.ModelsRunningReply, "a list of processes")
                if not running.error:
                    question.replicas = running.models or ()
        except Malformed as error:
            log.warning("poll.dropped subject=%s error=%s", message.subject, error)
            return
        if question.backends is not None and question.replicas is not None:
            self._answered.append(answer.node_id)
