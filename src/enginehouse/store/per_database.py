"""Statements that the two databases know in different words: inserts with `on conflict`.

Each is built when it is first needed. Importing the words of PostgreSQL would take a twentieth of a start on SQLite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PerDatabase(dict[str, Any]):
    """A statement by the name of the database. `build` gets the insert of that database, a function of a table."""

    def __init__(self, build: Callable[[Any], Any]) -> None:
        super().__init__()
        self._build = build

    def __missing__(self, dialect: str) -> Any:
        self[dialect] = built = self._build(_insert_of(dialect))
        return built


def _insert_of(dialect: str) -> Any:
    if dialect == "postgresql":
        from sqlalchemy.dialects import postgresql

        return postgresql.insert
    from sqlalchemy.dialects import sqlite

    return sqlite.insert
