"""Views of replicas: every process with a model, where it runs, how busy it is and whether it is to be replaced.

Reads only. Rows say which replicas there are, reports say what they hold, and the router of this frontend says how many
requests are in flight, with what the other frontends told it. Uses are stored seconds late, so of a replica that is
older than this frontend nobody knows that it was never used. Nothing here decides about a replica: why one is outdated
is the same sentence that the reconciler acts on.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from enginehouse.core.node import Node
from enginehouse.core.replica import Replica, is_process
from enginehouse.core.views import ListedReplica
from enginehouse.frontend.serving.rooms import Fleet, read_fleet
from enginehouse.store import db, models, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.replicas import UsedReplica


class ReplicaTraffic(Protocol):
    def in_flight_of(self, nonce: str) -> int:
        """Requests of all frontends to a process."""

    def was_used(self, nonce: str) -> bool:
        """Whether a process got a request here since uses were stored."""


class ReplicaViews:
    def __init__(self, store: Store, traffic: ReplicaTraffic) -> None:
        self._store = store
        self._traffic = traffic
        self._began = asyncio.get_running_loop().time()

    async def every(self) -> list[ListedReplica]:
        """Return every replica, by model, node and slot."""
        return await self._store.read(partial(self._read, asyncio.get_running_loop().time() - self._began))

    def _read(self, uptime_seconds: float, connection: Connection) -> list[ListedReplica]:
        every = nodes.every(connection)
        fleet = read_fleet(connection, every, db.now(connection))
        revisions = {model.name: model.revision for model, _ in models.every(connection)}
        by_id = {node.id: node for node in every}
        found = [
            self._view(fleet, used, by_id.get(used.replica.node_id), revisions.get(used.replica.model), uptime_seconds)
            for used in fleet.replicas
        ]
        return sorted(found, key=lambda one: (one.model, one.node_name, one.slot))

    def _view(
        self, fleet: Fleet, used: UsedReplica, node: Node | None, revision: str | None, uptime_seconds: float
    ) -> ListedReplica:
        replica, age = used.replica, max(0.0, fleet.now - used.created_at)
        unused = max(0.0, fleet.now - used.last_used) if used.last_used > used.created_at else None
        if replica.nonce and self._traffic.was_used(replica.nonce):
            unused = 0.0
        return ListedReplica(
            model=replica.model,
            node_id=replica.node_id,
            node_name=node.name if node is not None else replica.node_id,
            slot=replica.slot,
            state=_state(used, node),
            backend=replica.backend,
            revision=replica.revision,
            # A replica of a model that was deleted is about to be stopped.
            outdated="the model was deleted" if revision is None else fleet.why_outdated(replica, revision),
            in_flight=self._traffic.in_flight_of(replica.nonce) if replica.nonce else 0,
            age_seconds=age,
            unused_seconds=unused,
            use_unknown=unused is None and age > uptime_seconds,
            memory_bytes=_memory(replica, node),
        )


def _state(used: UsedReplica, node: Node | None) -> str:
    """The words of the metric `enginehouse_model_replicas`."""
    if node is None or node.health == "offline":
        return "unreachable"
    return "leaving" if used.leaving else "ready"


def _memory(replica: Replica, node: Node | None) -> int | None:
    """What its processes were seen to hold, by the last report; None if that is unknown."""
    running = node.report.replicas if node is not None else ()
    return next((one.memory_bytes for one in running if is_process(one, replica)), 0) or None
