"""Stores signs of life, for many nodes in one transaction.

Heartbeats that arrive while a transaction is under way, or soon after it, are stored together by whichever of them has
the next turn. Nobody is answered before its own heartbeat is committed, and a database that is away is told to each. A
heartbeat whose report may change more than its own row is left to `delivery.reports`: nothing here reads a report.
"""

from __future__ import annotations

import asyncio
import math

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import BUS_AWAY, HeartbeatRequest
from enginehouse.core.report import ReportStamp
from enginehouse.frontend.fleet.nodes import Nodes, health_of_heard, note_heard
from enginehouse.frontend.fleet.registration import capacity_after
from enginehouse.store import db, liveness
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import Liveness, LivenessChange, confirming

# Between two transactions of one frontend: a worker waits so much longer for its answer. It grows with the heartbeats
# of the last one, up to five times as much, so that a thousand nodes cost two transactions a second and eight nodes
# are answered at once.
GATHER_SECONDS = 0.1
PER_STEP = 2  # heartbeats of one transaction for each further step of the pause
MOST_STEPS = 5
MOST_AT_ONCE = 1000


class Heard(Struct, frozen=True):
    """What became of a heartbeat."""

    mark: float
    report_digest: str = ""  # of the worker's report, if it is the stored one
    needs_look: bool = False  # its report must be looked at, and nothing was stored yet


class _Waiting(Struct, kw_only=True):
    node_id: NodeId
    said: HeartbeatRequest
    digest: str  # of its report, as it would be stored
    heard: Heard | None = None
    error: EnginehouseError | None = None


class _Stored(Struct):
    """The effects of one transaction."""

    heard: list[Heard | None]  # None for an unknown node
    news: list[NodeId]


def stamp_of(said: HeartbeatRequest) -> ReportStamp | None:
    """When the worker's report was taken; None if it has none to show."""
    if said.report is not None:
        return ReportStamp(sequence=said.report.sequence, mark=said.report.mark)
    return said.unchanged


class Heartbeats:
    def __init__(self, store: Store, nodes: Nodes) -> None:
        self._store = store
        self._nodes = nodes
        self._waiting: list[_Waiting] = []
        self._turn = asyncio.Lock()
        self._began_at = -math.inf
        self._steps = 1
        self.gather_seconds = GATHER_SECONDS

    @property
    def pause_seconds(self) -> float:
        """The time between two transactions as it is now."""
        return self.gather_seconds * self._steps

    async def hear(self, node_id: NodeId, said: HeartbeatRequest, digest: str) -> Heard:
        """Store a heartbeat, with others that wait. Returns when it is committed."""
        mine = _Waiting(node_id=node_id, said=said, digest=digest)
        news: list[NodeId] = []
        self._waiting.append(mine)
        async with self._turn:
            while mine.heard is None and mine.error is None:
                news += await self._store_next(mine)
        await self._nodes.publish_changed(news)
        if mine.error is not None:
            raise mine.error
        assert mine.heard is not None
        return mine.heard

    async def _store_next(self, mine: _Waiting) -> list[NodeId]:
        """Store what waits, and return the nodes whose health changed."""
        running = asyncio.get_running_loop()
        pause = self._began_at + self.pause_seconds - running.time()
        if pause > 0:
            await asyncio.sleep(pause)
        self._began_at = running.time()
        taken, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
        self._steps = min(1 + len(taken) // PER_STEP, MOST_STEPS)
        # In a fixed order, so that two frontends do not wait for each other.
        batch = sorted(taken, key=lambda one: one.node_id)
        try:
            done = await self._store.transaction(lambda connection: self._hear(connection, batch))
            for one, heard in zip(batch, done.heard, strict=True):
                one.heard = heard
                if heard is None:
                    one.error = NotFound(f"cannot find the node {one.node_id}: register again", code="not_found")
        except Unavailable as error:
            for one in batch:
                one.error = error
            return []
        finally:
            # After a cancel, or a fault, the others are stored by the next of them.
            self._waiting[:0] = [one for one in batch if one.heard is None and one.error is None and one is not mine]
        return done.news

    def _hear(self, connection: Connection, batch: list[_Waiting]) -> _Stored:
        now = db.now(connection)
        known = liveness.some(connection, (one.node_id for one in batch))
        done = _Stored([], [])
        changes: dict[NodeId, LivenessChange] = {}
        for one in batch:
            row = known.get(one.node_id)
            if row is None:
                done.heard.append(None)
                continue
            heard, change = judge(row, one.said, one.digest, now)
            done.heard.append(heard)
            if change is None:
                continue
            changes[row.id] = change
            is_away = one.said.bus == BUS_AWAY
            if note_heard(connection, row, is_away, now):
                done.news.append(row.id)
            known[row.id] = _after(row, change, is_away)
        for change in changes.values():
            if known[change.node_id].is_new:
                liveness.add(connection, change.node_id, change.capacity, now)
        # Last, as in every transaction: whoever locks both rows locks that of the node first.
        liveness.write(connection, list(changes.values()), now)
        return done


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


def _after(row: Liveness, change: LivenessChange, is_away: bool) -> Liveness:
    """The row for the next heartbeat of the same node."""
    sequence = max(row.sequence, change.sequence)
    heard = {"health": health_of_heard(is_away), "bus_away": is_away}
    return msgspec.structs.replace(row, capacity=change.capacity, sequence=sequence, **heard)
