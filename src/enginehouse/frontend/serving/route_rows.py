"""Reads the routes of a frontend from the store: ready replicas on nodes that serve, and servers elsewhere.

Called inside a transaction; it decides nothing. What was read before is given to `read`, which compares checksums and
reads only rows that are new. If that was not all of it, the checksum of what is known then is not that of the store,
and the others are looked for. What is derived from the definition of a model (its configuration, how many requests a
replica answers at once) is derived once per model and revision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, cast

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, ServedModel, parallel_requests, read_model, served_model
from enginehouse.core.replica import LOCALAI_GRPC, Replica, is_process
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule
from enginehouse.store import checksums, db, models, nodes, replicas, schedules
from enginehouse.store.checksums import ReplicaChecksum, ServingChecksums
from enginehouse.store.db import Connection
from enginehouse.store.replicas import ReplicaPart, StoredReplica

log = logging.getLogger(__name__)

NO_NODE = NodeId("")  # of a route to a server elsewhere
# How much earlier than the newest row another one may be that was committed later. It only saves work: a row that is
# earlier still is found by the checksum.
OVERLAP_SECONDS = 10.0
# Everything is read again then: two changes of one row within a microsecond have one checksum.
WHOLE_SECONDS = 60.0
Revision = tuple[str, str]  # the name of a model and its revision
Slot = tuple[NodeId, int]
AllRows = Mapping[str, Mapping[Slot, StoredReplica]]  # by model
Keys = Mapping[NodeId, str]


class WorkerKeys(Protocol):
    def every(self, connection: Connection, node_ids: list[NodeId]) -> dict[NodeId, str]:
        """The keys that engines of these nodes expect instead of their replicas' own: those of LocalAI's workers."""


class KnownRows(Struct, frozen=True, kw_only=True):
    """What the store had at one moment, and the routes that follow from it. Never changed: the next one shares what is
    the same.
    """

    read_at: float  # when all of it was last read
    seen: ServingChecksums  # when it was read
    newest: float  # when the newest replica became ready
    asked_for: list[NodeId]  # nodes whose engines may expect another key than that of their replica
    nodes: Mapping[NodeId, str]  # names of those that serve
    keys: Keys
    rows: AllRows
    elsewhere: Mapping[str, Route]  # by model
    aliases: Mapping[str, str]  # the models that answer for other names
    routes: Mapping[str, list[Route]]  # by model
    schedules: Mapping[str, Schedule]  # by model

    def is_fresh(self, seen: ServingChecksums, now: float) -> bool:
        """Limits and servers elsewhere follow from the definitions of models, which change seldom."""
        return self.seen.models == seen.models and now - self.read_at < WHOLE_SECONDS

    def is_of(self, seen: ServingChecksums, now: float) -> bool:
        """Whether to read again would find the same. Keys of other workers, and which replica is about to stop, are in
        no checksum.
        """
        if self.asked_for or seen.replicas.leaving or not self.is_fresh(seen, now):
            return False
        mine = self.seen
        return (mine.nodes, mine.replicas, mine.schedules) == (seen.nodes, seen.replicas, seen.schedules)


class FoundRoutes(Struct, frozen=True, kw_only=True):
    known: KnownRows
    changed: frozenset[str] | None  # models whose routes or schedules differ from those before; None for all
    shown: set[str]  # ids of dropped routes whose process was reported since
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

    def read(
        self, connection: Connection, before: KnownRows | None, dropped: Mapping[Route, float | None]
    ) -> FoundRoutes:
        """`dropped` has the time at which each dropped route was dropped; None if that is not known yet."""
        # Before the rows: what is committed in between is noticed the next time.
        seen = checksums.of_serving(connection)
        now = db.now(connection)
        base = before if before is not None and before.is_fresh(seen, now) else None
        rows = self._rows(connection, base, seen.replicas)
        is_same_fleet = base is not None and base.seen.nodes == seen.nodes
        serving = base.nodes if base is not None and is_same_fleet else nodes.serving(connection)
        is_same = base is not None and rows is base.rows
        newest = base.newest if base is not None and is_same else _newest(rows)
        asked_for = base.asked_for if base is not None and is_same else _with_other_keys(rows)
        keys = self._worker_keys.every(connection, asked_for) if self._worker_keys is not None and asked_for else {}
        changed = None if base is None else _changed_models(base, rows, serving, keys)
        routes = {} if base is None else dict(base.routes)
        elsewhere, aliases = self._elsewhere(connection) if base is None else (base.elsewhere, base.aliases)
        for model in {*rows, *elsewhere} if changed is None else changed:
            found = self._routes(connection, rows.get(model, {}), serving, keys)
            found += [elsewhere[model]] if model in elsewhere else []
            if found:
                routes[model] = found
            else:
                routes.pop(model, None)
        if base is None:
            self._forget({(route.model, route.revision) for some in routes.values() for route in some})
        has_schedules = base is not None and base.seen.schedules == seen.schedules
        wanted = base.schedules if base is not None and has_schedules else _schedules(connection)
        if base is not None and changed is not None and not has_schedules:
            changed |= {name for name in {*wanted, *base.schedules} if wanted.get(name) != base.schedules.get(name)}
        known = KnownRows(
            read_at=now if base is None else base.read_at,
            seen=seen,
            newest=newest,
            asked_for=asked_for,
            nodes=serving,
            keys=keys,
            rows=rows,
            elsewhere=elsewhere,
            aliases=aliases,
            routes=routes,
            schedules=wanted,
        )
        there = {one.id for one in dropped if _has(routes, one)}
        shown = {one.id for one, at in dropped.items() if one.id in there and _is_shown(connection, one, at)}
        return FoundRoutes(
            known=known,
            changed=None if changed is None else frozenset(changed),
            shown=shown,
            now=now,
        )

    def _rows(self, connection: Connection, base: KnownRows | None, seen: ReplicaChecksum) -> AllRows:
        """All replicas, those that are about to stop too."""
        if base is None:
            return _with({}, replicas.stored_since(connection, 0.0))
        if base.seen.replicas == seen and not seen.leaving:
            return base.rows
        rows = _with(base.rows, replicas.stored_since(connection, base.newest - OVERLAP_SECONDS))
        # If one is about to stop instead of another, the sums are the same.
        if seen.leaving or base.seen.replicas.leaving or _checksum_of(rows) != seen:
            there = replicas.parts(connection)
            rows = _kept(rows, there)
            others = {one.node_id for one in there if _is_other(rows, one)}
            rows = _with(rows, replicas.stored_on(connection, others)) if others else rows
        return rows

    def _routes(
        self,
        connection: Connection,
        rows: Mapping[Slot, StoredReplica],
        serving: Mapping[NodeId, str],
        keys: Mapping[NodeId, str],
    ) -> list[Route]:
        return [
            Route(
                model=replica.model,
                slot=replica.slot,
                node_id=replica.node_id,
                node_name=serving[replica.node_id],
                address=replica.address,
                key=keys.get(replica.node_id, replica.key),
                revision=replica.revision,
                nonce=replica.nonce,
                checks_key=replica.checks_key,
                protocol=replica.protocol,
                served=self._served_by(replica),
                limit=self._limit_of(connection, replica),
            )
            for _, row in sorted(rows.items())
            if not row.leaving and (replica := row.replica).node_id in serving
        ]

    def _forget(self, used: set[Revision]) -> None:
        self._served = {key: served for key, served in self._served.items() if key in used}
        self._limits = {key: limit for key, limit in self._limits.items() if key in used}

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

    def _elsewhere(self, connection: Connection) -> tuple[dict[str, Route], dict[str, str]]:
        """Routes to servers elsewhere, and the models that answer for other names."""
        found = models.that_run_elsewhere(connection)
        routes = {one.name: self._route_elsewhere(one) for one in found if one.endpoint}
        aliases = {one.name: one.alias for one in found if one.alias}
        return {name: route for name, route in routes.items() if route is not None}, aliases

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


def _with(rows: AllRows, some: Iterable[StoredReplica]) -> AllRows:
    """The rows, and these instead of those that had their slots."""
    result, own = dict(rows), set[str]()
    for one in some:
        model, slot = one.replica.model, (one.replica.node_id, one.replica.slot)
        before = result.get(model, {})
        if before.get(slot) == one:
            continue
        if model not in own:
            result[model] = dict(before)
            own.add(model)
        cast(dict[Slot, StoredReplica], result[model])[slot] = one
    return result


def _kept(rows: AllRows, there: Iterable[ReplicaPart]) -> AllRows:
    """Those of the rows that are still there."""
    slots: dict[str, set[Slot]] = {}
    for one in there:
        slots.setdefault(one.model, set()).add((one.node_id, one.slot))
    result: dict[str, Mapping[Slot, StoredReplica]] = {}
    for model, some in rows.items():
        left = slots.get(model, set())
        if some.keys() <= left:
            result[model] = some
        elif found := {slot: row for slot, row in some.items() if slot in left}:
            result[model] = found
    return result


def _newest(rows: AllRows) -> float:
    return max((row.created_at for some in rows.values() for row in some.values()), default=0.0)


def _with_other_keys(rows: AllRows) -> list[NodeId]:
    # Only engines of LocalAI's protocol can be on LocalAI's workers.
    every = (row.replica for some in rows.values() for row in some.values())
    return sorted({one.node_id for one in every if one.protocol == LOCALAI_GRPC})


def _is_other(rows: AllRows, one: ReplicaPart) -> bool:
    known = rows.get(one.model, {}).get((one.node_id, one.slot))
    return known is None or known.part != one.part or known.leaving != one.leaving


def _checksum_of(rows: AllRows) -> ReplicaChecksum:
    every = [row for some in rows.values() for row in some.values()]
    return ReplicaChecksum(len(every), sum(row.part for row in every), sum(row.leaving for row in every))


def _changed_models(base: KnownRows, rows: AllRows, serving: Mapping[NodeId, str], keys: Keys) -> set[str]:
    """The models whose routes differ. Mappings that are the same object are the same."""
    changed = {name for name in {*rows, *base.rows} if rows.get(name) is not base.rows.get(name)}
    if serving is not base.nodes or keys != base.keys:
        touched = {one for one in {*serving, *base.nodes} if serving.get(one) != base.nodes.get(one)}
        touched |= {one for one in {*keys, *base.keys} if keys.get(one) != base.keys.get(one)}
        if touched:
            changed |= {name for name, some in rows.items() if any(slot[0] in touched for slot in some)}
    return changed


def _schedules(connection: Connection) -> dict[str, Schedule]:
    return {one.model_name: one for one in schedules.every(connection)}


def _has(routes: Mapping[str, list[Route]], wanted: Route) -> bool:
    return any(one.id == wanted.id for one in routes.get(wanted.model, ()))


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
