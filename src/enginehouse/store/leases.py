"""Leases: who may do a thing now. Judged by the store's clock, so a wall clock that jumps gives and takes nothing."""

from __future__ import annotations

from sqlalchemy import delete, or_
from sqlalchemy.dialects import postgresql, sqlite

from enginehouse.store.db import Connection
from enginehouse.store.schema import leases


def acquire(connection: Connection, name: str, owner: str, now: float, until: float) -> bool:
    """Whether `owner` holds the lease after this: it was free, had ended, or was already its own (then it is
    extended).
    """
    insert_into = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    statement = (
        insert_into(leases)
        .values(name=name, owner=owner, until=until)
        .on_conflict_do_update(
            index_elements=[leases.c.name],
            set_={"owner": owner, "until": until},
            where=or_(leases.c.owner == owner, leases.c.until < now),
        )
        .returning(leases.c.owner)
    )
    return connection.execute(statement).scalar_one_or_none() == owner


def release(connection: Connection, name: str, owner: str) -> None:
    connection.execute(delete(leases).where(leases.c.name == name, leases.c.owner == owner))
