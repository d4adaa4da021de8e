"""Rows of tokens. Only hashes are stored; the token itself is shown once and known to its holder alone."""

from __future__ import annotations

from msgspec import Struct
from sqlalchemy import delete, select

from enginehouse.store.db import Connection
from enginehouse.store.schema import tokens


class TokenRow(Struct, frozen=True):
    id: str
    role: str
    name: str
    hash: str
    created_at: float


def insert(connection: Connection, row: TokenRow) -> None:
    connection.execute(
        tokens.insert().values(id=row.id, role=row.role, name=row.name, hash=row.hash, created_at=row.created_at)
    )


def remove_named(connection: Connection, role: str, name: str) -> None:
    connection.execute(delete(tokens).where(tokens.c.role == role, tokens.c.name == name))


def every(connection: Connection) -> list[TokenRow]:
    rows = connection.execute(select(tokens).order_by(tokens.c.created_at))
    return [TokenRow(row.id, row.role, row.name, row.hash, row.created_at) for row in rows]
