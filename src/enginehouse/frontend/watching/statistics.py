"""Counts over the whole cluster, for monitoring. Read from the database on request; nothing is cached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from msgspec import Struct

from enginehouse.core.capacity import Capacity
from enginehouse.store import db, history, nodes, operations, replicas
from enginehouse.store.db import Connection, Store

REPLICA_STATES = ("ready", "loading", "leaving", "unreachable")


class NodeFigures(Struct, frozen=True):
    """One approved node, for monitoring."""

    name: str
    health: str
    drained: bool
    bus_away: bool
    silence_seconds: float  # since its last heartbeat
    capacity: Capacity


class ClusterCounts(Struct, frozen=True):
    nodes_by_health: Mapping[str, int]  # approved nodes
    intents_by_state: Mapping[str, int]
    nodes: tuple[NodeFigures, ...] = ()
    replicas: Mapping[tuple[str, str], int] = {}  # by model and state
    operations: Mapping[tuple[str, str], int] = {}  # by kind and outcome, "" for open ones


class Statistics:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def counts(self) -> ClusterCounts:
        def work(connection: Connection) -> ClusterCounts:
            now = db.now(connection)
            figures = tuple(
                NodeFigures(row.name, row.health, row.drained, row.bus_away, max(0.0, now - row.heard_at), row.capacity)
                for row in nodes.approved(connection)
            )
            return ClusterCounts(
                nodes.count_by_health(connection),
                history.count_by_state(connection),
                figures,
                _replicas(connection),
                history.count_operations(connection),
            )

        return await self._store.read(work)


def _replicas(connection: Connection) -> dict[tuple[str, str], int]:
    """Replicas by model and state. One that is loading is a load under way; one on an offline node is unreachable."""
    found = replicas.every_with_use(connection)
    serving = nodes.serving_among(connection, (one.replica.node_id for one in found))
    counts: Counter[tuple[str, str]] = Counter()
    for one in found:
        state = "unreachable" if one.replica.node_id not in serving else "leaving" if one.leaving else "ready"
        counts[one.replica.model, state] += 1
    for operation in operations.steered(connection):
        counts[operation.name, "loading"] += 1
    return dict(counts)
