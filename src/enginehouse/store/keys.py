"""Rows of tokens. Only hashes are stored; the token itself is shown once, to its holder.

Every change increments a counter in `cluster_values`, so that a frontend notices it without reading all tokens. An
expired token keeps its row, and counts as little as a revoked one. The table also has sessions and login codes, which
are no tokens (`store.sessions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Row, bindparam, delete, select, update

from enginehouse.core.allowance import Allowance, make_allowance
from enginehouse.store import cluster_values
from enginehouse.store.db import Connection
from enginehouse.store.rows import select_among, text_of
from enginehouse.store.schema import tokens


class TokenRow(Struct, frozen=True):
    id: str
    role: str
    name: str
    hash: str
    created_at: float
    node: str = ""  # set for a join token that is valid for this node only
    revoked_at: float = 0.0  # 0 while the token is valid
    expires_at: float = 0.0  # 0 if it never expires
    allowance: Allowance | None = None  # None if nothing is limited

    def is_valid(self, now: float) -> bool:
        return not self.revoked_at and not self.is_expired(now)

    def is_expired(self, now: float) -> bool:
        return 0 < self.expires_at <= now


_COUNTED = "token-changes"
_MODELS = msgspec.json.Decoder(tuple[str, ...])


def changes(connection: Connection) -> str:
    """A value that changes whenever a token is created or revoked, or a node is removed."""
    return cluster_values.get(connection, _COUNTED)


def note_change(connection: Connection) -> None:
    cluster_values.count(connection, _COUNTED)


def insert(connection: Connection, row: TokenRow) -> None:
    columns = msgspec.structs.asdict(row)
    del columns["allowance"]
    limits = row.allowance or Allowance()
    connection.execute(
        tokens.insert().values(
            **columns,
            models=text_of(limits.models),
            requests_per_minute=limits.requests_per_minute,
            tokens_per_minute=limits.tokens_per_minute,
        )
    )
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


_IS_TOKEN = tokens.c.role.not_in(["session", "login"])
_EVERY = select(tokens).where(_IS_TOKEN).order_by(tokens.c.created_at)
_ONE = select(tokens).where(_IS_TOKEN, tokens.c.id == bindparam("row_id"))
_AMONG = select(tokens).where(_IS_TOKEN, tokens.c.hash.in_(bindparam("ids", expanding=True)))


def every(connection: Connection) -> list[TokenRow]:
    return [_token(row) for row in connection.execute(_EVERY)]


def one(connection: Connection, row_id: str) -> TokenRow | None:
    found = connection.execute(_ONE, {"row_id": row_id}).one_or_none()
    return None if found is None else _token(found)


def among(connection: Connection, hashes: Iterable[str]) -> list[TokenRow]:
    """The tokens with these hashes."""
    return [_token(row) for row in select_among(connection, _AMONG, hashes)]


def _token(row: Row[Any]) -> TokenRow:
    return TokenRow(
        id=row.id,
        role=row.role,
        name=row.name,
        hash=row.hash,
        created_at=row.created_at,
        node=row.node,
        revoked_at=row.revoked_at,
        expires_at=row.expires_at,
        allowance=make_allowance(_MODELS.decode(row.models), row.requests_per_minute, row.tokens_per_minute),
    )
