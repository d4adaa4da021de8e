"""Rows of sessions and of login codes: in the table of tokens, under roles that open nothing by themselves.

Only hashes are stored. Each row names the token that it came from, and counts only while that token is valid, so that
revoking a token also ends what was made with it. A row that has ended is deleted. Changes are counted like those of
tokens (`keys.changes`); a login code is not, because it is in no frontend's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct
from sqlalchemy import Row, and_, bindparam, delete, exists, or_, select

from enginehouse.store import keys
from enginehouse.store.db import Connection
from enginehouse.store.rows import select_among
from enginehouse.store.schema import tokens

Kind = Literal["session", "login"]
_KINDS: tuple[Kind, ...] = ("session", "login")


class SessionRow(Struct, frozen=True, kw_only=True):
    id: str
    kind: Kind
    role: str  # that it grants
    name: str  # of the token it came from
    hash: str
    created_at: float
    expires_at: float
    parent: str  # the id of that token
    address: str = ""  # of the client that signed in


_parents = tokens.alias("parents")
_HAS_PARENT = and_(
    _parents.c.id == tokens.c.parent,
    _parents.c.role.not_in(_KINDS),
    _parents.c.revoked_at == 0,
    or_(_parents.c.expires_at == 0, _parents.c.expires_at > bindparam("now")),
)
_VALID = (
    select(tokens)
    .join(_parents, _HAS_PARENT)
    .where(tokens.c.role == bindparam("kind"), tokens.c.expires_at > bindparam("now"))
)
_LISTED = _VALID.order_by(tokens.c.created_at, tokens.c.id)
_AMONG = _VALID.where(tokens.c.hash.in_(bindparam("ids", expanding=True)))
_OLDEST_FIRST = (
    select(tokens.c.id)
    .where(tokens.c.role == bindparam("kind"), tokens.c.parent == bindparam("of"))
    .order_by(tokens.c.created_at, tokens.c.id)
)
_TAKE = delete(tokens).where(tokens.c.role == "login", tokens.c.hash == bindparam("hash_sought")).returning(*tokens.c)
_PRUNE = delete(tokens).where(
    tokens.c.role.in_(_KINDS),
    or_(tokens.c.expires_at <= bindparam("now"), ~exists(select(_parents.c.id).where(_HAS_PARENT))),
)


def insert(connection: Connection, row: SessionRow, most: int) -> None:
    """Add a row. A token has at most so many of its kind: the oldest ones make room."""
    old = list(connection.execute(_OLDEST_FIRST, {"kind": row.kind, "of": row.parent}).scalars())
    for some in old[: max(0, len(old) - most + 1)]:
        connection.execute(delete(tokens).where(tokens.c.id == some))
    connection.execute(
        tokens.insert().values(
            id=row.id,
            role=row.kind,
            grants=row.role,
            name=row.name,
            hash=row.hash,
            created_at=row.created_at,
            expires_at=row.expires_at,
            parent=row.parent,
            address=row.address,
        )
    )
    if row.kind == "session":
        keys.note_change(connection)


def take_code(connection: Connection, hashed: str) -> SessionRow | None:
    """Remove a login code and return it; None if there is none. Of several that take it at once, one gets it."""
    row = connection.execute(_TAKE, {"hash_sought": hashed}).one_or_none()
    return None if row is None else _session(row)


def every(connection: Connection, now: float) -> list[SessionRow]:
    """All valid sessions, oldest first."""
    return [_session(row) for row in connection.execute(_LISTED, {"kind": "session", "now": now})]


def among(connection: Connection, hashes: Iterable[str], now: float) -> list[SessionRow]:
    """The valid sessions with these hashes."""
    return [_session(row) for row in select_among(connection, _AMONG, hashes, kind="session", now=now)]


def end(connection: Connection, *, session_id: str) -> bool:
    """Delete a session; False if there is none of this id."""
    found = connection.execute(delete(tokens).where(tokens.c.role == "session", tokens.c.id == session_id)).rowcount
    if found:
        keys.note_change(connection)
    return bool(found)


def end_of(connection: Connection, token_id: str) -> None:
    """Delete the sessions and login codes that came from a token."""
    connection.execute(delete(tokens).where(tokens.c.role.in_(_KINDS), tokens.c.parent == token_id))
    keys.note_change(connection)


def prune(connection: Connection, now: float) -> int:
    """Delete what has expired, and what came from a token that is no longer valid; return how many."""
    return connection.execute(_PRUNE, {"now": now}).rowcount


def _session(row: Row[Any]) -> SessionRow:
    return SessionRow(
        id=row.id,
        kind=row.role,
        role=row.grants,
        name=row.name,
        hash=row.hash,
        created_at=row.created_at,
        expires_at=row.expires_at,
        parent=row.parent,
        address=row.address,
    )
