"""A connection that runs what the store puts together once without the library in between: that was half a run's cost.

The library still makes the SQL of each such statement, the processors of its values and the names of its columns, once
per process. Statements that are made on the spot go to the library itself. It must answer as the library does: a test
compares whole runs on both.
"""

from __future__ import annotations

import sqlite3
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from msgspec import Struct
from sqlalchemy import ClauseElement, Connection, Executable
from sqlalchemy.exc import DBAPIError, MultipleResultsFound, NoResultFound
from sqlalchemy.sql.compiler import SQLCompiler

from enginehouse.store.per_database import PerDatabase

Process = Callable[[Any], Any] | None
Given = Mapping[str, Any]


class _Bind(Struct, frozen=True):
    """Where the value at one place of a statement comes from: a name that is given, one of a list, or the statement."""

    name: str
    place: int = -1  # in the list of that name
    process: Process = None
    fixed: Any = None


class _Plan(Struct, frozen=True):
    """One statement as the driver takes it, for one set of names and lengths."""

    sql: str
    binds: tuple[_Bind, ...]
    make_row: Callable[[Iterable[Any]], Any] | None  # none where nothing comes back
    processes: tuple[tuple[int, Callable[[Any], Any]], ...]

    def values(self, given: Given) -> list[Any]:
        found: list[Any] = []
        for bind in self.binds:
            if not bind.name:
                found.append(bind.fixed)
                continue
            value = given[bind.name] if bind.place < 0 else given[bind.name][bind.place]
            found.append(value if bind.process is None else bind.process(value))
        return found

    def rows(self, found: list[tuple[Any, ...]]) -> list[Any]:
        make_row = self.make_row
        if make_row is None or not found:
            return []
        if not self.processes:
            return [make_row(row) for row in found]
        rows: list[Any] = []
        for row in found:
            values = list(row)
            for place, process in self.processes:
                values[place] = process(values[place])
            rows.append(make_row(values))
        return rows


class _Found:
    """As much of a result as the store asks for."""

    def __init__(self, rows: list[Any], rowcount: int) -> None:
        self._rows = rows
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rows)

    def all(self) -> list[Any]:
        return self._rows

    def scalars(self) -> list[Any]:
        return [row[0] for row in self._rows]

    def one_or_none(self) -> Any:
        if len(self._rows) > 1:
            raise MultipleResultsFound("Multiple rows were found when one or none was required")
        return self._rows[0] if self._rows else None

    def one(self) -> Any:
        row = self.one_or_none()
        if row is None:
            raise NoResultFound("No row was found when one was required")
        return row

    def scalar_one_or_none(self) -> Any:
        row = self.one_or_none()
        return None if row is None else row[0]

    def scalar_one(self) -> Any:
        return self.one()[0]


class Shortcut:
    """Of `library`, for everything that the modules of the store hold ready now."""

    def __init__(self, library: Connection, driver: sqlite3.Connection) -> None:
        self._library = library
        self._driver = driver
        self.dialect = library.dialect
        self._ready = {id(one): one for one in _held_ready()}
        self._plans: dict[tuple[object, ...], _Plan] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def execute(self, statement: Executable, parameters: Given | Sequence[Given] | None = None) -> Any:
        known = self._ready.get(id(statement))
        if known is None:
            return self._library.execute(statement, parameters)
        rows: list[Given] = parameters if isinstance(parameters, list) else [cast(Given, parameters) or {}]
        plan = self._plan(known, rows[0])
        driver, sql, found = self._driver, plan.sql, []
        try:
            if plan.make_row is None and len(rows) > 1:
                return _Found([], driver.executemany(sql, [plan.values(row) for row in rows]).rowcount)
            for row in rows:
                cursor = driver.execute(sql, plan.values(row))
                found += cursor.fetchall()
        except sqlite3.Error as error:
            raise DBAPIError.instance(sql, None, error, sqlite3.Error, dialect=self.dialect) from error
        return _Found(plan.rows(found), cursor.rowcount)

    def exec_driver_sql(self, sql: str) -> _Found:
        cursor = self._driver.execute(sql)
        return _Found(cursor.fetchall(), cursor.rowcount)

    def _plan(self, statement: Any, given: Given) -> _Plan:
        key = (
            id(statement),
            *[(name, len(value)) if isinstance(value, list | tuple) else name for name, value in given.items()],
        )
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._planned(statement, given)
        return plan

    def _planned(self, statement: ClauseElement, given: Given) -> _Plan:
        compiled = statement.compile(dialect=self.dialect, column_keys=sorted(given))
        assert isinstance(compiled, SQLCompiler)
        state = compiled.construct_expanded_state(given)
        processors: dict[str, Any] = {**compiled._bind_processors, **state.processors}
        elements = {
            element: (name, place)
            for name, those in state.parameter_expansion.items()
            for place, element in enumerate(those)
        }
        binds: list[_Bind] = []
        for at in state.positiontup or ():
            name, place = elements.get(at, (at, -1))
            process = processors.get(at)
            if name in given:
                binds.append(_Bind(name, place, process))
            else:
                value = state.parameters[at]
                binds.append(_Bind("", fixed=value if process is None else process(value)))
        columns = compiled._result_columns
        found = [one.type._cached_result_processor(self.dialect, None) for one in columns]
        row = namedtuple("Row", [one.keyname for one in columns], rename=True)  # type: ignore[misc]
        return _Plan(
            state.statement,
            tuple(binds),
            row._make if columns else None,
            tuple((place, process) for place, process in enumerate(found) if process is not None),
        )


def _held_ready() -> Iterator[Any]:
    for name, module in list(sys.modules.items()):
        if name.startswith("enginehouse.store."):
            for value in vars(module).values():
                if isinstance(value, Executable) and isinstance(value, ClauseElement):
                    yield value
                elif isinstance(value, PerDatabase):
                    yield value["sqlite"]
                elif isinstance(value, dict):
                    yield from (one for one in value.values() if isinstance(one, Executable))
