"""Keeps the state of LocalAI's workers current: they send no reports, so they are polled, all at once.

One frontend at a time polls in rounds, under a lease; a frontend that stores the end of a command polls that node once
more. A worker without a subscriber is away, and its running intents wait. A command without an answer for too long is
sent again, or is given up if its intent has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct, field

from enginehouse.core.action import PullModel, StartReplica, UnknownAction
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Change, Intent
from enginehouse.core.operation import wait_for_node
from enginehouse.frontend.fleet.nodes import Nodes, note_no_subscriber
from enginehouse.frontend.localai.lingering import RESULT_UNKNOWN, note_commands_ended
from enginehouse.frontend.localai.listings import Listings, Question
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.ports import Bus
from enginehouse.store import claims, db, leases, lingering, nodes, operations
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

IDLE_ROUNDS = 6  # a node without open intents is polled every so many rounds
UNREACHABLE_ROUNDS = 2  # without a subscriber until a worker is away: a connection may be lost for a moment
# A frontend that died may not have sent a command it claimed, and a silent worker cannot tell. Sending it again is
# harmless: these workers run one command at a time per backend and skip what is installed.
LOST_AFTER_BUDGETS = 2.0
UNHEARD_MESSAGE = "the worker was silent for too long; the command is sent again"


class _Round(Struct):
    """The plan of one round."""

    at: float
    asked: list[NodeId] = field(default_factory=list)
    busy: set[NodeId] = field(default_factory=set)  # with open intents or lingering commands
    changed: list[Intent] = field(default_factory=list)


class SettledIntents(Protocol):
    """Publishes intents that were settled, and knows how long one is silent: the collector."""

    async def publish_settled(self, settled: Sequence[Intent]) -> None: ...

    def silence_of(self, intent: Intent) -> float | None: ...


class Poller:
    def __init__(
        self,
        store: Store,
        nodes: Nodes,
        settled: SettledIntents,
        listings: Listings,
        patience: SilenceLimits,
        *,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self._store = store
        self._nodes = nodes
        self._settled = settled
        self._listings = listings
        self._patience = patience
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._round = 0
        self._busy: set[NodeId] = set()
        self._polled: set[NodeId] = set()
        self._soon: set[NodeId] = set()
        self._questions: dict[NodeId, Question] = {}
        self._unreachable: dict[NodeId, int] = {}
        self._answered: dict[NodeId, float] = {}  # per node, the time of the last poll that was answered
        self._wake: Callable[[], None] = lambda: None

    def on_due(self, wake: Callable[[], None]) -> None:
        """Set the callback that makes `answers_step` run."""
        self._wake = wake
        self._listings.on_end(wake)

    @property
    def is_idle(self) -> bool:
        """Whether there were no such nodes at the last step, and nothing is asked."""
        return not (self._polled or self._soon or self._questions)

    async def listen(self, bus: Bus) -> None:
        await self._listings.listen(bus)

    def note_ended(self, intents: Iterable[Intent]) -> None:
        """Poll the nodes of these ended intents again: a reply says that a command ended, not what is installed now."""
        ended = {one.node_id for one in intents if not one.is_open} & self._polled
        if ended:
            self._soon |= ended
            self._wake()

    async def step(self) -> None:
        """Run a round: store the answers that have arrived, and poll the nodes that are due."""
        await self.answers_step()
        if not self._listings.is_connected:
            return
        self._round += 1
        if not await self._store.look(nodes.without_key):
            self._polled, self._busy = set(), set()
            return  # most clusters have no such nodes
        planned = await self._store.transaction(self._plan_round)
        self._busy = planned.busy
        if planned.changed:
            await self._settled.publish_settled(planned.changed)
        await self._ask(planned.asked, planned.at)

    async def answers_step(self) -> None:
        """Make reports of the answers that have arrived, and poll nodes where a command ended."""
        ended = [one for one in self._questions.values() if one.ended.is_set()]
        for question in ended:
            if self._questions.get(question.node_id) is question:
                del self._questions[question.node_id]
            self._listings.drop([question])
            if question.is_answered:
                self._unreachable.pop(question.node_id, None)
                self._answered[question.node_id] = question.asked_at
                await self._listings.keep(question)
            else:
                await self._note_unreachable(question.node_id)
        if self._soon and self._listings.is_connected:
            soon, self._soon = sorted(self._soon), set()
            await self._ask(soon, await self._store.look(db.now))

    async def _ask(self, node_ids: Iterable[NodeId], at: float) -> None:
        for question in await self._listings.ask(node_ids, at):
            self._listings.drop([one for one in [self._questions.get(question.node_id)] if one is not None])
            self._questions[question.node_id] = question

    async def _note_unreachable(self, node_id: NodeId) -> None:
        """Count a poll without a subscriber. After the second one the node is away, and its running intents wait."""
        self._unreachable[node_id] = self._unreachable.get(node_id, 0) + 1
        if self._unreachable[node_id] < UNREACHABLE_ROUNDS:
            return
        del self._unreachable[node_id]

        def work(connection: Connection) -> tuple[bool, list[Intent]]:
            now = db.now(connection)
            ids = [one.id for one in operations.open_on(connection, node_id)]
            locked = operations.lock_intents(connection, ids).values()
            running = [one for one in locked if one.state == "running" and not isinstance(one.action, UnknownAction)]
            return note_no_subscriber(connection, node_id, now), claims.park(connection, running, wait_for_node(now))

        is_news, parked = await self._store.transaction(work)
        if is_news:
            await self._nodes.publish_changed({node_id})
        await self._settled.publish_settled(parked)

    def _plan_round(self, connection: Connection) -> _Round:
        now = db.now(connection)
        planned = _Round(now)
        found = nodes.without_key(connection)
        self._polled = {one.id for one in found}
        # Without such nodes no lease is needed.
        if not found or not leases.acquire(connection, "poll", self._owner, now, now + self._lease_seconds):
            return planned
        planned.changed += self._given_up(connection, now)
        held = {one.node_id for one in lingering.every(connection)}
        opened = operations.open_among(connection, [one.id for one in found if one.health == "healthy"])
        for node in found:
            if node.health != "healthy":
                continue
            open_ones = opened.get(node.id, [])
            if open_ones or node.id in held:
                planned.busy.add(node.id)
            # Also once after its last intent ended: the reply does not say what is installed now.
            is_due = node.id in planned.busy | self._busy or node.id in self._unreachable
            if is_due or self._round % IDLE_ROUNDS == 1:
                planned.asked.append(node.id)
            for intent in open_ones:
                if intent.state == "running" and self._may_be_lost(intent, now):
                    again = Change(kind="wait", now=now, reason="stalled", message=UNHEARD_MESSAGE, due_at=now)
                    planned.changed.append(operations.apply(connection, intent, again))
        return planned

    def _given_up(self, connection: Connection, now: float) -> list[Intent]:
        """End lingering commands that were silent for too long, so that they no longer hold up newer ones.

        A worker that was frozen or unreachable begins a command when it is back. So the limit counts from the first
        answered poll after the command was sent: messages arrive in order.
        """
        limit = LOST_AFTER_BUDGETS * max(self._patience.install_seconds, self._patience.upgrade_seconds)
        held = lingering.every(connection)
        # The frontend that claimed a command sends it within its lease.
        came = [one for one in held if self._answered.get(one.node_id, 0.0) > one.sent_at + self._lease_seconds]
        lingering.note_received(connection, [one.intent_id for one in came if not one.received_at], now)
        silent = [one.intent_id for one in held if one.received_at and now - one.received_at > limit]
        return note_commands_ended(connection, dict.fromkeys(silent, RESULT_UNKNOWN), now)

    def _may_be_lost(self, intent: Intent, now: float) -> bool:
        """Whether the command may have been lost.

        A worker that reports progress has it, however long it takes. Sent again, it would run an upgrade twice, and the
        reply to the first attempt would come too late to count.
        """
        if isinstance(intent.action, PullModel | StartReplica):
            return False  # a frontend carries it out itself, and another takes it over
        limit = LOST_AFTER_BUDGETS * self._patience.budget_of(intent)
        silent_seconds = self._settled.silence_of(intent)
        return now - intent.dispatched_at > limit and (silent_seconds is None or silent_seconds > limit)
