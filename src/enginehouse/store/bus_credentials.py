"""Rows of the bus credentials issued to nodes.

They are stored by public key, so that the credentials of a removed node can be revoked while they are still valid. The
credential itself is not stored.
"""

from __future__ import annotations

from sqlalchemy import bindparam, delete, func, or_, select, update

from enginehouse.core.ids import NodeId
from enginehouse.store.db import Connection
from enginehouse.store.schema import bus_credentials, nodes

_ADD = bus_credentials.insert()
_OF_NODE = update(bus_credentials).where(bus_credentials.c.node_id == bindparam("node")).values(revoked=True)
_APPROVED = select(nodes.c.id).where(nodes.c.approved.is_(True))
_REVOKED = select(bus_credentials.c.user, bus_credentials.c.expires_at).where(
    or_(bus_credentials.c.revoked.is_(True), bus_credentials.c.node_id.not_in(_APPROVED)),
    bus_credentials.c.expires_at > bindparam("at"),
)
_PRUNE = delete(bus_credentials).where(bus_credentials.c.expires_at < bindparam("at"))
_NEWEST = select(func.max(bus_credentials.c.issued_at)).where(bus_credentials.c.node_id == bindparam("node"))


def insert(connection: Connection, user: str, node_id: NodeId, issued_at: float, expires_at: float) -> None:
    """`expires_at` is in seconds since 1970, because the bus server compares it with its own wall clock."""
    row = {"user": user, "node_id": node_id, "issued_at": issued_at, "expires_at": expires_at, "revoked": False}
    connection.execute(_ADD, row)


def revoke_of(connection: Connection, node_id: NodeId) -> None:
    connection.execute(_OF_NODE, {"node": node_id})


def revoked(connection: Connection, wall_now: float) -> dict[str, float]:
    """Map public keys of revoked, unexpired credentials to their expiry; also of nodes that are not approved."""
    return {row.user: row.expires_at for row in connection.execute(_REVOKED, {"at": wall_now})}


def newest(connection: Connection, node_id: NodeId) -> float | None:
    """Return when the node got its newest credential, by the store's clock."""
    return connection.execute(_NEWEST, {"node": node_id}).scalar_one_or_none()


def prune(connection: Connection, wall_now: float) -> None:
    connection.execute(_PRUNE, {"at": wall_now})
