"""What is kept of nodes that are gone: the names of removed ones, and the keys of rejected ones.

Operations, the audit and usage of the past name nodes by these. A rejected key is kept until somebody takes that back;
it is no secret.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct
from sqlalchemy import bindparam, delete, select

from enginehouse.core.ids import NodeId
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there, select_among
from enginehouse.store.schema import rejected_keys, removed_nodes

KEPT_SECONDS = 365 * 86400.0  # longer than any history that refers to them
_NAMES = select(removed_nodes.c.node_id, removed_nodes.c.name).where(
    removed_nodes.c.node_id.in_(bindparam("ids", expanding=True))
)
_IS_REJECTED = select(rejected_keys.c.name).where(rejected_keys.c.public_key == bindparam("key"))
_REJECTED = select(rejected_keys).order_by(rejected_keys.c.name, rejected_keys.c.rejected_at)


class RejectedKey(Struct, frozen=True):
    public_key: str
    name: str
    rejected_at: float


def note_removed(connection: Connection, node_id: NodeId, name: str, now: float) -> None:
    connection.execute(delete(removed_nodes).where(removed_nodes.c.removed_at < now - KEPT_SECONDS))
    insert_unless_there(connection, removed_nodes, {"node_id": node_id, "name": name, "removed_at": now})


def names(connection: Connection, node_ids: Iterable[NodeId]) -> dict[NodeId, str]:
    """The names of those of these nodes that were removed."""
    return {row.node_id: row.name for row in select_among(connection, _NAMES, node_ids)}


def reject(connection: Connection, public_key: str, name: str, now: float) -> None:
    row = {"public_key": public_key, "name": name, "rejected_at": now}
    insert_unless_there(connection, rejected_keys, row)


def is_rejected(connection: Connection, public_key: str) -> bool:
    return connection.execute(_IS_REJECTED, {"key": public_key}).scalar_one_or_none() is not None


def rejected(connection: Connection) -> list[RejectedKey]:
    return [RejectedKey(row.public_key, row.name, row.rejected_at) for row in connection.execute(_REJECTED)]


def forgive(connection: Connection, public_key: str) -> None:
    connection.execute(delete(rejected_keys).where(rejected_keys.c.public_key == public_key))
