"""Checksums of what serving depends on: small values that differ after any row of it was changed, whoever changed it.

Sums and counts in SQL, so that looking costs next to nothing however many rows there are, and no row is decoded. A
largest time would not do: a transaction that began earlier may be committed later. When replicas were used is left
out: it changes all the time, and only puts decisions off.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from sqlalchemy import BigInteger, Column, ColumnElement, Integer, Numeric, cast, func, literal, select

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
    nodes: tuple[int, int]
    replicas: ReplicaChecksum
    schedules: tuple[int, int]
    models: int
    infos: int
    steered: int  # loads and drains under way


_NODES = select(func.count(), _sum_of(nodes.c.updated_at)).select_from(nodes)
_REPLICAS = select(
    func.count(), _sum_of(replicas.c.created_at), func.coalesce(func.sum(cast(replicas.c.leaving, Integer)), 0)
).select_from(replicas)
_SCHEDULES = select(func.count(), _sum_of(schedules.c.updated_at)).select_from(schedules)
_STEERED = select(func.count()).select_from(operations).where(operations.c.is_steered.is_(True))

# These rows have no times, and are few. PostgreSQL hashes them; SQLite is in this process.
_OF_MODELS = (models.c.name, models.c.definition)
_OF_INFOS = (
    *(load_infos.c.model, load_infos.c.revision, load_infos.c.memory_bytes, load_infos.c.kept),
    *(load_infos.c.scaled_at, load_infos.c.failures, load_infos.c.retry_at),
)


def _hash_of(columns: tuple[Column[Any], ...]) -> ColumnElement[Any]:
    text = func.concat_ws(literal("\n"), *columns)
    return func.coalesce(func.sum(cast(func.hashtextextended(text, 0), Numeric)), 0)


_HASHED = {kind: select(_hash_of(columns)) for kind, columns in (("models", _OF_MODELS), ("infos", _OF_INFOS))}
_ROWS = {
    "models": select(*_OF_MODELS).order_by(models.c.name),
    "infos": select(*_OF_INFOS).order_by(load_infos.c.model),
}


def of_nodes(connection: Connection) -> tuple[int, int]:
    count, times = connection.execute(_NODES).one()
    return int(count), int(times)


def of_replicas(connection: Connection) -> ReplicaChecksum:
    count, times, leaving = connection.execute(_REPLICAS).one()
    return ReplicaChecksum(int(count), int(times), int(leaving))


def of_schedules(connection: Connection) -> tuple[int, int]:
    count, times = connection.execute(_SCHEDULES).one()
    return int(count), int(times)


def of_models(connection: Connection) -> int:
    return _contents(connection, "models")


def _contents(connection: Connection, kind: str) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_HASHED[kind]).scalar_one())
    return hash(tuple(tuple(row) for row in connection.execute(_ROWS[kind])))


def of_serving(connection: Connection) -> ServingChecksums:
    return ServingChecksums(
        nodes=of_nodes(connection),
        replicas=of_replicas(connection),
        schedules=of_schedules(connection),
        models=_contents(connection, "models"),
        infos=_contents(connection, "infos"),
        steered=int(connection.execute(_STEERED).scalar_one()),
    )
