"""Rows of what was used, one per hour, token, model and node. Frontends add to them in batches.

The order of the rows of a batch is that of their keys, so that two frontends do not wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import bindparam, delete, func, literal_column, select

from enginehouse.core.canary import ServedCount
from enginehouse.core.usage import Grouping, UsageCount, UsageQuery
from enginehouse.store.db import Connection
from enginehouse.store.per_database import PerDatabase
from enginehouse.store.schema import usage_counts

_KEY = ("hour", "token_id", "model", "node")
_AMOUNTS = ("requests", "errors", "prompt_tokens", "completion_tokens")
_STORED = (*_AMOUNTS, "failures")
_DAY: Any = literal_column("86400")  # as a parameter it would be another expression in each place of the query

Place = tuple[str, str, str, str]  # id and name of the token, model, node
Amounts = tuple[int, int, int, int, int]  # requests, errors, prompt tokens, completion tokens, failures


def _adding(insert_into: Any) -> Any:
    insert = insert_into(usage_counts)
    added = {name: usage_counts.c[name] + insert.excluded[name] for name in _STORED}
    return insert.on_conflict_do_update(index_elements=list(_KEY), set_=added)


_ADD = PerDatabase(_adding)
_PRUNE = delete(usage_counts).where(usage_counts.c.hour < bindparam("before"))
_GROUPS: dict[Grouping, tuple[Any, ...]] = {
    "token": (usage_counts.c.token_id, usage_counts.c.token_name.label("token")),
    "model": (usage_counts.c.model,),
    "node": (usage_counts.c.node,),
    "hour": (usage_counts.c.hour,),
    "day": ((usage_counts.c.hour - usage_counts.c.hour % _DAY).label("day"),),
}


def add(connection: Connection, hour: int, counts: Mapping[Place, Amounts]) -> None:
    if counts:
        rows = [
            {
                **dict(zip(("token_id", "token_name", "model", "node"), place, strict=True)),
                **dict(zip(_STORED, amounts, strict=True)),
                "hour": hour,
            }
            for place, amounts in sorted(counts.items())
        ]
        connection.execute(_ADD[connection.dialect.name], rows)


def summed(connection: Connection, asked: UsageQuery) -> list[UsageCount]:
    """The sums of the asked groups, the busiest first; in the order of time where it is grouped by time."""
    groups = [column for name in asked.by for column in _GROUPS[name]]
    requests = func.sum(usage_counts.c.requests)
    sums = [func.coalesce(func.sum(usage_counts.c[name]), 0).label(name) for name in _AMOUNTS]
    query = select(*groups, *sums).where(usage_counts.c.hour >= asked.since, usage_counts.c.hour < asked.until)
    if asked.token_id is not None:
        query = query.where(usage_counts.c.token_id == asked.token_id)
    # A label cannot be grouped by everywhere, its expression can.
    plain = [getattr(column, "element", column) for column in groups]
    times = [_GROUPS[name][0] for name in asked.by if name in ("hour", "day")]
    order = [getattr(column, "element", column) for column in times]
    if groups:
        query = query.group_by(*plain).order_by(*order, requests.desc(), *plain)
    rows = connection.execute(query.limit(asked.limit)).mappings()
    return [UsageCount(**{name: _plain(value) for name, value in row.items()}) for row in rows]


_SERVED = (
    select(
        usage_counts.c.node,
        func.sum(usage_counts.c.requests).label("requests"),
        func.sum(usage_counts.c.failures).label("failures"),
    )
    .where(usage_counts.c.hour >= bindparam("since"), usage_counts.c.model.in_(bindparam("models", expanding=True)))
    .group_by(usage_counts.c.node)
)


def served(connection: Connection, since: float, models: Collection[str]) -> dict[str, ServedCount]:
    """Per name of a node, the requests for these models since the beginning of that hour."""
    rows = connection.execute(_SERVED, {"since": since, "models": sorted(models)})
    return {row.node: ServedCount(int(row.requests), int(row.failures)) for row in rows}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str) else int(value)  # PostgreSQL sums integers to decimals


def prune(connection: Connection, before: float) -> int:
    """Delete hours that began before then; return how many rows."""
    return connection.execute(_PRUNE, {"before": before}).rowcount
