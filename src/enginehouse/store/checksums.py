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
    Row,
    Select,
    Subquery,
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
    nodes: tuple[int, int]
    replicas: ReplicaChecksum
    schedules: tuple[int, int]
    models: int  # 0 if there are none
    infos: int  # 0 if there are none
    steered: int  # loads and drains under way


_NODES = select(func.count(), _sum_of(nodes.c.updated_at)).select_from(nodes)
_OF_REPLICAS = (
    func.count(),
    _sum_of(replicas.c.created_at),
    func.coalesce(func.sum(cast(replicas.c.leaving, Integer)), 0),
)
_REPLICAS = select(*_OF_REPLICAS).select_from(replicas)
_REPLICAS_BY_MODEL = select(replicas.c.model, *_OF_REPLICAS).group_by(replicas.c.model)
_SCHEDULES = select(func.count(), _sum_of(schedules.c.updated_at)).select_from(schedules)
_STEERED = select(func.count()).select_from(operations).where(operations.c.is_steered.is_(True))

# These rows have no times, and are few. PostgreSQL hashes them; SQLite is in this process.
_OF_MODELS = (models.c.name, models.c.definition)
_OF_INFOS = (
    *(load_infos.c.model, load_infos.c.revision, load_infos.c.memory_bytes, load_infos.c.kept),
    *(load_infos.c.scaled_at, load_infos.c.failures, load_infos.c.retry_at),
)

_OF_TOKENS = (nodes.c.id, nodes.c.name, nodes.c.token_hash, nodes.c.previous_token_hash)


def _hash_of(columns: tuple[Column[Any], ...]) -> ColumnElement[Any]:
    text = func.concat_ws(literal("\n"), *columns)
    return cast(func.hashtextextended(text, 0), Numeric)


_KINDS: dict[str, tuple[tuple[Column[Any], ...], Column[Any]]] = {
    "models": (_OF_MODELS, models.c.name),
    "infos": (_OF_INFOS, load_infos.c.model),
    "tokens": (_OF_TOKENS, nodes.c.id),
}
_HASHES = {kind: select(func.coalesce(func.sum(_hash_of(columns)), 0)) for kind, (columns, _) in _KINDS.items()}
_HASHED_ROWS: dict[str, Select[Any]] = {
    kind: select(*columns, _hash_of(columns).label("hash")) for kind, (columns, _) in _KINDS.items()
}
_ROWS: dict[str, Select[Any]] = {kind: select(*columns).order_by(name) for kind, (columns, name) in _KINDS.items()}


def _together(*rows: Subquery) -> Select[Any]:
    """One row of all these rows. One statement: a round trip costs more than such a sum."""
    joined: FromClause = rows[0]
    for row in rows[1:]:
        joined = joined.join(row, true())
    return select(*(column for row in rows for column in row.c)).select_from(joined)


_SERVING = _together(
    *(_NODES.subquery(), _REPLICAS.subquery(), _SCHEDULES.subquery()),
    *(_HASHES["models"].subquery(), _HASHES["infos"].subquery(), _STEERED.subquery()),
)


def of_nodes(connection: Connection) -> tuple[int, int]:
    count, times = connection.execute(_NODES).one()
    return int(count), int(times)


def of_replicas(connection: Connection) -> ReplicaChecksum:
    count, times, leaving = connection.execute(_REPLICAS).one()
    return ReplicaChecksum(int(count), int(times), int(leaving))


def of_replicas_by_model(connection: Connection) -> dict[str, ReplicaChecksum]:
    rows = connection.execute(_REPLICAS_BY_MODEL).all()
    return {model: ReplicaChecksum(int(count), int(times), int(leaving)) for model, count, times, leaving in rows}


def of_schedules(connection: Connection) -> tuple[int, int]:
    count, times = connection.execute(_SCHEDULES).one()
    return int(count), int(times)


def of_models(connection: Connection) -> int:
    return _contents(connection, "models")


def of_infos(connection: Connection) -> int:
    return _contents(connection, "infos")


def _contents(connection: Connection, kind: str) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(_HASHES[kind]).scalar_one())
    return _with_contents(connection, kind)[1]


def model_rows(connection: Connection) -> tuple[list[Row[Any]], int]:
    """The names and definitions of all models, and the checksum of exactly these."""
    return _with_contents(connection, "models")


def info_rows(connection: Connection) -> tuple[list[Row[Any]], int]:
    """What is decided by of all load infos, and the checksum of exactly that."""
    return _with_contents(connection, "infos")


def _with_contents(connection: Connection, kind: str) -> tuple[list[Row[Any]], int]:
    is_hashed = connection.dialect.name == "postgresql"
    found: list[Row[Any]] = [*connection.execute((_HASHED_ROWS if is_hashed else _ROWS)[kind]).all()]
    if is_hashed:
        return found, sum(int(row.hash) for row in found)
    return found, hash(tuple(tuple(row) for row in found)) if found else 0


def of_serving(connection: Connection) -> ServingChecksums:
    if connection.dialect.name != "postgresql":
        return _of_serving(connection, of_replicas(connection))
    found = [int(value) for value in connection.execute(_SERVING).one()]
    return ServingChecksums(
        nodes=(found[0], found[1]),
        replicas=ReplicaChecksum(found[2], found[3], found[4]),
        schedules=(found[5], found[6]),
        models=found[7],
        infos=found[8],
        steered=found[9],
    )


def of_node_tokens(connection: Connection) -> int:
    """Of the tokens of all nodes: their rows have no time for changes of these."""
    return _contents(connection, "tokens")


def of_serving_by_model(connection: Connection) -> tuple[ServingChecksums, dict[str, ReplicaChecksum]]:
    """`of_serving`, and those of the replicas of each model that has any."""
    found = of_replicas_by_model(connection)
    parts = found.values()
    every = ReplicaChecksum(
        sum(one.count for one in parts), sum(one.times for one in parts), sum(one.leaving for one in parts)
    )
    return _of_serving(connection, every), found


def _of_serving(connection: Connection, of_replicas: ReplicaChecksum) -> ServingChecksums:
    return ServingChecksums(
        nodes=of_nodes(connection),
        replicas=of_replicas,
        schedules=of_schedules(connection),
        models=of_models(connection),
        infos=of_infos(connection),
        steered=int(connection.execute(_STEERED).scalar_one()),
    )
