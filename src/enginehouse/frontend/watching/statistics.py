"""Counts over the whole cluster, for monitoring. Read from the database on request; nothing is cached."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from enginehouse.store import history, nodes
from enginehouse.store.db import Connection, Store


class ClusterCounts(Struct, frozen=True):
    nodes_by_health: Mapping[str, int]  # approved nodes
    intents_by_state: Mapping[str, int]


class Statistics:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def counts(self) -> ClusterCounts:
        def work(connection: Connection) -> ClusterCounts:
            return ClusterCounts(nodes.count_by_health(connection), history.count_by_state(connection))

        return await self._store.transaction(work)
