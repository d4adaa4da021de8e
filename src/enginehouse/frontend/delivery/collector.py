"""Stores what workers send over the bus: replies and progress. Reports are stored by `reports`.

Messages are queued as they arrive and stored in batches, one transaction each: a thousand replies cost a few
transactions, a slow database does not stall the reader, and an outage of the database loses no reply. A reply is stored
by the frontend that owns the intent, or by any frontend that received it once the owner's lease has ended. Every write
is a compare-and-set through the state table, so late, duplicate and stale messages change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from enginehouse.core import intent as intents_core
from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend, PullModel, StartReplica, UnknownAction, phrase
from enginehouse.core.errors import Malformed, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.operation import wait_for_node
from enginehouse.core.progress import Progress
from enginehouse.core.progress import bounded as bounded_progress
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.late_replies import LateReplies, Reply
from enginehouse.frontend.delivery.replica_rows import agreeing, follow
from enginehouse.frontend.fleet.nodes import Nodes, note_no_subscriber
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Bus, Clock, Message
from enginehouse.store import db, intents, nodes, operations, supersession
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

# Many times the replies of a hundred nodes. Beyond it replies are dropped, and reports settle their intents.
QUEUE_LENGTH = 10_000
BATCH = 200
LATE_SECONDS = 1.0  # between two checks for replies whose owner did not store them; reads memory only
PROGRESS_WRITE_SECONDS = 2.0  # the row serves later readers; watchers get progress from memory


class _Settled(Struct):
    """The effects of a batch of replies."""

    intents: list[Intent]
    unreachable: set[NodeId]  # nodes without a subscriber
    forced: list[Intent]  # upgrades to send again as forced installs: their workers do not know upgrades
    others: list[tuple[Reply, float]]  # intents of another owner, and the rest of its lease in seconds
    over: list[Intent]  # ended earlier; now their lingering commands ended too
    added: list[Intent]  # to the operations of the settled ones


class LingeringCommands(Protocol):
    """Commands that workers continue although their intents have ended (`frontend.localai.lingering`)."""

    def note_replies(
        self, connection: Connection, outcomes: Mapping[IntentId, Outcome], now: float
    ) -> list[Intent]: ...

    def note_restart(self, connection: Connection, node_id: NodeId, now: float) -> list[Intent]: ...

    def note_settled_by_listing(self, connection: Connection, before: Intent, report: Report) -> None: ...

    def continuing_commands(self, connection: Connection, node_id: NodeId) -> dict[str, set[IntentId]]: ...


class Collector:
    def __init__(
        self, store: Store, board: Board, nodes: Nodes, clock: Clock, owner: str, lingering: LingeringCommands
    ) -> None:
        self._store = store
        self._lingering = lingering
        self._board = board
        self._nodes = nodes
        self._clock = clock
        self._owner = owner
        self._replies: asyncio.Queue[Reply] = asyncio.Queue(QUEUE_LENGTH)
        self._batch: list[Reply] = []
        self._late_replies = LateReplies(clock)
        self._unwritten: dict[IntentId, Progress] = {}
        # Messages about one node sent with the credential of another, by kind.
        self.violations: Counter[str] = Counter()
        self._on_settled: list[Callable[[], None]] = []
        self._on_ended: Callable[[Sequence[Intent]], None] = lambda intents: None
        self._send_forced: Callable[[Sequence[Intent]], Awaitable[None]] | None = None

    def on_settled(self, wake: Callable[[], None]) -> None:
        """Set a callback for ended intents and for new or lost replicas: it wakes the dispatcher, loader and router."""
        self._on_settled.append(wake)

    def on_ended(self, note: Callable[[Sequence[Intent]], None]) -> None:
        """Set the callback for intents that a reply changed: the poller's."""
        self._on_ended = note

    def on_old_worker(self, send_forced: Callable[[Sequence[Intent]], Awaitable[None]]) -> None:
        """Set how an upgrade is sent to a worker that does not know upgrades: the dispatcher's method."""
        self._send_forced = send_forced

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.ALL_REPLIES, self._take_reply)
        await bus.subscribe(subjects.ALL_PROGRESS, self._take_progress)

    def silence_of(self, intent: Intent) -> float | None:
        return self._board.silence_of(intent)

    # From the bus ------------------------------------------------------------------------------

    def _take_reply(self, message: Message) -> None:
        try:
            to = subjects.parse_reply_subject(message.subject)
            outcome = None
            if not message.no_responders:
                reply = wire.decode(message.payload, wire.AnyReply, "a reply", limit_bytes=wire.MAX_REPLY_BYTES)
                outcome = intents_core.bounded(wire.outcome_of(reply))
            self._replies.put_nowait(Reply(to, outcome))
        except Malformed as error:
            log.warning("reply.dropped subject=%s error=%s", message.subject, error)
        except asyncio.QueueFull:
            log.warning("reply.dropped subject=%s error=queue_full", message.subject)

    def settle(self, intent: Intent, outcome: Outcome) -> None:
        """Take the outcome of a command that this frontend carried out for a worker, as if that had replied."""
        to = subjects.ReplySubject(intent.node_id, intent.id, intent.attempt)
        try:
            self._replies.put_nowait(Reply(to, intents_core.bounded(outcome), intent.fence))
        except asyncio.QueueFull:
            log.warning("reply.dropped intent=%s error=queue_full", intent.id)

    def _take_progress(self, message: Message) -> None:
        try:
            event = wire.decode(message.payload, wire.ProgressEvent, "a progress event")
        except Malformed as error:
            log.warning("progress.dropped subject=%s error=%s", message.subject, error)
            return
        # The bus enforces the node in the subject, because only its credential may publish there. The payload is not
        # trusted.
        sender = NodeId(message.subject.split(".")[1])
        if event.node_id != sender:
            self._refuse("progress", sender)
            return
        progress = bounded_progress(wire.progress_of(event))
        if event.intent:
            known = event.intent if self._board.progress(sender, event.intent, progress) else None
        else:
            # LocalAI's workers name the operation only. Their events arrive in order or not at all.
            known, progress = self._board.plain_progress(sender, OperationId(event.op_id), progress)
        if known is not None:
            self._unwritten[known] = progress

    def _refuse(self, kind: str, node_id: NodeId) -> None:
        """Count and log a message that this node's credential does not entitle it to send."""
        self.violations[kind] += 1
        if self.violations[kind] & (self.violations[kind] - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            log.error("bus.violation kind=%s node=%s count=%d", kind, node_id, self.violations[kind])

    async def replies_step(self) -> None:
        """Store the replies that have arrived; waits for the first one."""
        if not self._batch:
            self._batch.append(await self._replies.get())
        while len(self._batch) < BATCH and not self._replies.empty():
            self._batch.append(self._replies.get_nowait())
        batch, self._batch = self._batch, []
        try:
            done = await self._store.transaction(lambda connection: self._settle(connection, batch))
        except Unavailable:
            self._batch = batch  # retried by the next step
            raise
        for reply, seconds in done.others:
            self._late_replies.keep(reply, seconds)
        if done.forced and self._send_forced is not None:
            await self._send_forced(done.forced)
        self._on_ended([*done.intents, *done.over])
        await self._nodes.publish_changed(done.unreachable)
        await self.publish_settled(done.intents, [*done.added, *done.over], wake=bool(done.over))

    async def late_step(self) -> None:
        """Queue again the replies that their owner may not have received."""
        for reply in self._late_replies.take_due():
            with contextlib.suppress(asyncio.QueueFull):
                self._replies.put_nowait(reply)

    def _settle(self, connection: Connection, batch: Sequence[Reply]) -> _Settled:
        now = db.now(connection)
        done = _Settled([], set(), [], [], [], [])
        over: dict[IntentId, Outcome] = {}
        known = operations.lock_intents(connection, {reply.to.intent_id for reply in batch})
        changes: dict[IntentId, tuple[Intent, Change]] = {}
        for reply in batch:
            intent = known.get(reply.to.intent_id)
            if intent is not None and intent.node_id != reply.to.node_id:
                self._refuse("reply", reply.to.node_id)
                continue
            if intent is not None and reply.outcome is not None:
                over[intent.id] = reply.outcome
            if intent is None or intent.state != "running" or intent.attempt != reply.to.attempt:
                continue
            if intent.id in changes:
                continue  # a duplicate
            if reply.fence and (reply.fence, self._owner) != (intent.fence, intent.owner):
                continue  # another frontend has taken it over, and does the work again
            if intent.owner != self._owner and intent.lease_until >= now:
                # Its owner should have received the same reply. A missing subscriber is not kept: it holds only now.
                if reply.outcome is not None:
                    done.others.append((reply, intent.lease_until - now))
                continue
            if isinstance(intent.action, UnknownAction):
                continue  # only a later version knows the effects
            if reply.outcome is None and _may_be_old(intent) and not reply.to.is_forced:
                done.forced.append(intent)
                continue
            if reply.outcome is None:
                # In the same transaction as the wait: otherwise the dispatcher sees a due intent on a healthy node.
                if note_no_subscriber(connection, intent.node_id, now):
                    done.unreachable.add(intent.node_id)
                change = wait_for_node(now)
            else:
                outcome = self.believed(connection, intent, reply.outcome)
                change = intents_core.after_outcome(intent, outcome, now, self._clock.random())
            changes[intent.id] = intent, change
        done.over = self._lingering.note_replies(connection, over, now)
        done.intents = operations.apply_all(connection, changes.values())
        for intent in done.intents:
            follow(connection, intent, now)
        done.added = point(connection, done.intents, now)
        operations.note_ended(connection, [intent.id for intent in done.intents if not intent.is_open])
        return done

    def believed(self, connection: Connection, intent: Intent, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure if its replica address is not allowed, because prompts and keys are sent
        there, or if a source gave this node other bytes than the nodes before.
        """
        if isinstance(intent.action, PullModel) and outcome.pinned:
            return agreeing(connection, intent.action, outcome)
        if not isinstance(intent.action, StartReplica) or not outcome.succeeded or not outcome.address:
            return outcome
        node = nodes.get(connection, intent.node_id)
        why = "its node was removed" if node is None else self._nodes.replica_refusal(node, outcome.address)
        if not why:
            return outcome
        self._refuse("address", intent.node_id)
        message = f"cannot use the address {outcome.address[:80]!r} that the worker gave for the replica: {why}"
        return Outcome(code="address_refused", message=message)

    # Publishing --------------------------------------------------------------------------------

    async def publish_settled(
        self, settled: Sequence[Intent], others: Sequence[Intent] = (), *, wake: bool = False
    ) -> None:
        """Wake those who wait for settled intents, and publish them with `others` that the same change concerns."""
        for intent in settled:
            self._unwritten.pop(intent.id, None)
            log.info(
                "intent.%s intent=%s node=%s attempt=%d action=%r reason=%s message=%r",
                intent.state,
                intent.id,
                intent.node_id,
                intent.attempt,
                phrase(intent.action),
                intent.reason or "-",
                intent.message,
            )
        # Wake first: requests that wait for a replica must not wait until events are published.
        if settled or wake:
            for call in self._on_settled:
                call()
        await self._board.intents_changed([*settled, *others])

    async def write_progress_step(self) -> None:
        """Write the latest progress to the rows, at a fixed rate however fast the events arrive."""
        taken, self._unwritten = self._unwritten, {}
        if not taken:
            return

        def work(connection: Connection) -> None:
            intents.set_progress(connection, taken, self._owner, db.now(connection))

        await self._store.transaction(work)


def _may_be_old(intent: Intent) -> bool:
    """Whether a missing subscriber may only mean that the worker does not know upgrades."""
    return isinstance(intent.action, InstallBackend) and intent.action.upgrade


def point(connection: Connection, settled: Sequence[Intent], now: float) -> list[Intent]:
    """Add intents for the other requested names that lead to what was installed."""
    added = supersession.add_pointers(connection, settled, lambda: IntentId(str(uuid.uuid4())), now)
    for intent in added:
        log.info("pointer.requested intent=%s node=%s action=%r", intent.id, intent.node_id, phrase(intent.action))
    return added
