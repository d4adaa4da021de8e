"""Stores reports, and settles what they prove.

A report counts on every frontend, whoever owns the intent. Every write is a compare-and-set through the state table, so
reports that are late, repeated or outdated change nothing. What a report proves is decided in `core.report`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

import enginehouse
from enginehouse.core import intent as intents_core
from enginehouse.core import report as reports
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.node import Node
from enginehouse.core.node_api import BUS_AWAY, HeartbeatRequest
from enginehouse.core.report import Report
from enginehouse.frontend.delivery.collector import Collector, LingeringCommands, point
from enginehouse.frontend.delivery.replica_rows import adopt_restarted, follow, forget_gone_replicas
from enginehouse.frontend.fleet.heartbeats import Heartbeats, stamp_of, unknown_node
from enginehouse.frontend.fleet.nodes import Nodes, note_all_heard
from enginehouse.frontend.fleet.registration import capacity_after
from enginehouse.frontend.fleet.shared_transactions import Performed, SharedTransactions
from enginehouse.frontend.watching.board import Board
from enginehouse.ports import Clock
from enginehouse.store import db, intents, liveness, nodes, operations, replicas
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import LivenessChange, confirming

MOST_AT_ONCE = 200  # reports of one transaction, as replies: it must not keep others from the store for long
MAX_RUNNING = 1000  # commands that one worker may report as running
RESTARTED_MESSAGE = "the worker was restarted before the command ended; the command is sent again"
LOST_MESSAGE = (
    "the worker does not know the command: it was restarted, or the message was lost; the command is sent again"
)


class Reported(Struct):
    """The effects of reports."""

    intents: list[Intent] = []
    added: Sequence[Intent] = ()  # to the operations of the settled ones
    changed: list[NodeId] = []  # nodes that are shown otherwise now
    ended: dict[NodeId, tuple[IntentId, ...]] = {}  # cancelled or superseded, but still running on the worker


class Answered(Struct, frozen=True):
    """What a worker is answered."""

    mark: float
    report_digest: str = ""  # of its report, if that is the stored one
    cancelled: tuple[IntentId, ...] = ()


class _Said(Struct, frozen=True, kw_only=True):
    """A heartbeat whose report must be looked at; that is in it, or is the stored one."""

    node_id: NodeId
    request: HeartbeatRequest
    digest: str  # of the report, as it would be stored


class _Given(Struct, frozen=True, kw_only=True):
    """A report, and the node as it was before."""

    node: Node
    report: Report
    digest: str = ""

    @property
    def is_same(self) -> bool:
        return bool(self.digest) and self.digest == self.node.report_digest


class _Effects(Struct):
    """What heartbeats with reports did."""

    reported: Reported
    news: list[NodeId]  # nodes with another health


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
        self.transactions = SharedTransactions(store, self._take_heartbeats, self._publish_all, most=MOST_AT_ONCE)

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
        return await self.transactions.add(node_id, _Said(node_id=node_id, request=said, digest=digest))

    async def report(self, node_id: NodeId, report: Report) -> tuple[IntentId, ...]:
        """Store a report, settle what it proves, and return the running intents that the worker must stop."""

        def work(connection: Connection) -> Reported:
            node = nodes.get(connection, node_id, lock=not report.is_whole)
            # A pending node's report is not stored: a join token alone must not fill the database.
            if node is None or not node.approved or reports.is_older(report, node.report):
                return Reported()
            now = db.now(connection)
            given = _Given(node=node, report=reports.without_future_marks(report, now))
            return self._take_reports(connection, [given], now)

        done = await self._store.transaction(work)
        await self._publish(done)
        return done.ended.get(node_id, ())

    async def _publish_all(self, done: _Effects) -> None:
        await self._nodes.publish_changed(done.news)
        await self._publish(done.reported)

    async def _publish(self, done: Reported) -> None:
        await self._board.nodes_changed(done.changed)
        await self._collector.publish_settled(done.intents, done.added, wake=bool(done.changed))

    def _take_heartbeats(self, connection: Connection, batch: Sequence[_Said]) -> Performed[Answered, _Effects]:
        """Store heartbeats of different nodes with their reports.

        All in one transaction: whoever reads that an engine runs must not read the free memory from before it did, and
        what a node did while it was away must not be sent to it again when it counts as healthy.
        """
        now = db.now(connection)
        known = {node.id: node for node in nodes.many(connection, [one.node_id for one in batch])}
        given: dict[NodeId, _Given] = {}
        heard: list[tuple[Node, bool]] = []
        changes: list[LivenessChange] = []
        for one in batch:
            node, said = known.get(one.node_id), one.request
            taken = None if node is None else _taken(node, one, now)
            if node is None or taken is None:
                # Another report is stored by now, or this frontend was frozen with it: what it says of memory is
                # outdated.
                continue
            change = LivenessChange(node_id=node.id, capacity=capacity_after(node.capacity, said))
            if node.approved:
                given[node.id] = taken
                change = confirming(change, one.digest, taken.report) if taken.is_same else change
            changes.append(change)
            heard.append((node, said.bus == BUS_AWAY))
        reported = self._take_reports(connection, list(given.values()), now)
        news = note_all_heard(connection, heard, now)
        # Last, as in every transaction: whoever locks both rows locks that of the node first.
        liveness.write(connection, changes, now)
        answers: list[Answered | EnginehouseError] = []
        for one in batch:
            if one.node_id in given:
                answers.append(Answered(now, one.request.report_digest, reported.ended.get(one.node_id, ())))
            else:
                answers.append(Answered(now) if one.node_id in known else unknown_node(one.node_id))
        return Performed(answers, _Effects(reported, news))

    async def restarted(self, node_id: NodeId) -> None:
        """Set the running intents of a restarted worker to waiting. Called for workers that send no reports."""

        def work(connection: Connection) -> list[Intent]:
            now = db.now(connection)
            settled = self._lingering.note_restart(connection, node_id, now)
            again = Change(kind="wait", now=now, reason="worker_restarted", message=RESTARTED_MESSAGE, due_at=now)
            running = [one for one in operations.open_on(connection, node_id) if one.state == "running"]
            return settled + list(_applied(connection, [(intent, again) for intent in running]).values())

        await self._collector.publish_settled(await self._store.transaction(work))

    def _take_reports(self, connection: Connection, given: Sequence[_Given], now: float) -> Reported:
        """Settle what reports of different nodes prove, none older than the stored one, and store those that are not
        the same.
        """
        given = [_with_known_files(one) for one in given]
        node_ids = [one.node.id for one in given]
        done = Reported(self._settle(connection, given, now), [], [], {})
        stored = replicas.on_nodes(connection, node_ids)
        changes: list[nodes.ReportChange] = []
        for one in given:
            rows = stored.get(one.node.id, [])
            gone = forget_gone_replicas(connection, rows, one.report)
            gone = adopt_restarted(connection, one.node, one.report, self._nodes.replica_refusal, now) or gone
            is_changed = gone or _shown(one.report) != _shown(one.node.report)
            if is_changed:
                done.changed.append(one.node.id)
            if not one.is_same or gone:
                changed_at = now if is_changed else None
                changes.append(nodes.ReportChange(one.node.id, one.report, changed_at, one.digest))
        nodes.set_reports(connection, changes)
        done.added = point(connection, done.intents, now)
        operations.note_ended(connection, [intent.id for intent in done.intents if not intent.is_open])
        done.ended = intents.ended_among(connection, {one.node.id: one.report.running[:MAX_RUNNING] for one in given})
        return done

    def _settle(self, connection: Connection, given: Sequence[_Given], now: float) -> list[Intent]:
        """Apply what reports prove for the open intents of their nodes."""
        opened = operations.open_among(connection, [one.node.id for one in given])
        # An observed state proves nothing while an older command for the same subject runs or may still arrive. The
        # effect of the newer command must be seen first.
        about = {intent.subject for some in opened.values() for intent in some}
        unanswered = intents.unanswered_generations(connection, opened, about)
        found: list[tuple[_Given, Intent, Change]] = []
        for one in given:
            shadowed = self._shadowed(connection, one, opened.get(one.node.id, []), unanswered)
            for intent in opened.get(one.node.id, ()):
                change = self._evidence(one.report, intent, now, is_shadowed=intent.id in shadowed)
                change = self._believed(connection, intent, change, now) if change is not None else None
                if change is not None:
                    found.append((one, intent, change))
        after = _applied(connection, [(intent, change) for _, intent, change in found])
        for one, intent, change in found:
            if not one.report.is_whole and change.kind == "succeed" and intent.id in after:
                self._lingering.note_settled_by_listing(connection, intent, one.report)
        return list(after.values())

    def _shadowed(
        self,
        connection: Connection,
        one: _Given,
        opened: Sequence[Intent],
        unanswered: Mapping[tuple[NodeId, str], int],
    ) -> set[IntentId]:
        """The open intents of a node for which its observed state proves nothing."""
        node_id = one.node.id
        if one.report.is_whole:
            return {intent.id for intent in opened if unanswered.get((node_id, intent.subject), 0) > 0}
        at_work = self._lingering.continuing_commands(connection, node_id)
        # A listing from before the end of such a command does not show its effect.
        just_over = intents.ended_since(connection, node_id, {intent.subject for intent in opened}, one.report.mark)
        return {
            intent.id
            for intent in opened
            if at_work.get(intent.subject, set()) - {intent.id} or intent.subject in just_over
        }

    def _believed(self, connection: Connection, intent: Intent, change: Change, now: float) -> Change | None:
        """The change, or what is to be done where the outcome in it is not accepted."""
        if change.outcome is None:
            return change
        outcome = self._collector.believed(connection, intent, change.outcome)
        if outcome is change.outcome:
            return change
        # A waiting intent is sent again, and the reply settles it.
        return intents_core.after_outcome(intent, outcome, now, 0.0) if intent.state == "running" else None

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


def _taken(node: Node, said: _Said, now: float) -> _Given | None:
    """The report of a heartbeat; None if that of its node is newer."""
    stamp = stamp_of(said.request)
    is_same = stamp is not None and bool(said.digest) and said.digest == node.report_digest
    report = reports.restamped(node.report, stamp) if is_same and stamp is not None else said.request.report
    if report is None or reports.is_older(report, node.report):
        return None
    return _Given(node=node, report=reports.without_future_marks(report, now), digest=said.digest)


def _with_known_files(one: _Given) -> _Given:
    """A listing says nothing of files; what was pushed there is known here (`replica_rows`)."""
    if one.report.is_whole:
        return one
    return msgspec.structs.replace(one, report=msgspec.structs.replace(one.report, models=one.node.report.models))


def _applied(connection: Connection, changes: Sequence[tuple[Intent, Change]]) -> dict[IntentId, Intent]:
    """Apply changes and their effects on replica rows, in one transaction; not to what changed since it was read."""
    if not changes:
        return {}
    locked = operations.lock_intents(connection, [before.id for before, _ in changes])
    same = [
        (found, change)
        for before, change in changes
        if (found := locked.get(before.id)) is not None and found.version == before.version
    ]
    settled = operations.apply_all(connection, same)
    for after, (_, change) in zip(settled, same, strict=True):
        follow(connection, after, change.now)
    return {after.id: after for after in settled}


def _shown(report: Report) -> tuple[object, ...]:
    processes = (report.replicas, report.failed, report.restarting)
    return (report.backends, report.models, *processes, report.boot_id, report.version)
