"""Keeps what is known of LocalAI's workers true: they send no reports, so they are asked, all of them at once.

One frontend at a time asks in rounds, under a lease; after a command that has ended, whoever noticed asks once more. A
worker that hears no question is away, and what it was doing waits. Commands that nobody answers any more are sent
again, or given up where nobody wants them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from msgspec import Struct, field

from enginehouse.core.action import UnknownAction
from enginehouse.core.intent import NODE_AWAY, Change, Intent
from enginehouse.core.operation import AWAY_MESSAGE
from enginehouse.frontend.fleet.nodes import Nodes, note_deaf
from enginehouse.frontend.localai.lingering import UNHEARD, note_over
from enginehouse.frontend.localai.listings import Listings, Question, Reports
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.ports import Bus
from enginehouse.store import claims, db, leases, lingering, nodes, operations
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

IDLE_ROUNDS = 6  # a node that nothing is asked of is looked at every so many rounds
DEAF_ROUNDS = 2  # of which nobody hears the question, until a worker is away: a connection may be lost for a moment
# A command may have been lost before it was sent, by a frontend that died; a worker that says nothing cannot tell.
# Sending it again is harmless: such workers do one thing at a time per backend and skip what is there.
LOST_AFTER_BUDGETS = 2.0
UNHEARD_MESSAGE = "the worker said nothing for too long; it is sent again"


class _Looked(Struct):
    """What a round is to do."""

    at: float
    asked: list[str] = field(default_factory=list)
    busy: set[str] = field(default_factory=set)  # something is asked of these
    changed: list[Intent] = field(default_factory=list)


class Poller:
    def __init__(
        self,
        store: Store,
        nodes: Nodes,
        reports: Reports,
        listings: Listings,
        patience: SilenceLimits,
        *,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._reports = reports
        self._listings = listings
        self._patience = patience
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._round = 0
        self._busy: set[str] = set()
        self._foreign: set[str] = set()
        self._soon: set[str] = set()
        self._questions: dict[str, Question] = {}
        self._deaf: dict[str, int] = {}
        self._answered: dict[str, float] = {}  # per node, when the last question was asked that was answered
        self._wake: Callable[[], None] = lambda: None

    def on_due(self, wake: Callable[[], None]) -> None:
        """Whom to wake when `answers_step` has something to do."""
        self._wake = wake
        self._listings.on_end(wake)

    async def listen(self, bus: Bus) -> None:
        await self._listings.listen(bus)

    def note_ended(self, intents: Iterable[Intent]) -> None:
        """A reply says that something was done, not what is there now: those nodes are asked once more."""
        ended = {one.node_id for one in intents if not one.is_open} & self._foreign
        if ended:
            self._soon |= ended
            self._wake()

    async def step(self) -> None:
        """A round: take the answers that have come, and ask those that are to be asked."""
        await self.answers_step()
        if not self._listings.is_connected:
            return
        self._round += 1
        looked = await self._store.transaction(self._silent_nodes)
        self._busy = looked.busy
        if looked.changed:
            await self._reports.tell(looked.changed)
        await self._ask(looked.asked, looked.at)

    async def answers_step(self) -> None:
        """Make reports of the answers that have come, and ask where something has ended."""
        ended = [one for one in self._questions.values() if one.ended.is_set()]
        for question in ended:
            if self._questions.get(question.node_id) is question:
                del self._questions[question.node_id]
            self._listings.drop([question])
            if question.is_answered:
                self._deaf.pop(question.node_id, None)
                self._answered[question.node_id] = question.asked_at
                await self._listings.keep(question)
            else:
                await self._note_unheard(question.node_id)
        if self._soon and self._listings.is_connected:
            soon, self._soon = sorted(self._soon), set()
            await self._ask(soon, await self._store.transaction(db.now))

    async def _ask(self, node_ids: Iterable[str], at: float) -> None:
        for question in await self._listings.ask(node_ids, at):
            self._listings.drop([one for one in [self._questions.get(question.node_id)] if one is not None])
            self._questions[question.node_id] = question

    async def _note_unheard(self, node_id: str) -> None:
        """Nobody listens there. After a second time the node is away, and what it was sent waits for its return."""
        self._deaf[node_id] = self._deaf.get(node_id, 0) + 1
        if self._deaf[node_id] < DEAF_ROUNDS:
            return
        del self._deaf[node_id]

        def work(connection: Connection) -> tuple[bool, list[Intent]]:
            now = db.now(connection)
            away = Change(kind="wait", now=now, reason=NODE_AWAY, message=AWAY_MESSAGE, due_at=now)
            ids = [one.id for one in operations.open_on(connection, node_id)]
            locked = operations.lock_intents(connection, ids).values()
            running = [one for one in locked if one.state == "running" and not isinstance(one.action, UnknownAction)]
            return note_deaf(connection, node_id, now), claims.park(connection, running, away)

        is_news, parked = await self._store.transaction(work)
        if is_news:
            await self._nodes.tell({node_id})
        await self._reports.tell(parked)

    def _silent_nodes(self, connection: Connection) -> _Looked:
        now = db.now(connection)
        looked = _Looked(now)
        found = nodes.without_key(connection)
        self._foreign = {one.id for one in found}
        # Nobody to ask is nothing to agree on.
        if not found or not leases.acquire(connection, "poll", self._owner, now, now + self._lease_seconds):
            return looked
        looked.changed += self._given_up(connection, now)
        held = {one.node_id for one in lingering.every(connection)}
        for node in found:
            if node.health != "healthy":
                continue
            open_ones = operations.open_on(connection, node.id)
            if open_ones or node.id in held:
                looked.busy.add(node.id)
            # Once more after the last one has ended: its reply says that it was done, not what is there now.
            is_due = node.id in looked.busy | self._busy or node.id in self._deaf
            if is_due or self._round % IDLE_ROUNDS == 1:
                looked.asked.append(node.id)
            for intent in open_ones:
                if intent.state == "running" and self._is_unheard(intent, now):
                    again = Change(kind="wait", now=now, reason="stalled", message=UNHEARD_MESSAGE, due_at=now)
                    looked.changed.append(operations.apply(connection, intent, again))
        return looked

    def _given_up(self, connection: Connection, now: float) -> list[Intent]:
        """Commands that nobody wants and of which nothing was heard for too long hold up what is newer no more. A
        worker that was frozen or out of reach begins when it is back, so that the limit counts from a question after
        the sending which it has answered: messages come in order.
        """
        limit = LOST_AFTER_BUDGETS * max(self._patience.install_seconds, self._patience.upgrade_seconds)
        held = lingering.every(connection)
        # Whoever claimed a command sends it within its lease.
        came = [one for one in held if self._answered.get(one.node_id, 0.0) > one.sent_at + self._lease_seconds]
        lingering.note_received(connection, [one.intent_id for one in came if not one.received_at], now)
        silent = [one.intent_id for one in held if one.received_at and now - one.received_at > limit]
        return note_over(connection, dict.fromkeys(silent, UNHEARD), now)

    def _is_unheard(self, intent: Intent, now: float) -> bool:
        """Whether the command may have been lost. A worker that tells of its progress has it, however long it takes: it
        would do an upgrade twice, and its answer to the first sending would come too late to count.
        """
        limit = LOST_AFTER_BUDGETS * self._patience.budget_of(intent)
        heard_ago = self._reports.silence_of(intent)
        return now - intent.dispatched_at > limit and (heard_ago is None or heard_ago > limit)
