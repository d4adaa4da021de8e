"""The pulse: figures of the cluster for all watchers every few seconds, and for each new one at once.

Requests are counted in memory; of the store one narrow read is made, of the signs of life of all nodes, only while
somebody watches or a step of the last hour ends. An event has the nodes whose figures changed since the event before,
so whoever has the first one and all after it has the figures of every node. While the store is away the requests are
still shown, and nodes are as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec
from msgspec import Struct

from enginehouse.core import pulse
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.pulse import ModelFigures, NodePulse, PulseEvent, TrafficFigures
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.past import Past
from enginehouse.frontend.watching.traffic import Occupancy, Sums, Tallied, TrafficCounts, by_model, by_node, sum_of
from enginehouse.ports import Clock
from enginehouse.store import db, liveness
from enginehouse.store.db import Connection, Store
from enginehouse.store.liveness import HeardNode

PULSE_SECONDS = 5.0
SHORTEST_SECONDS = 1.0  # of an interval whose rates mean anything: the loop may be woken at any time


class Interval(Struct, frozen=True):
    """What was counted, and in how many seconds; 0 before anything was."""

    sums: Sums
    seconds: float

    def rate(self, count: int) -> float | None:
        return round(count / self.seconds, 3) if self.seconds else None


class Pulse:
    def __init__(
        self,
        store: Store,
        events: Events,
        clock: Clock,
        traffic: TrafficCounts,
        occupancy: Callable[[], Occupancy],
        *,
        stale_seconds: float,
    ) -> None:
        self._store = store
        self._events = events
        self._clock = clock
        self._traffic = traffic
        self._occupancy = occupancy
        self._stale_seconds = stale_seconds
        self._counted_at = clock.monotonic()
        self._interval = Interval({}, 0.0)
        self._rows: list[HeardNode] = []
        self._looked_at: float | None = None  # by the monotonic clock
        self._clock_offset: float | None = None  # between the monotonic clock and the store's
        self._shown: dict[NodeId, NodePulse] = {}
        self._changed: set[NodeId] = set()  # since the last event
        self._looking = asyncio.Lock()
        self.past = Past(self._counted_at)

    async def step(self) -> None:
        """Count, note what is to be remembered, and tell the watchers."""
        now = self._clock.monotonic()
        if now - self._counted_at < SHORTEST_SECONDS:
            return
        self._count(now)
        is_due = self.past.is_due(now)
        if not is_due and not self._events.is_watched:
            return
        async with self._looking:
            is_known = await self._look()
            if is_due:
                self._end_step(now, is_known=is_known)
        self._publish()

    async def beginning(self) -> bytes:
        """The first event of a stream, with every node; b"" if nothing is known yet. It is as old as an event of the
        others may be.
        """
        async with self._looking:
            now = self._clock.monotonic()
            if not self._interval.seconds and now - self._counted_at >= SHORTEST_SECONDS:
                self._count(now)
            if self._looked_at is None or now - self._looked_at >= PULSE_SECONDS:
                await self._look()
        return self._event(self._refresh(), self._shown.keys())

    def _count(self, now: float) -> None:
        sums = self._traffic.take()
        self._interval = Interval(sums, now - self._counted_at)
        self._counted_at = now
        self.past.add(sums)

    async def _look(self) -> bool:
        """Read the signs of life of all nodes; False if the store does not answer."""

        def work(connection: Connection) -> tuple[float, list[HeardNode]]:
            return db.now(connection), liveness.heard(connection)

        if self._store.is_away:
            return False  # to ask it would keep the figures of requests waiting
        try:
            store_time, self._rows = await self._store.look(work)
        except Unavailable:
            return False
        self._looked_at = self._clock.monotonic()
        self._clock_offset = store_time - self._looked_at
        self.past.keep_only({row.id for row in self._rows})
        return True

    def _end_step(self, now: float, *, is_known: bool) -> None:
        store_time = None if self._clock_offset is None else self._clock_offset + now
        heard = None
        if is_known and store_time is not None:
            limit = store_time - self._stale_seconds
            heard = [row for row in self._rows if row.health != "offline" and row.heard_at > limit]
        self.past.end_step(now, store_time, self._occupancy(), heard)

    def _refresh(self) -> Occupancy:
        """Bring the figures of nodes up to date, and note which of them changed."""
        occupancy, sums = self._occupancy(), by_node(self._interval.sums)
        shown: dict[NodeId, NodePulse] = {}
        for row in self._rows:
            counts = sums.get(row.id)
            shown[row.id] = NodePulse(
                heard_at=round(row.heard_at, 3) or None,
                available_ram=pulse.available_ram(row.capacity),
                available_vram=pulse.available_vram(row.capacity),
                available_disk=pulse.available_disk(row.capacity),
                used_cores=row.capacity.used_cores,
                in_flight=occupancy.in_flight_by_node.get(row.id, 0),
                requests_per_second=self._interval.rate(counts.requests if counts is not None else 0),
            )
        self._changed = {
            node_id
            for node_id, figures in shown.items()
            if node_id in self._changed or self._shown.get(node_id) != figures
        }
        self._shown = shown
        return occupancy

    def _publish(self) -> None:
        if not self._events.is_watched:
            return
        occupancy = self._refresh()
        changed, self._changed = self._changed, set()
        if body := self._event(occupancy, changed):
            self._events.publish("pulse", "", body)

    def _event(self, occupancy: Occupancy, node_ids: Iterable[NodeId]) -> bytes:
        if self._clock_offset is None:
            return b""
        event = PulseEvent(
            at=round(self._clock_offset + self._clock.monotonic(), 3),
            traffic=self._of_all(occupancy),
            nodes={node_id: self._shown[node_id] for node_id in node_ids},
            models=self._of_models(occupancy),
        )
        return msgspec.json.encode(event)

    def _of_all(self, occupancy: Occupancy) -> TrafficFigures:
        total, rate = sum_of(self._interval.sums), self._interval.rate
        return TrafficFigures(
            requests_per_second=rate(total.requests),
            tokens_per_second=rate(total.tokens),
            time_to_first_token_seconds=total.mean_first_token_seconds,
            errors_per_second=rate(total.errors),
            in_flight=occupancy.in_flight,
            queued=occupancy.queued,
        )

    def _of_models(self, occupancy: Occupancy) -> dict[str, ModelFigures]:
        sums, rate = by_model(self._interval.sums), self._interval.rate
        in_flight, queued = occupancy.in_flight_by_model, occupancy.queued_by_model
        found: dict[str, ModelFigures] = {}
        for model in sorted({*sums, *in_flight, *queued}):
            total = sums.get(model) or Tallied()
            found[model] = ModelFigures(
                requests_per_second=rate(total.requests),
                tokens_per_second=rate(total.tokens),
                time_to_first_token_seconds=total.mean_first_token_seconds,
                in_flight=in_flight.get(model, 0),
                queued=queued.get(model, 0),
            )
        return found
