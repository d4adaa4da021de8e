"""Reads the routes of a frontend from the store: ready replicas on nodes that serve, and servers elsewhere.

Called inside a transaction; it decides nothing. What is derived from the definition of a model (its configuration, how
many requests a replica answers at once) is derived once per model and revision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, ServedModel, parallel_requests, read_model, served_model
from enginehouse.core.replica import LOCALAI_GRPC, Replica, is_process
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule
from enginehouse.store import db, models, nodes, replicas, schedules
from enginehouse.store.db import Connection

log = logging.getLogger(__name__)

NO_NODE = NodeId("")  # of a route to a server elsewhere
Revision = tuple[str, str]  # the name of a model and its revision


class WorkerKeys(Protocol):
    def every(self, connection: Connection, node_ids: list[NodeId]) -> dict[NodeId, str]:
        """The keys that engines of these nodes expect instead of their replicas' own: those of LocalAI's workers."""


class FoundRoutes(Struct, frozen=True, kw_only=True):
    """What the store has at one moment."""

    routes: list[Route]
    shown: set[str]  # ids of dropped routes whose process was reported since
    schedules: Mapping[str, Schedule]  # by model
    now: float


class RouteRows:
    def __init__(
        self, key_of: Callable[[str], str] = lambda credential: "", worker_keys: WorkerKeys | None = None
    ) -> None:
        """`key_of` gives the value of a credential, for servers elsewhere."""
        self._key_of = key_of
        self._worker_keys = worker_keys
        self._served: dict[Revision, ServedModel] = {}
        self._limits: dict[Revision, int] = {}

    def read(self, connection: Connection, dropped: Mapping[str, float | None]) -> FoundRoutes:
        """`dropped` has the time at which each dropped route was dropped, by its id; None if that is not known yet."""
        found_rows = replicas.serving(connection)
        by_id = nodes.serving_among(connection, (one.node_id for one in found_rows))
        rows = [one for one in found_rows if one.node_id in by_id]
        keys = self._keys_of(connection, rows)
        found = [
            Route(
                model=replica.model,
                slot=replica.slot,
                node_id=replica.node_id,
                node_name=by_id[replica.node_id],
                address=replica.address,
                key=keys.get(replica.node_id, replica.key),
                revision=replica.revision,
                nonce=replica.nonce,
                checks_key=replica.checks_key,
                protocol=replica.protocol,
                served=self._served_by(replica),
                limit=self._limit_of(connection, replica),
            )
            for replica in rows
        ]
        found += [route for one in models.with_endpoints(connection) if (route := self._route_elsewhere(one))]
        self._forget({(route.model, route.revision) for route in found})
        return FoundRoutes(
            routes=found,
            shown={
                route.id for route in found if route.id in dropped and _is_shown(connection, route, dropped[route.id])
            },
            schedules={one.model_name: one for one in schedules.every(connection)},
            now=db.now(connection),
        )

    def _forget(self, used: set[Revision]) -> None:
        self._served = {key: served for key, served in self._served.items() if key in used}
        self._limits = {key: limit for key, limit in self._limits.items() if key in used}

    def _keys_of(self, connection: Connection, rows: list[Replica]) -> dict[NodeId, str]:
        # Only engines of LocalAI's protocol can be on LocalAI's workers.
        node_ids = sorted({one.node_id for one in rows if one.protocol == LOCALAI_GRPC})
        return self._worker_keys.every(connection, node_ids) if self._worker_keys is not None and node_ids else {}

    def _served_by(self, replica: Replica) -> ServedModel | None:
        """The configuration of a replica; read once per model and revision."""
        if not replica.definition:
            return None
        key = (replica.model, replica.revision)
        if key not in self._served:
            self._served[key] = served_model(replica.definition)
        return self._served[key]

    def _limit_of(self, connection: Connection, replica: Replica) -> int:
        """How many requests a replica answers at once; 0 if that is not known, as of a replica whose model was changed
        before this frontend first saw it.
        """
        key = (replica.model, replica.revision)
        if key not in self._limits:
            model = read_model(replica.definition) if replica.definition else models.get(connection, replica.model)
            if model is None or model.revision != replica.revision:
                return 0
            self._limits[key] = parallel_requests(model)
        return self._limits[key]

    def _route_elsewhere(self, model: Model) -> Route | None:
        """The route to a server that is no node of the cluster; None if its credential is not known here."""
        try:
            key = self._key_of(model.credential)
        except EnginehouseError as error:
            log.warning("endpoint.skipped model=%s error=%s", model.name, error)
            return None
        return Route(
            model=model.name,
            slot=0,
            node_id=NO_NODE,
            node_name=model.endpoint,
            address=model.endpoint,
            key=key,
            revision=model.revision,
            nonce=model.revision,
            limit=parallel_requests(model),
        )


def _is_shown(connection: Connection, route: Route, since: float | None) -> bool:
    """Whether the route's node reported its process after that moment. A server elsewhere reports nothing: it is tried
    again after each step.
    """
    if route.node_id == NO_NODE:
        return since is not None
    node = nodes.get(connection, route.node_id) if since is not None else None
    if node is None or since is None or node.report.mark <= since:
        return False
    return any(is_process(one, route) for one in node.report.replicas)
