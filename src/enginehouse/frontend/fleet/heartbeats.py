"""Stores signs of life, for many nodes in one transaction.

A heartbeat whose report may change more than its own row is left to `delivery.reports`: nothing here reads a report.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import BUS_AWAY, HeartbeatRequest
from enginehouse.core.report import ReportStamp
from enginehouse.frontend.fleet.nodes import Nodes, note_all_heard
from enginehouse.frontend.fleet.registration import capacity_after
from enginehouse.frontend.fleet.shared_transactions import Performed, SharedTransactions
from enginehouse.store import db, liveness
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import Liveness, LivenessChange, confirming

MOST_AT_ONCE = 1000


class Heard(Struct, frozen=True):
    """What became of a heartbeat."""

    mark: float
    report_digest: str = ""  # of the worker's report, if it is the stored one
    needs_look: bool = False  # its report must be looked at, and nothing was stored yet


class _Said(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    request: HeartbeatRequest
    digest: str  # of its report, as it would be stored


def unknown_node(node_id: NodeId) -> NotFound:
    return NotFound(f"cannot find the node {node_id}: register again", code="not_found")


def stamp_of(said: HeartbeatRequest) -> ReportStamp | None:
    """When the worker's report was taken; None if it has none to show."""
    if said.report is not None:
        return ReportStamp(sequence=said.report.sequence, mark=said.report.mark)
    return said.unchanged


class Heartbeats:
    def __init__(self, store: Store, nodes: Nodes) -> None:
        self.transactions = SharedTransactions(store, self._hear, nodes.publish_changed, most=MOST_AT_ONCE)

    async def hear(self, node_id: NodeId, said: HeartbeatRequest, digest: str) -> Heard:
        """Store a heartbeat, with others that wait. Returns when it is committed."""
        return await self.transactions.add(node_id, _Said(node_id=node_id, request=said, digest=digest))

    def _hear(self, connection: Connection, batch: Sequence[_Said]) -> Performed[Heard, list[NodeId]]:
        now = db.now(connection)
        known = liveness.some(connection, (one.node_id for one in batch))
        answers: list[Heard | EnginehouseError] = []
        changes: list[LivenessChange] = []
        heard: list[tuple[Liveness, bool]] = []
        for one in batch:
            row = known.get(one.node_id)
            if row is None:
                answers.append(unknown_node(one.node_id))
                continue
            answer, change = judge(row, one.request, one.digest, now)
            answers.append(answer)
            if change is not None:
                changes.append(change)
                heard.append((row, one.request.bus == BUS_AWAY))
        news = note_all_heard(connection, heard, now)
        for change in changes:
            if known[change.node_id].is_new:
                liveness.add(connection, change.node_id, change.capacity, now)
        # Last, as in every transaction: whoever locks both rows locks that of the node first.
        liveness.write(connection, changes, now)
        return Performed(answers, news)


def judge(row: Liveness, said: HeartbeatRequest, digest: str, now: float) -> tuple[Heard, LivenessChange | None]:
    """What a heartbeat says of its node, and what it changes there.

    An unchanged report is left to `delivery.reports` where something on the node waits for a newer one.
    """
    stamp = stamp_of(said)
    change = LivenessChange(node_id=row.id, capacity=capacity_after(row.capacity, said))
    # A pending node's report is not stored, and proves nothing.
    if stamp is None or not row.approved:
        return Heard(now), change
    if not digest or digest != row.report_digest:
        # Nothing is confirmed, so the worker sends its report at once. What it did while it was away must be known
        # before it gets commands again; and this one may be late, from before the report that is stored.
        return Heard(now, needs_look=said.report is not None), None
    if stamp.sequence < row.sequence:
        return Heard(now, said.report_digest), None  # this frontend was frozen with it
    if row.is_busy:
        return Heard(now, needs_look=True), None
    # A mark that was not issued yet proves nothing.
    stamp = ReportStamp(sequence=stamp.sequence, mark=min(stamp.mark, now))
    return Heard(now, said.report_digest), confirming(change, digest, stamp)
