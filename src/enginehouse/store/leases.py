"""Leases: at most one owner at a time may do a named task.

One statement acquires, extends or refuses a lease, so two frontends never hold it together. Leases expire by the
store's clock; jumps of a wall clock have no effect.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BindParameter, bindparam, delete, or_

from enginehouse.store.db import Connection
from enginehouse.store.per_database import PerDatabase
from enginehouse.store.schema import leases


def _acquiring(insert: Any) -> Any:
    """Build the statement once: every loop of every frontend runs it every second."""
    owner: BindParameter[str] = bindparam("holder")
    until: BindParameter[float] = bindparam("ends")
    return (
        insert(leases)
        .values(name=bindparam("named"), owner=owner, until=until)
        .on_conflict_do_update(
            index_elements=[leases.c.name],
            set_={"owner": owner, "until": until},
            where=or_(leases.c.owner == owner, leases.c.until < bindparam("at")),
        )
        .returning(leases.c.owner)
    )


_ACQUIRE = PerDatabase(_acquiring)


def acquire(connection: Connection, name: str, owner: str, now: float, until: float) -> bool:
    """Acquire or extend the lease; True if `owner` holds it now: it was free, expired, or already its own."""
    values = {"named": name, "holder": owner, "ends": until, "at": now}
    return connection.execute(_ACQUIRE[connection.dialect.name], values).scalar_one_or_none() == owner


def prune(connection: Connection, before: float) -> None:
    """Delete leases that expired before then. A lease that is named after an operation stays behind if the operation is
    ended by somebody else than its owner.
    """
    connection.execute(delete(leases).where(leases.c.until < before))


def release(connection: Connection, name: str, owner: str) -> None:
    connection.execute(delete(leases).where(leases.c.name == name, leases.c.owner == owner))
