"""Rows of tokens. Only hashes are stored; the token itself is shown once, to its holder.

Every change increments a counter in `cluster_values`, so that a frontend notices it without reading all tokens.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from sqlalchemy import delete, select, update

from enginehouse.store import cluster_values
from enginehouse.store.db import Connection
from enginehouse.store.schema import tokens


class TokenRow(Struct, frozen=True):
    id: str
    role: str
    name: str
    hash: str
    created_at: float
    node: str = ""  # set for a join token that is valid for this node only
    revoked_at: float = 0.0  # 0 while the token is valid


_COUNTED = "token-changes"


def changes(connection: Connection) -> str:
    """A value that changes whenever a token is created or revoked, or a node is removed."""
    return cluster_values.get(connection, _COUNTED)


def note_change(connection: Connection) -> None:
    cluster_values.count(connection, _COUNTED)


def insert(connection: Connection, row: TokenRow) -> None:
    connection.execute(tokens.insert().values(msgspec.structs.asdict(row)))
    note_change(connection)


def revoke(connection: Connection, row_id: str, now: float) -> None:
    """Keep the row: a token from a file or setting must not become valid again at the next start."""
    connection.execute(update(tokens).where(tokens.c.id == row_id).values(revoked_at=now))
    note_change(connection)


def remove_named(connection: Connection, role: str, name: str) -> None:
    """Remove the valid tokens of this name. Revoked ones are kept."""
    named = (tokens.c.role == role, tokens.c.name == name, tokens.c.revoked_at == 0)
    connection.execute(delete(tokens).where(*named))
    note_change(connection)


def every(connection: Connection) -> list[TokenRow]:
    rows = connection.execute(select(tokens).order_by(tokens.c.created_at))
    return [TokenRow(row.id, row.role, row.name, row.hash, row.created_at, row.node, row.revoked_at) for row in rows]
