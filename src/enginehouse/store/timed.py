"""Queries of one row that also say what time it is: on PostgreSQL in the same round trip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import ColumnElement, Double, Row, Select, literal_column, select

from enginehouse.store import db
from enginehouse.store.db import Connection

TimedQuery = Mapping[str, Select[Any]]  # by dialect


def timed(*columns: ColumnElement[Any]) -> TimedQuery:
    clock = literal_column(db.CLOCK["postgresql"], Double).label("now")
    # SQLite is in this process, where a second statement costs next to nothing.
    return {"sqlite": select(*columns), "postgresql": select(*columns, clock)}


def one_with_now(connection: Connection, query: TimedQuery) -> tuple[Row[Any], float]:
    dialect = connection.dialect.name
    row = connection.execute(query[dialect]).one()
    return row, float(row.now) if dialect == "postgresql" else db.now(connection)
