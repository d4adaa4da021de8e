"""Idempotency keys: the same key with the same request is the same operation, on every frontend.

The key is written in the transaction that accepts the operation, so a caller that missed the answer can retry and gets
the same one.
"""

from __future__ import annotations

from sqlalchemy import bindparam, delete, select

from enginehouse.core.errors import Invalid
from enginehouse.core.ids import OperationId
from enginehouse.store.db import Connection
from enginehouse.store.schema import idempotency_keys

KEPT_SECONDS = 24 * 3600.0
_UNDER = (idempotency_keys.c.author == bindparam("by"), idempotency_keys.c.key == bindparam("under"))
_KNOWN = select(idempotency_keys).where(*_UNDER)
_FORGET = delete(idempotency_keys).where(*_UNDER)
_REMEMBER = idempotency_keys.insert()


def known(connection: Connection, author: str, key: str, body_hash: str, now: float) -> OperationId | None:
    """Return the operation requested under this key; raise `Invalid` if the key was used for a different request."""
    under = {"by": author, "under": key}
    row = connection.execute(_KNOWN, under).one_or_none()
    if row is None:
        return None
    if row.created_at < now - KEPT_SECONDS:
        connection.execute(_FORGET, under)
        return None
    if row.body_hash != body_hash:
        raise Invalid(
            "cannot use this Idempotency-Key again: it belongs to a different request. Use a new key for each request",
            code="idempotency_mismatch",
            param="Idempotency-Key",
        )
    return OperationId(row.operation_id)


def remember(
    connection: Connection, author: str, key: str, body_hash: str, operation_id: OperationId, now: float
) -> None:
    columns = {"author": author, "key": key, "body_hash": body_hash, "operation_id": operation_id, "created_at": now}
    connection.execute(_REMEMBER, columns)


def prune(connection: Connection, now: float) -> None:
    connection.execute(delete(idempotency_keys).where(idempotency_keys.c.created_at < now - KEPT_SECONDS))
