"""Stores reports, and settles what they prove.

A report counts on every frontend, whoever owns the intent. Every write is a compare-and-set through the state table, so
reports that are late, repeated or outdated change nothing. What a report proves is decided in `core.report`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

import enginehouse
from enginehouse.core import intent as intents_core
from enginehouse.core import report as reports
from enginehouse.core.errors import Conflict, NotFound
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.node import Node
from enginehouse.core.node_api import BUS_AWAY, HeartbeatRequest
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.collector import Collector, LingeringCommands, point
from enginehouse.frontend.delivery.replica_rows import adopt_restarted, follow, forget_gone_replicas
from enginehouse.frontend.fleet.heartbeats import Heartbeats, stamp_of
from enginehouse.frontend.fleet.nodes import Nodes, note_heard
from enginehouse.frontend.fleet.registration import capacity_after
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Clock
from enginehouse.store import db, intents, liveness, nodes, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import LivenessChange, confirming

MAX_RUNNING = 1000  # commands that one worker may report as running
RESTARTED_MESSAGE = "the worker was restarted before the command ended; the command is sent again"
LOST_MESSAGE = (
    "the worker does not know the command: it was restarted, or the message was lost; the command is sent again"
)


class Reported(Struct):
    """The effects of a report."""

    intents: list[Intent]
    changed: bool = False
    ended: tuple[IntentId, ...] = ()  # cancelled or superseded, but still running on the worker
    added: Sequence[Intent] = ()  # to the operations of the settled ones


class Answered(Struct, frozen=True):
    """What a worker is answered."""

    mark: float
    report_digest: str = ""  # of its report, if that is the stored one
    cancelled: tuple[IntentId, ...] = ()


class _Taken(Struct):
    """The effects of a heartbeat with a report."""

    answer: Answered
    reported: Reported
    is_news: bool = False  # another health


class WorkerReports:
    def __init__(
        self,
        store: Store,
        board: Board,
        nodes: Nodes,
        clock: Clock,
        collector: Collector,
        lingering: LingeringCommands,
        heartbeats: Heartbeats,
    ) -> None:
        self._store = store
        self._board = board
        self._nodes = nodes
        self._clock = clock
        self._collector = collector
        self._lingering = lingering
        self.heartbeats = heartbeats

    async def heartbeat(self, node_id: NodeId, said: HeartbeatRequest) -> Answered:
        """Store a heartbeat and its report, settle what that proves, and return the mark for the next one.

        A worker of the previous version sends its report each time, without a digest; most are unchanged.
        """
        given = said.report_digest or (reports.digest_of(said.report) if said.report is not None else "")
        digest = reports.stored_digest(given, enginehouse.__version__)
        if said.report is None or not said.report_digest:
            heard = await self.heartbeats.hear(node_id, said, digest)
            if not heard.needs_look:
                return Answered(heard.mark, heard.report_digest)
        done = await self._store.transaction(lambda connection: self._take_heartbeat(connection, node_id, said, digest))
        if done.is_news:
            await self._nodes.publish_changed([node_id])
        await self._publish(node_id, done.reported)
        return done.answer

    async def report(self, node_id: NodeId, report: Report) -> tuple[IntentId, ...]:
        """Store a report, settle what it proves, and return the running intents that the worker must stop."""

        def work(connection: Connection) -> Reported:
            node = nodes.get(connection, node_id, lock=not report.is_whole)
            # A pending node's report is not stored: a join token alone must not fill the database.
            if node is None or not node.approved or reports.is_older(report, node.report):
                return Reported([])
            return self._take_report(connection, node, report, db.now(connection))

        done = await self._store.transaction(work)
        await self._publish(node_id, done)
        return done.ended

    async def _publish(self, node_id: NodeId, done: Reported) -> None:
        if done.changed:
            await self._board.node_changed(node_id)
        await self._collector.publish_settled(done.intents, done.added, wake=done.changed)

    def _take_heartbeat(self, connection: Connection, node_id: NodeId, said: HeartbeatRequest, digest: str) -> _Taken:
        """Store a heartbeat with its report, which is here or is the stored one.

        All in one transaction: whoever reads that an engine runs must not read the free memory from before it did, and
        what a node did while it was away must not be sent to it again when it counts as healthy.
        """
        node = nodes.get(connection, node_id)
        if node is None:
            raise NotFound(f"cannot find the node {node_id}: register again", code="not_found")
        now, stamp = db.now(connection), stamp_of(said)
        taken = _Taken(Answered(now), Reported([]))
        is_same = stamp is not None and bool(digest) and digest == node.report_digest
        report = reports.restamped(node.report, stamp) if is_same and stamp is not None else said.report
        if report is None or reports.is_older(report, node.report):
            # Another one is stored by now, or this frontend was frozen with it: what it says of memory is outdated.
            return taken
        change = LivenessChange(node_id=node_id, capacity=capacity_after(node.capacity, said))
        if node.approved:
            report = reports.without_future_marks(report, now)
            taken.reported = self._take_report(connection, node, report, now, digest)
            taken.answer = Answered(now, said.report_digest, taken.reported.ended)
            if is_same:
                change = confirming(change, digest, report)
        taken.is_news = note_heard(connection, node, said.bus == BUS_AWAY, now)
        # Last, as in every transaction: whoever locks both rows locks that of the node first.
        liveness.write(connection, [change], now)
        return taken

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

        await self._collector.publish_settled(await self._store.transaction(work))

    def _take_report(
        self, connection: Connection, node: Node, report: Report, now: float, digest: str = ""
    ) -> Reported:
        """Settle what a report proves, which is not older than the stored one, and store it unless it is the same."""
        is_same = bool(digest) and digest == node.report_digest
        report = reports.without_future_marks(report, now)
        if not report.is_whole:
            # A listing says nothing of files; what was pushed there is known here (`replica_rows`).
            report = msgspec.structs.replace(report, models=node.report.models)
        settled: list[Intent] = []
        open_ones = operations.open_on(connection, node.id)
        # An observed state proves nothing while an older command for the same subject runs or may still arrive. The
        # effect of the newer command must be seen first.
        about = {intent.subject for intent in open_ones}
        unanswered_generations = intents.unanswered_generations(connection, node.id, about)
        at_work = {} if report.is_whole else self._lingering.continuing_commands(connection, node.id)
        # A listing from before the end of such a command does not show its effect.
        just_over = set() if report.is_whole else intents.ended_since(connection, node.id, about, report.mark)
        for intent in open_ones:
            is_shadowed = unanswered_generations.get(intent.subject, 0) > 0 and report.is_whole
            is_shadowed = is_shadowed or bool(at_work.get(intent.subject, set()) - {intent.id})
            is_shadowed = is_shadowed or intent.subject in just_over
            change = self._evidence(report, intent, now, is_shadowed=is_shadowed)
            if change is not None and change.outcome is not None:
                outcome = self._collector.believed(connection, intent, change.outcome)
                if outcome is not change.outcome:
                    # A waiting intent is sent again, and the reply settles it.
                    is_running = intent.state == "running"
                    change = intents_core.after_outcome(intent, outcome, now, 0.0) if is_running else None
            if change is not None:
                settled += _applied(connection, intent, change)
                if not report.is_whole and change.kind == "succeed":
                    self._lingering.note_settled_by_listing(connection, intent, report)
        gone = forget_gone_replicas(connection, node.id, report)
        gone = adopt_restarted(connection, node, report, self._nodes.replica_refusal, now) or gone
        changed = gone or _shown(report) != _shown(node.report)
        if not is_same or gone:
            nodes.set_report(connection, node.id, report, now if changed else None, digest)
        added = point(connection, settled, now)
        operations.note_ended(connection, [intent.id for intent in settled if not intent.is_open])
        ended = intents.ended_among(connection, node.id, report.running[:MAX_RUNNING])
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


def _applied(connection: Connection, intent: Intent, change: Change) -> list[Intent]:
    """Apply a change and its effects on replica rows, in one transaction."""
    try:
        after = operations.apply(connection, intent, change)
    except Conflict:
        return []  # settled concurrently
    follow(connection, after, change.now)
    return [after]


def _shown(report: Report) -> tuple[object, ...]:
    return (report.backends, report.models, report.replicas, report.failed, report.boot_id, report.version)
