"""Rows of reservations: the slot and the memory that a load has on its node, at most one per load and per slot.

A reservation ends with its load, or by itself some time after its load was last steered.
"""

from __future__ import annotations

from sqlalchemy import delete, or_, select, update

from enginehouse.core.placement import Reservation
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there
from enginehouse.store.schema import reservations


def every(connection: Connection, now: float) -> list[Reservation]:
    rows = connection.execute(select(reservations).where(reservations.c.until > now))
    return [Reservation(**{field: getattr(row, field) for field in Reservation.__struct_fields__}) for row in rows]


def put(connection: Connection, wanted: Reservation, now: float, until: float) -> bool:
    """Reserve, instead of what the load had reserved before; False if another load has the slot."""
    connection.execute(
        delete(reservations).where(
            or_(
                reservations.c.operation_id == wanted.operation_id,
                reservations.c.until <= now,
                # The replica of a settled one is ready, so its row holds the slot.
                (reservations.c.node_id == wanted.node_id)
                & (reservations.c.model == wanted.model)
                & (reservations.c.slot == wanted.slot)
                & (reservations.c.settled_at > 0),
            )
        )
    )
    columns = {field: getattr(wanted, field) for field in Reservation.__struct_fields__}
    return insert_unless_there(connection, reservations, {**columns, "until": until})


def extend(connection: Connection, operation_id: str, until: float) -> None:
    connection.execute(
        update(reservations)
        .where(reservations.c.operation_id == operation_id, reservations.c.settled_at == 0)
        .values(until=until)
    )


def settle(connection: Connection, operation_id: str, now: float, until: float) -> None:
    """The replica is ready: its memory counts until a heartbeat shows it as used."""
    connection.execute(
        update(reservations).where(reservations.c.operation_id == operation_id).values(settled_at=now, until=until)
    )


def remove(connection: Connection, operation_id: str) -> None:
    connection.execute(delete(reservations).where(reservations.c.operation_id == operation_id))
