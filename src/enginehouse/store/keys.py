"""Rows of tokens. Only hashes are stored; the token itself is shown once, to its holder.

Every change increments a counter in `cluster_values`, so that a frontend notices it without reading all tokens. An
expired token keeps its row, and counts as little as a revoked one. The table also has sessions and login codes, which
are no tokens (`store.sessions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import BindParameter, Row, bindparam, delete, or_, select, update

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
    used_at: float = 0.0  # 0 if never, or not since this was noted
    previous_hash: str = ""  # of the secret before the last rotation
    previous_until: float = 0.0  # when that ends

    def is_valid(self, now: float) -> bool:
        return not self.revoked_at and not self.is_expired(now)

    def is_expired(self, now: float) -> bool:
        return 0 < self.expires_at <= now


_COUNTED = "token-changes"
CHANGES = cluster_values.value_of(_COUNTED)
_MODELS = msgspec.json.Decoder(tuple[str, ...])


def changes(connection: Connection) -> str:
    """A value that changes whenever a token is created or revoked, or a node is removed."""
    return str(connection.execute(CHANGES).scalar_one_or_none() or "")


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


def rotate(connection: Connection, row: TokenRow, new_hash: str, keep_until: float, now: float, row_id: str) -> None:
    """Give a token another secret. The old one counts until `keep_until`; then, as a row of its own, it is known as
    revoked: a file or setting that still has it must not make it valid again.
    """
    values = {"hash": new_hash, "previous_hash": row.hash, "previous_until": keep_until}
    connection.execute(update(tokens).where(tokens.c.id == row.id).values(**values))
    old = TokenRow(row_id, row.role, row.name, row.hash, row.created_at, row.node, revoked_at=max(now, keep_until))
    insert(connection, old)


def note_used(connection: Connection, used: Mapping[str, float]) -> None:
    """When each of these tokens was used, by id. It changes nothing that others have to read again."""
    connection.execute(_NOTE_USED, [{"row_id": row_id, "at": at} for row_id, at in sorted(used.items())])


def remove_named(connection: Connection, role: str, name: str) -> None:
    """Remove the valid tokens of this name. Revoked ones are kept."""
    named = (tokens.c.role == role, tokens.c.name == name, tokens.c.revoked_at == 0)
    connection.execute(delete(tokens).where(*named))
    note_change(connection)


_IS_TOKEN = tokens.c.role.not_in(["session", "login"])
_NOTE_USED = (
    update(tokens)
    .where(tokens.c.id == bindparam("row_id"), tokens.c.used_at < bindparam("at"))
    .values(used_at=bindparam("at"))
)
_EVERY = select(tokens).where(_IS_TOKEN).order_by(tokens.c.created_at)
_ONE = select(tokens).where(_IS_TOKEN, tokens.c.id == bindparam("row_id"))
_HASHES: BindParameter[Any] = bindparam("ids", expanding=True)
_AMONG = select(tokens).where(_IS_TOKEN, or_(tokens.c.hash.in_(_HASHES), tokens.c.previous_hash.in_(_HASHES)))


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
        used_at=row.used_at,
        previous_hash=row.previous_hash,
        previous_until=row.previous_until,
    )
