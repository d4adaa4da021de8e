"""Rows of ready replicas, one per (node, model, slot). The router rebuilds its memory from them.

A row is written when a start succeeds and removed when the replica is stopped or lost. In-flight counts are never
stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import Struct
from sqlalchemy import Row, bindparam, delete, select, update

from enginehouse.core.ids import NodeId
from enginehouse.core.replica import Replica
from enginehouse.store.checksums import part_of
from enginehouse.store.db import Connection
from enginehouse.store.rows import select_among
from enginehouse.store.schema import replicas

_EVERY = select(replicas).order_by(replicas.c.model, replicas.c.node_id, replicas.c.slot)
_OF_MODEL = _EVERY.where(replicas.c.model == bindparam("of"))
_OF_MODELS = _EVERY.where(replicas.c.model.in_(bindparam("ids", expanding=True)))
_MODELS_ON = select(replicas.c.model).where(replicas.c.node_id.in_(bindparam("ids", expanding=True))).distinct()
_ADD = replicas.insert()
_SERVING = _EVERY.where(replicas.c.leaving.is_(False))
_LEAVING = _EVERY.where(replicas.c.leaving.is_(True))
_USE = (
    update(replicas)
    .where(replicas.c.nonce == bindparam("of_process"), replicas.c.used_at < bindparam("at"))
    .values(used_at=bindparam("at"))
)
_REMOVE_ON = delete(replicas).where(replicas.c.node_id == bindparam("at_node"))
_REMOVE_OF_MODEL = _REMOVE_ON.where(replicas.c.model == bindparam("of"))
_REMOVE = _REMOVE_OF_MODEL.where(replicas.c.slot == bindparam("at_slot"))
_PART = part_of(replicas.c.created_at).label("part")
_STORED = select(replicas, _PART)
_STORED_SINCE = _STORED.where(replicas.c.created_at >= bindparam("since"))
_STORED_ON = _STORED.where(replicas.c.node_id.in_(bindparam("ids", expanding=True)))
_PARTS = select(replicas.c.node_id, replicas.c.model, replicas.c.slot, _PART, replicas.c.leaving)
_ON_NODE = select(replicas).where(replicas.c.node_id == bindparam("at_node"))
_ON_NODES = select(replicas).where(replicas.c.node_id.in_(bindparam("ids", expanding=True)))


_FIELDS = Replica.__struct_fields__
_fields_of = attrgetter(*_FIELDS)


def _replica(row: Row[Any]) -> Replica:
    return Replica(**dict(zip(_FIELDS, _fields_of(row), strict=True)))


class UsedReplica(Struct, frozen=True, kw_only=True):
    """A replica, when it was last used, and whether it is about to be stopped."""

    replica: Replica
    created_at: float
    last_used: float  # when it became ready, for one that was not used yet
    leaving: bool


class StoredReplica(Struct, frozen=True, kw_only=True):
    """A replica with what distinguishes this row from others that had its slot."""

    replica: Replica
    created_at: float
    part: int  # what it adds to `ReplicaChecksum.times`
    leaving: bool


class ReplicaPart(NamedTuple):
    node_id: NodeId
    model: str
    slot: int
    part: int
    leaving: bool


def _stored(row: Row[Any]) -> StoredReplica:
    return StoredReplica(
        replica=_replica(row), created_at=row.created_at, part=int(row.part), leaving=bool(row.leaving)
    )


def put(connection: Connection, replica: Replica, now: float) -> None:
    """Record a ready replica and replace the previous one of its slot."""
    remove(connection, replica.node_id, replica.model, replica.slot)
    columns = {field: getattr(replica, field) for field in Replica.__struct_fields__}
    connection.execute(_ADD, {**columns, "created_at": now})


def remove(connection: Connection, node_id: NodeId, model: str, slot: int) -> None:
    connection.execute(_REMOVE, {"at_node": node_id, "of": model, "at_slot": slot})


def remove_of_model(connection: Connection, node_id: NodeId, model: str) -> None:
    connection.execute(_REMOVE_OF_MODEL, {"at_node": node_id, "of": model})


def remove_all_on(connection: Connection, node_id: NodeId) -> int:
    return connection.execute(_REMOVE_ON, {"at_node": node_id}).rowcount


def on_node(connection: Connection, node_id: NodeId) -> list[tuple[Replica, float]]:
    rows = connection.execute(_ON_NODE, {"at_node": node_id})
    return [(_replica(row), row.created_at) for row in rows]


def on_nodes(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, list[tuple[Replica, float]]]:
    """`on_node`, for several nodes at once; nodes without replicas are left out."""
    found: dict[NodeId, list[tuple[Replica, float]]] = {}
    for row in select_among(connection, _ON_NODES, node_ids):
        found.setdefault(row.node_id, []).append((_replica(row), row.created_at))
    return found


def of_model(connection: Connection, model: str) -> list[Replica]:
    return [_replica(row) for row in connection.execute(_OF_MODEL, {"of": model})]


def ready_since(connection: Connection, model: str, since: float) -> set[str]:
    """The nodes on which a replica of the model became ready after `since`."""
    query = select(replicas.c.node_id).where(replicas.c.model == model, replicas.c.created_at > since)
    return set(connection.execute(query).scalars())


def every(connection: Connection) -> list[Replica]:
    return [_replica(row) for row in connection.execute(_EVERY)]


def serving(connection: Connection) -> list[Replica]:
    """Those that may get requests."""
    return [_replica(row) for row in connection.execute(_SERVING)]


def leaving(connection: Connection) -> list[Replica]:
    """Those that are about to stop."""
    return [_replica(row) for row in connection.execute(_LEAVING)]


def stored_since(connection: Connection, since: float) -> list[StoredReplica]:
    """Those that became ready then or later."""
    return [_stored(row) for row in connection.execute(_STORED_SINCE, {"since": since})]


def stored_on(connection: Connection, node_ids: Iterable[NodeId]) -> list[StoredReplica]:
    return [_stored(row) for row in select_among(connection, _STORED_ON, node_ids)]


def parts(connection: Connection) -> list[ReplicaPart]:
    """Of all of them, without the rest of their rows."""
    return [ReplicaPart(*row) for row in connection.execute(_PARTS)]


def _used(row: Row[Any]) -> UsedReplica:
    return UsedReplica(
        replica=_replica(row),
        created_at=row.created_at,
        last_used=max(row.used_at, row.created_at),
        leaving=row.leaving,
    )


def every_with_use(connection: Connection) -> list[UsedReplica]:
    return [_used(row) for row in connection.execute(_EVERY)]


def of_models_with_use(connection: Connection, names: Iterable[str]) -> dict[str, list[UsedReplica]]:
    """Those of these models; models without replicas are left out."""
    found: dict[str, list[UsedReplica]] = {}
    for row in select_among(connection, _OF_MODELS, names):
        found.setdefault(row.model, []).append(_used(row))
    return found


def models_on(connection: Connection, node_ids: Iterable[NodeId]) -> set[str]:
    """The models that have replicas on these nodes."""
    return {row.model for row in select_among(connection, _MODELS_ON, node_ids)}


def note_uses(connection: Connection, used: Mapping[str, float]) -> None:
    """Store when processes, by their nonces, were last used; a later time stays."""
    if used:
        connection.execute(_USE, [{"of_process": nonce, "at": at} for nonce, at in used.items()])


def set_leaving(connection: Connection, node_id: NodeId, model: str, slot: int, leaving: bool) -> None:
    connection.execute(
        update(replicas)
        .where(replicas.c.node_id == node_id, replicas.c.model == model, replicas.c.slot == slot)
        .values(leaving=leaving)
    )
