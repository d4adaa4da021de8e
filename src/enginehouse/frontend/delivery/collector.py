"""Stores what workers send: replies, progress and reports.

Messages are queued as they arrive and stored in batches, one transaction each: a thousand replies cost a few
transactions, a slow database does not stall the reader, and an outage of the database loses no reply. A reply is stored
by the frontend that owns the intent, or by any frontend that received it once the owner's lease has ended. A report
counts on every frontend. Every write is a compare-and-set through the state table, so late, duplicate and stale
messages change nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec import Struct

from enginehouse.core import intent as intents_core
from enginehouse.core import report as reports
from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend, PullModel, StartReplica, UnknownAction, phrase
from enginehouse.core.errors import Conflict, Malformed, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.core.operation import wait_for_node
from enginehouse.core.progress import Progress
from enginehouse.core.progress import bounded as bounded_progress
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.late_replies import LateReplies, Reply
from enginehouse.frontend.delivery.replica_rows import adopt_restarted, agreeing, follow, forget_gone_replicas
from enginehouse.frontend.fleet.nodes import Nodes, note_no_subscriber
from enginehouse.frontend.fleet.registration import capacity_after
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Bus, Clock, Message
from enginehouse.store import db, intents, nodes, operations, supersession
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

# Many times the replies of a hundred nodes. Beyond it replies are dropped, and reports settle their intents.
QUEUE_LENGTH = 10_000
BATCH = 200
MAX_RUNNING = 1000  # commands that one worker may report as running
LATE_SECONDS = 1.0  # between two checks for replies whose owner did not store them; reads memory only
PROGRESS_WRITE_SECONDS = 2.0  # the row serves later readers; watchers get progress from memory
RESTARTED_MESSAGE = "the worker was restarted before the command ended; the command is sent again"
LOST_MESSAGE = (
    "the worker does not know the command: it was restarted, or the message was lost; the command is sent again"
)


class _Settled(Struct):
    """The effects of a batch of replies."""

    intents: list[Intent]
    unreachable: set[NodeId]  # nodes without a subscriber
    forced: list[Intent]  # upgrades to send again as forced installs: their workers do not know upgrades
    others: list[tuple[Reply, float]]  # intents of another owner, and the rest of its lease in seconds
    over: list[Intent]  # ended earlier; now their lingering commands ended too
    added: list[Intent]  # to the operations of the settled ones


class Reported(Struct):
    """The effects of a report."""

    intents: list[Intent]
    changed: bool = False
    ended: tuple[IntentId, ...] = ()  # cancelled or superseded, but still running on the worker
    added: Sequence[Intent] = ()  # to the operations of the settled ones


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
                outcome = self._believed(connection, intent, reply.outcome)
                change = intents_core.after_outcome(intent, outcome, now, self._clock.random())
            changes[intent.id] = intent, change
        done.over = self._lingering.note_replies(connection, over, now)
        done.intents = operations.apply_all(connection, changes.values())
        for intent in done.intents:
            follow(connection, intent, now)
        done.added = _point(connection, done.intents, now)
        operations.note_ended(connection, [intent.id for intent in done.intents if not intent.is_open])
        return done

    def _believed(self, connection: Connection, intent: Intent, outcome: Outcome) -> Outcome:
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

    # From heartbeats ---------------------------------------------------------------------------

    async def report(
        self, node_id: NodeId, report: Report, said: HeartbeatRequest | None = None
    ) -> tuple[IntentId, ...]:
        """Store a report, settle what it proves, and return the running intents that the worker must stop.

        The amounts of the heartbeat that brought it, `said`, are stored with it: whoever reads that an engine runs must
        not read the free memory from before it did.
        """

        def work(connection: Connection) -> Reported:
            return self._take_report(connection, node_id, report, said)

        done = await self._store.transaction(work)
        if done.changed:
            await self._board.node_changed(node_id)
        await self.publish_settled(done.intents, done.added, wake=done.changed)
        return done.ended

    async def restarted(self, node_id: NodeId) -> None:
        """Set the running intents of a restarted worker to waiting. Called for workers that send no reports."""

        def work(connection: Connection) -> list[Intent]:
            now = db.now(connection)
            settled = self._lingering.note_restart(connection, node_id, now)
            for intent in operations.open_on(connection, node_id):
                if intent.state == "running":
                    again = Change(
                        kind="wait", now=now, reason="worker_restarted", message=RESTARTED_MESSAGE, due_at=now
                    )
                    settled += _applied(connection, intent, again)
            return settled

        await self.publish_settled(await self._store.transaction(work))

    def _take_report(
        self, connection: Connection, node_id: NodeId, report: Report, said: HeartbeatRequest | None
    ) -> Reported:
        node = nodes.get(connection, node_id, lock=not report.is_whole)
        # A pending node's report is not stored: a join token alone must not fill the database.
        if node is None or not node.approved or reports.is_older(report, node.report):
            return Reported([])
        now = db.now(connection)
        report = reports.without_future_marks(report, now)
        if not report.is_whole:
            # A listing says nothing of files; what was pushed there is known here (`replica_rows`).
            report = msgspec.structs.replace(report, models=node.report.models)
        settled: list[Intent] = []
        open_ones = operations.open_on(connection, node_id)
        # An observed state proves nothing while an older command for the same subject runs or may still arrive. The
        # effect of the newer command must be seen first.
        about = {intent.subject for intent in open_ones}
        unanswered_generations = intents.unanswered_generations(connection, node_id, about)
        at_work = {} if report.is_whole else self._lingering.continuing_commands(connection, node_id)
        # A listing from before the end of such a command does not show its effect.
        just_over = set() if report.is_whole else intents.ended_since(connection, node_id, about, report.mark)
        for intent in open_ones:
            is_shadowed = unanswered_generations.get(intent.subject, 0) > 0 and report.is_whole
            is_shadowed = is_shadowed or bool(at_work.get(intent.subject, set()) - {intent.id})
            is_shadowed = is_shadowed or intent.subject in just_over
            change = self._evidence(report, intent, now, is_shadowed=is_shadowed)
            if change is not None and change.outcome is not None:
                outcome = self._believed(connection, intent, change.outcome)
                if outcome is not change.outcome:
                    # A waiting intent is sent again, and the reply settles it.
                    is_running = intent.state == "running"
                    change = intents_core.after_outcome(intent, outcome, now, 0.0) if is_running else None
            if change is not None:
                settled += _applied(connection, intent, change)
                if not report.is_whole and change.kind == "succeed":
                    self._lingering.note_settled_by_listing(connection, intent, report)
        gone = forget_gone_replicas(connection, node_id, report)
        gone = adopt_restarted(connection, node, report, self._nodes.replica_refusal, now) or gone
        changed = gone or _shown(report) != _shown(node.report)
        nodes.set_report(connection, node_id, report, now if changed else None)
        if said is not None:
            nodes.set_heartbeat(connection, node_id, capacity_after(node.capacity, said), now)
        added = _point(connection, settled, now)
        operations.note_ended(connection, [intent.id for intent in settled if not intent.is_open])
        ended = intents.ended_among(connection, node_id, report.running[:MAX_RUNNING])
        return Reported(settled, changed, ended, added)

    def _evidence(self, report: Report, intent: Intent, now: float, *, is_shadowed: bool) -> Change | None:
        """Return the change that a report proves for an open intent; None if it proves nothing."""
        result = reports.result_for(report, intent)
        # Waiting intents too: a command that succeeded while its node was unreachable is not sent again.
        if result is not None and (intent.state == "running" or result.succeeded):
            return intents_core.after_outcome(intent, intents_core.bounded(result), now, self._clock.random())
        if intent.id in report.running or report.mark < intent.created_at:
            return None
        shown = reports.shows(report, intent) if reports.may_settle(report, intent) else None
        if shown is not None and (not is_shadowed or reports.has_applied(report, intent)):
            return Change(kind="succeed", now=now, outcome=shown)
        if intent.state == "running" and reports.lost(report, intent):
            outcome = Outcome(code="worker_restarted", message=LOST_MESSAGE, can_heal=True)
            return intents_core.after_outcome(intent, outcome, now, self._clock.random())
        return None

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


def _applied(connection: Connection, intent: Intent, change: Change) -> list[Intent]:
    """Apply a change and its effects on replica rows, in one transaction."""
    try:
        after = operations.apply(connection, intent, change)
    except Conflict:
        return []  # settled concurrently
    follow(connection, after, change.now)
    return [after]


def _point(connection: Connection, settled: Sequence[Intent], now: float) -> list[Intent]:
    """Add intents for the other requested names that lead to what was installed."""
    added = supersession.add_pointers(connection, settled, lambda: IntentId(str(uuid.uuid4())), now)
    for intent in added:
        log.info("pointer.requested intent=%s node=%s action=%r", intent.id, intent.node_id, phrase(intent.action))
    return added


def _shown(report: Report) -> tuple[object, ...]:
    return (report.backends, report.models, report.replicas, report.failed, report.boot_id, report.version)
