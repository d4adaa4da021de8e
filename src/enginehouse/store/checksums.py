"""Checksums of what serving depends on: small values that differ after any row of it was changed, whoever changed it.

Sums and counts in SQL, so that looking costs next to nothing however many rows there are, and no row is decoded. A
largest time would not do: a transaction that began earlier may be committed later. When replicas were used is left
out: it changes all the time, and only puts decisions off.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    FromClause,
    Integer,
    Numeric,
    Select,
    Subquery,
    Table,
    cast,
    func,
    literal,
    select,
    true,
)

from enginehouse.store.db import Connection
from enginehouse.store.schema import load_infos, models, nodes, operations, replicas, schedules

_PRIME = 1_000_000_007  # keeps the sums within 64 bits, which SQLite does not exceed


def part_of(time: Column[float]) -> ColumnElement[int]:
    """What one row adds to a sum. Whole numbers: sums of others depend on the order of the rows."""
    return cast(time * 1e6, BigInteger) % _PRIME


def _sum_of(time: Column[float]) -> ColumnElement[int]:
    return func.coalesce(cast(func.sum(part_of(time)), BigInteger), 0)


class ReplicaChecksum(Struct, frozen=True):
    count: int
    times: int  # the sum of when they became ready
    leaving: int  # how many are about to stop


class ServingChecksums(Struct, frozen=True, kw_only=True):
    """Counts come first."""

    nodes: tuple[int, int]
    replicas: ReplicaChecksum
    schedules: tuple[int, int]
    models: tuple[int, int]
    infos: tuple[int, int]
    steered: int  # loads and drains under way


# These rows have no times, and are few. PostgreSQL hashes them; SQLite is in this process.
_OF_MODELS = (models.c.name, models.c.definition)
_OF_INFOS = (
    *(load_infos.c.model, load_infos.c.revision, load_infos.c.memory_bytes, load_infos.c.kept),
    *(load_infos.c.scaled_at, load_infos.c.failures, load_infos.c.retry_at),
)
_OF_TOKENS = (nodes.c.id, nodes.c.name, nodes.c.token_hash, nodes.c.previous_token_hash)


def _hash_of(columns: tuple[Column[Any], ...]) -> ColumnElement[Any]:
    text = func.concat_ws(literal("\n"), *columns)
    return func.coalesce(func.sum(cast(func.hashtextextended(text, 0), Numeric)), 0)


def _counted(table: Table, *sums: ColumnElement[Any]) -> Subquery:
    return select(func.count(), *sums).select_from(table).subquery()


def _together(*parts: Subquery) -> Select[Any]:
    """One row of all these rows. One statement: a round trip costs more than such a sum."""
    joined: FromClause = parts[0]
    for part in parts[1:]:
        joined = joined.join(part, true())
    return select(*(column for part in parts for column in part.c)).select_from(joined)


_TIMED = (
    _counted(nodes, _sum_of(nodes.c.updated_at)),
    _counted(replicas, _sum_of(replicas.c.created_at), func.coalesce(func.sum(cast(replicas.c.leaving, Integer)), 0)),
    _counted(schedules, _sum_of(schedules.c.updated_at)),
    select(func.count()).select_from(operations).where(operations.c.is_steered.is_(True)).subquery(),
)
_HASHED = (_counted(models, _hash_of(_OF_MODELS)), _counted(load_infos, _hash_of(_OF_INFOS)))
_SERVING = {"sqlite": _together(*_TIMED), "postgresql": _together(*_TIMED, *_HASHED)}
_TOKENS = select(_hash_of(_OF_TOKENS).label("tokens")).select_from(nodes)
_ROWS = {
    "models": select(*_OF_MODELS).order_by(models.c.name),
    "infos": select(*_OF_INFOS).order_by(load_infos.c.model),
    "tokens": select(*_OF_TOKENS).order_by(nodes.c.id),
}


def of_serving(connection: Connection) -> ServingChecksums:
    dialect = connection.dialect.name
    found = [int(value) for value in connection.execute(_SERVING[dialect]).one()]
    if dialect == "postgresql":
        hashed = (found[8], found[9]), (found[10], found[11])
    else:
        hashed = _rows_of(connection, "models"), _rows_of(connection, "infos")
    return ServingChecksums(
        nodes=(found[0], found[1]),
        replicas=ReplicaChecksum(found[2], found[3], found[4]),
        schedules=(found[5], found[6]),
        steered=found[7],
        models=hashed[0],
        infos=hashed[1],
    )


def of_node_tokens(connection: Connection) -> int:
    """Of the tokens of all nodes: their rows have no time for changes of these."""
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_TOKENS).scalar_one())
    return _rows_of(connection, "tokens")[1]


def _rows_of(connection: Connection, kind: str) -> tuple[int, int]:
    found = [tuple(row) for row in connection.execute(_ROWS[kind])]
    return len(found), hash(tuple(found))
