"""What workers say, written down: replies, progress and reports.

Messages are taken off the bus at once and worked through in batches, one transaction each, so a thousand replies cost
a handful of transactions, a slow database never stalls the reader, and one that is away costs no reply. A reply is
written by the frontend that owns the intent, or by anyone who heard it once that lease has ended; a report is evidence
whoever receives it. Every write is a compare-and-set through the state table, so a late, doubled or stale word changes
nothing.
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
from enginehouse.core import report as reports
from enginehouse.core import subjects, wire
from enginehouse.core.action import InstallBackend, StartReplica, UnknownAction, phrase
from enginehouse.core.errors import Conflict, Malformed, Unavailable
from enginehouse.core.intent import NODE_AWAY, Change, Intent, Outcome
from enginehouse.core.operation import AWAY_MESSAGE
from enginehouse.core.progress import Progress
from enginehouse.core.progress import bounded as bounded_progress
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.late_replies import Overheard, Reply
from enginehouse.frontend.delivery.replica_rows import follow, forget_gone_replicas
from enginehouse.frontend.fleet.nodes import Nodes, note_deaf
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Bus, Clock, Message
from enginehouse.store import db, intents, nodes, operations, requests
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

# Replies of a hundred nodes many times over; beyond it they are dropped, and reports tell instead.
QUEUE_LENGTH = 10_000
BATCH = 200
MAX_RUNNING = 1000  # commands that one worker may say it works on
LATE_SECONDS = 1.0  # between two looks for replies whose owner did not take them; nothing is asked for that
PROGRESS_WRITE_SECONDS = 2.0  # the row is for those who look later; watchers are told from memory
RESTARTED_MESSAGE = "the worker was restarted before it was done; it is sent again"
LOST_MESSAGE = "the worker knows nothing of it: it was restarted, or the message was lost; it is sent again"


class _Settled(Struct):
    """What a batch of replies did."""

    intents: list[Intent]
    deaf: set[str]  # nodes where nobody listens
    forced: list[Intent]  # upgrades to be sent again, to workers that know none
    others: list[tuple[Reply, float]]  # to what another frontend has sent, and for how long its lease still holds
    over: list[Intent]  # ended before, and now on their workers too


class Reported(Struct):
    """What a report did."""

    intents: list[Intent]
    changed: bool = False
    ended: tuple[str, ...] = ()  # which of those that the worker still works on have been cancelled or superseded


class LingeringCommands(Protocol):
    """Commands that workers continue although their intents have ended (`frontend.localai.lingering`)."""

    def note_replies(self, connection: Connection, outcomes: Mapping[str, Outcome], now: float) -> list[Intent]: ...

    def note_restart(self, connection: Connection, node_id: str, now: float) -> list[Intent]: ...

    def note_shown(self, connection: Connection, before: Intent, report: Report) -> None: ...

    def shadows(self, connection: Connection, node_id: str) -> dict[str, set[str]]: ...


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
        self._overheard = Overheard(clock)
        self._unwritten: dict[str, Progress] = {}
        # What a node said that only another one may say, by kind.
        self.violations: Counter[str] = Counter()
        self._on_settled: list[Callable[[], None]] = []
        self._on_ended: Callable[[Sequence[Intent]], None] = lambda intents: None
        self._send_forced: Callable[[Sequence[Intent]], Awaitable[None]] | None = None

    def on_settled(self, wake: Callable[[], None]) -> None:
        """Whom to wake when an intent ended or a replica came or went: the dispatcher, the loader, the router."""
        self._on_settled.append(wake)

    def on_ended(self, note: Callable[[Sequence[Intent]], None]) -> None:
        """Who is told of every intent that a reply has changed: the poller."""
        self._on_ended = note

    def on_old_worker(self, send_forced: Callable[[Sequence[Intent]], Awaitable[None]]) -> None:
        """How an upgrade is sent to a worker that knows none: the dispatcher's."""
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

    def _take_progress(self, message: Message) -> None:
        try:
            event = wire.decode(message.payload, wire.ProgressEvent, "a progress event")
        except Malformed as error:
            log.warning("progress.dropped subject=%s error=%s", message.subject, error)
            return
        # The subject's node is the one whose credential could publish it; the payload may claim anything.
        sender = message.subject.split(".")[1]
        if event.node_id != sender:
            self._refuse("progress", sender)
            return
        progress = bounded_progress(wire.progress_of(event))
        if event.intent:
            told = event.intent if self._board.progress(sender, event.intent, progress) else ""
        else:
            # One of LocalAI's workers: it knows the operation, and events come in order or not at all.
            told, progress = self._board.plain_progress(sender, event.op_id, progress)
        if told:
            self._unwritten[told] = progress

    def _refuse(self, kind: str, node_id: str) -> None:
        """The credential of one node, used to speak about another."""
        self.violations[kind] += 1
        if self.violations[kind] & (self.violations[kind] - 1) == 0:  # the 1st, 2nd, 4th, 8th …
            log.error("bus.violation kind=%s node=%s count=%d", kind, node_id, self.violations[kind])

    async def replies_step(self) -> None:
        """Work through the replies that have come; waits for the first."""
        if not self._batch:
            self._batch.append(await self._replies.get())
        while len(self._batch) < BATCH and not self._replies.empty():
            self._batch.append(self._replies.get_nowait())
        batch, self._batch = self._batch, []
        try:
            done = await self._store.transaction(lambda connection: self._settle(connection, batch))
        except Unavailable:
            self._batch = batch  # the first of the next step
            raise
        for reply, seconds in done.others:
            self._overheard.keep(reply, seconds)
        if done.forced and self._send_forced is not None:
            await self._send_forced(done.forced)
        self._on_ended([*done.intents, *done.over])
        await self._nodes.tell(done.deaf)
        await self.tell(done.intents, wake=bool(done.over))
        await self._board.intents_changed(done.over)

    async def late_step(self) -> None:
        """Look once more at replies that their owner may not have heard."""
        for reply in self._overheard.take_due():
            with contextlib.suppress(asyncio.QueueFull):
                self._replies.put_nowait(reply)

    def _settle(self, connection: Connection, batch: Sequence[Reply]) -> _Settled:
        now = db.now(connection)
        done = _Settled([], set(), [], [], [])
        over: dict[str, Outcome] = {}
        known = operations.lock_intents(connection, {reply.to.intent_id for reply in batch})
        changes: dict[str, tuple[Intent, Change]] = {}
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
                continue  # said twice
            if intent.owner != self._owner and intent.lease_until >= now:
                # Its owner should have heard the same. That nobody listens is only true now.
                if reply.outcome is not None:
                    done.others.append((reply, intent.lease_until - now))
                continue
            if isinstance(intent.action, UnknownAction):
                continue  # what follows from it only a later version knows
            if reply.outcome is None and _may_be_old(intent) and not reply.to.is_forced:
                done.forced.append(intent)
                continue
            if reply.outcome is None:
                # In one transaction with the wait, or the dispatcher would take it for due on a healthy node.
                if note_deaf(connection, intent.node_id, now):
                    done.deaf.add(intent.node_id)
                change = Change(kind="wait", now=now, reason=NODE_AWAY, message=AWAY_MESSAGE, due_at=now)
            else:
                outcome = self._believed(connection, intent, reply.outcome)
                change = intents_core.after_outcome(intent, outcome, now, self._clock.random())
            changes[intent.id] = intent, change
        done.over = self._lingering.note_replies(connection, over, now)
        done.intents = operations.apply_all(connection, changes.values())
        for intent in done.intents:
            follow(connection, intent, now)
        _point(connection, done.intents, now)
        operations.note_ended(connection, [intent.id for intent in done.intents if not intent.is_open])
        return done

    def _believed(self, connection: Connection, intent: Intent, outcome: Outcome) -> Outcome:
        """What a worker says of its work, except where prompts and keys would be sent to a place of its choice."""
        if not isinstance(intent.action, StartReplica) or not outcome.succeeded or not outcome.address:
            return outcome
        node = nodes.get(connection, intent.node_id)
        why = "its node is gone" if node is None else self._nodes.replica_refusal(node, outcome.address)
        if not why:
            return outcome
        self._refuse("address", intent.node_id)
        message = f"cannot use the address {outcome.address[:80]!r} that the worker named for the replica: {why}"
        return Outcome(code="address_refused", message=message)

    # From heartbeats ---------------------------------------------------------------------------

    async def report(self, node_id: str, report: Report) -> tuple[str, ...]:
        """Store a report and settle what it proves. Which of the intents it works on have been cancelled or superseded:
        the worker is to stop them.
        """
        done = await self._store.transaction(lambda connection: self._take_report(connection, node_id, report))
        if done.changed:
            await self._board.node_changed(node_id)
        await self.tell(done.intents, wake=done.changed)
        return done.ended

    async def restarted(self, node_id: str) -> None:
        """A worker that sends no reports has registered anew: what it was doing it does no longer."""

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

        await self.tell(await self._store.transaction(work))

    def _take_report(self, connection: Connection, node_id: str, report: Report) -> Reported:
        node = nodes.get(connection, node_id)
        # Of a machine that nobody approved nothing is kept but that it is there: a join token must not fill rows.
        if node is None or not node.approved or _is_older(report, node.report):
            return Reported([])
        now = db.now(connection)
        report = reports.believed(report, now)
        settled: list[Intent] = []
        open_ones = operations.open_on(connection, node_id)
        # What is so proves nothing while an older command about it is at work, or may still arrive: the newer one has
        # to be seen first.
        shadowed = intents.shadowed(connection, node_id, {intent.subject for intent in open_ones})
        at_work = {} if report.is_whole else self._lingering.shadows(connection, node_id)
        for intent in open_ones:
            is_shadowed = shadowed.get(intent.subject, 0) > 0 and report.is_whole
            is_shadowed = is_shadowed or bool(at_work.get(intent.subject, set()) - {intent.id})
            change = self._evidence(report, intent, now, is_shadowed=is_shadowed)
            if change is not None and change.outcome is not None:
                outcome = self._believed(connection, intent, change.outcome)
                if outcome is not change.outcome:
                    # One that waits is sent again, and its answer settles it.
                    is_running = intent.state == "running"
                    change = intents_core.after_outcome(intent, outcome, now, 0.0) if is_running else None
            if change is not None:
                settled += _applied(connection, intent, change)
                if not report.is_whole and change.kind == "succeed":
                    self._lingering.note_shown(connection, intent, report)
        gone = forget_gone_replicas(connection, node_id, report)
        changed = gone or _shown(report) != _shown(node.report)
        nodes.set_report(connection, node_id, report, now if changed else None)
        _point(connection, settled, now)
        operations.note_ended(connection, [intent.id for intent in settled if not intent.is_open])
        ended = intents.ended_among(connection, node_id, report.running[:MAX_RUNNING])
        return Reported(settled, changed, ended)

    def _evidence(self, report: Report, intent: Intent, now: float, *, is_shadowed: bool) -> Change | None:
        """What a report proves about an open intent; None when it proves nothing."""
        result = reports.result_for(report, intent)
        # Also of one that waits for its node to come back: what was done while nobody heard is not sent again.
        if result is not None and (intent.state == "running" or result.succeeded):
            return intents_core.after_outcome(intent, intents_core.bounded(result), now, self._clock.random())
        if intent.id in report.running or report.mark < intent.created_at:
            return None
        shown = reports.shows(report, intent) if reports.is_evidence(report, intent) else None
        if shown is not None and (not is_shadowed or reports.has_applied(report, intent)):
            return Change(kind="succeed", now=now, outcome=shown)
        if intent.state == "running" and reports.lost(report, intent):
            outcome = Outcome(code="worker_restarted", message=LOST_MESSAGE, can_heal=True)
            return intents_core.after_outcome(intent, outcome, now, self._clock.random())
        return None

    # Telling -----------------------------------------------------------------------------------

    async def tell(self, settled: Sequence[Intent], *, wake: bool = False) -> None:
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
        # Waking comes first: whoever waits for a replica should not wait for the watchers to be told.
        if settled or wake:
            for call in self._on_settled:
                call()
        await self._board.intents_changed(settled)

    async def write_progress_step(self) -> None:
        """Keep the rows roughly up to date for those who look later, however fast the events come."""
        taken, self._unwritten = self._unwritten, {}
        if not taken:
            return

        def work(connection: Connection) -> None:
            intents.set_progress(connection, taken, self._owner, db.now(connection))

        await self._store.transaction(work)


def _may_be_old(intent: Intent) -> bool:
    """Whether nobody listening may only mean that the worker is older than upgrades."""
    return isinstance(intent.action, InstallBackend) and intent.action.upgrade


def _applied(connection: Connection, intent: Intent, change: Change) -> list[Intent]:
    """Apply a change and what follows from it for replicas, in the same transaction."""
    try:
        after = operations.apply(connection, intent, change)
    except Conflict:
        return []  # someone else settled it first
    follow(connection, after, change.now)
    return [after]


def _point(connection: Connection, settled: Sequence[Intent], now: float) -> None:
    """Other names that lead to what was installed are written next, for those who asked for them."""
    for intent in requests.add_pointers(connection, settled, lambda: str(uuid.uuid4()), now):
        log.info("intent.pointer intent=%s node=%s action=%r", intent.id, intent.node_id, phrase(intent.action))


def _is_older(report: Report, known: Report) -> bool:
    if not report.is_whole and not known.is_whole:
        return report.mark < known.mark  # of two listings of one of LocalAI's workers, asked one after the other
    return report.boot_id == known.boot_id and report.sequence < known.sequence


def _shown(report: Report) -> tuple[object, ...]:
    return (report.backends, report.models, report.replicas, report.boot_id, report.version)
