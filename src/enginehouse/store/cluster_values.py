"""Single values that all frontends share: keys and counters, by name.

A value is created once and never replaced, except by `count`. Of two frontends that create one at the same time, both
read the value of the first.
"""

from __future__ import annotations

from sqlalchemy import Select, String, bindparam, cast, select, update
from sqlalchemy.types import Integer

from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there
from enginehouse.store.schema import cluster_values

GENERATION_BASE = "generation-base"  # above every generation that workers may have seen before a restore
_ONE = select(cluster_values.c.value).where(cluster_values.c.name == bindparam("named"))
_COUNT = (
    update(cluster_values)
    .where(cluster_values.c.name == bindparam("named"))
    .values(value=cast(cast(cluster_values.c.value, Integer) + 1, String))
)


def value_of(name: str) -> Select[tuple[str]]:
    """The query for a value, for statements that ask for more."""
    return select(cluster_values.c.value).where(cluster_values.c.name == name)


def get(connection: Connection, name: str) -> str:
    """Return the value, or "" if there is none."""
    return str(connection.execute(_ONE, {"named": name}).scalar_one_or_none() or "")


def get_or_put(connection: Connection, name: str, value: str) -> str:
    found = get(connection, name)
    if not found:
        insert_unless_there(connection, cluster_values, {"name": name, "value": value})
        found = get(connection, name)
    return found


def count(connection: Connection, name: str) -> None:
    """Increment a counter. Readers detect a change by polling this one value."""
    get_or_put(connection, name, "0")
    connection.execute(_COUNT, {"named": name})


def put(connection: Connection, name: str, value: str) -> None:
    if not insert_unless_there(connection, cluster_values, {"name": name, "value": value}):
        connection.execute(update(cluster_values).where(cluster_values.c.name == name).values(value=value))
