"""Rows of what limited tokens used in the last minute, one per token and step. All frontends add to the same rows.

Rows are written in batches, in the order of their keys, so that two frontends do not wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import bindparam, delete, select

from enginehouse.store.db import Connection
from enginehouse.store.per_database import PerDatabase
from enginehouse.store.rows import select_among
from enginehouse.store.schema import rate_counts

Counts = Mapping[tuple[str, int], tuple[int, int]]  # (requests, tokens) by token and step


def _adding(insert_into: Any) -> Any:
    insert = insert_into(rate_counts)
    added = {name: rate_counts.c[name] + insert.excluded[name] for name in ("requests", "tokens")}
    return insert.on_conflict_do_update(index_elements=["token_id", "step"], set_=added)


_ADD = PerDatabase(_adding)
_SINCE = select(rate_counts).where(
    rate_counts.c.token_id.in_(bindparam("ids", expanding=True)), rate_counts.c.step >= bindparam("since")
)
_FORGET = delete(rate_counts).where(rate_counts.c.step < bindparam("before"))


def add(connection: Connection, counts: Counts) -> None:
    if counts:
        rows = [
            {"token_id": token_id, "step": step, "requests": requests, "tokens": tokens}
            for (token_id, step), (requests, tokens) in sorted(counts.items())
        ]
        connection.execute(_ADD[connection.dialect.name], rows)


def since(connection: Connection, token_ids: Collection[str], step: int) -> dict[tuple[str, int], tuple[int, int]]:
    """The counts of these tokens from a step on."""
    rows = select_among(connection, _SINCE, sorted(token_ids), since=step)
    return {(row.token_id, row.step): (row.requests, row.tokens) for row in rows}


def forget(connection: Connection, before: int) -> None:
    """Delete steps that no longer count."""
    connection.execute(_FORGET, {"before": before})
