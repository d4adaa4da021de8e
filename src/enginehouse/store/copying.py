"""All rows of a database in a form that both databases take: for backups.

Rows are read in one read-only transaction, so they are those of one moment, however long reading takes and whatever is
written meanwhile. They are written by the names of the columns that their schema had, into a database that is first
brought to that schema and then migrated to the newest, all in one transaction. Left out is what means nothing
elsewhere: leases of running programs, and the clock of one machine.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy
from sqlalchemy import Column, Connection, Engine, MetaData, Table, inspect, select, text, update
from sqlalchemy.exc import SQLAlchemyError

from enginehouse.core.errors import Conflict, EnginehouseError, Hopeless, Unavailable
from enginehouse.store import cluster_values, db, migrating
from enginehouse.store.clock import StoreClock
from enginehouse.store.engines import Holding, make_engines
from enginehouse.store.limits import StoreLimits
from enginehouse.store.schema import metadata, subjects, tokens

T = TypeVar("T")
ROWS_AT_ONCE = 500
LEFT_OUT = ("alembic_version", "clock", "leases")
_VERSIONS = "alembic_version"
# One of these has a row in every database that was ever used: the first start of a frontend stores tokens.
_TELLING = ("tokens", "nodes", "models", "operations")
_LIMITS = StoreLimits(answer_seconds=3600.0)  # a large database takes minutes to read
_EPOCH_SECONDS = 1_577_836_800  # 2020: minutes since then fit the column of generations for 4,000 years
_Row = list[Any]


class StoredRows:
    """The rows of a database at one moment."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.revision = migrating.current(connection)
        self._tables = _reflected(connection)

    @property
    def tables(self) -> dict[str, list[str]]:
        """The columns of each table. Tables that others refer to come first."""
        return {str(table.name): [str(column.name) for column in table.columns] for table in self._tables}

    def token_hashes(self) -> list[str]:
        """The hashes of tokens that are not revoked."""
        return valid_token_hashes(self._connection)

    def rows(self, name: str) -> Iterator[list[_Row]]:
        """The rows of a table, some at a time, as values that JSON can hold."""
        table = next(one for one in self._tables if one.name == name)
        options = {"stream_results": True, "yield_per": ROWS_AT_ONCE}
        for some in self._connection.execute(select(table), execution_options=options).partitions():
            yield [[_portable(value) for value in row] for row in some]


@contextlib.contextmanager
def stored_rows(url: str) -> Iterator[StoredRows]:
    """Read a database, which frontends may be using."""
    path = sqlite_path(url)
    if path is not None and not path.exists():
        raise Unavailable(f"cannot find a database at {path}: check --data or --database-url", code="no_database")
    with _engine(url, reads=True) as engine, _translated("read"), engine.begin() as connection:
        yield StoredRows(connection)


class RowWriter:
    """Fills an empty database of one schema, and brings it to the newest one."""

    def __init__(self, connection: Connection, revision: str) -> None:
        self._connection = connection
        migrating.upgrade(connection, revision)
        self._tables = {table.name: table for table in _reflected(connection)}
        for table in self._tables.values():
            connection.execute(table.delete())  # a migration may have added rows of its own

    def add(self, name: str, columns: list[str], rows: list[_Row]) -> None:
        table = self._tables.get(name)
        if table is None or not set(columns) <= set(table.columns.keys()):
            raise Hopeless(f"cannot restore the table {name}: it does not fit the schema that the backup names")
        kinds = [table.columns[column] for column in columns]
        self._connection.execute(
            table.insert(),
            [dict(zip(columns, map(_stored, kinds, row), strict=True)) for row in rows],
        )

    def finish(self) -> None:
        """Migrate, and begin the generations anew, above all that any worker has ever seen: requests made after the
        backup are unknown here, and a worker refuses a generation that it has passed.
        """
        migrating.upgrade(self._connection)
        base = int(time.time() - _EPOCH_SECONDS) // 60
        cluster_values.put(self._connection, cluster_values.GENERATION_BASE, str(base))
        self._connection.execute(
            update(subjects).where(subjects.c.generation < base).values(generation=subjects.c.generation + base)
        )


def replace_all(url: str, fill: Callable[[Connection], T], *, force: bool) -> T:
    """Empty a database and fill it in the same transaction: a failure, or the death of this program, changes nothing.

    A database with rows is refused unless `force`; one that running frontends use, always.
    """
    with _engine(url) as engine, _translated("restore into"), engine.begin() as connection:
        _refuse_foreign(connection)
        if is_used(connection):
            if not force:
                raise Conflict("cannot restore into this database: it is not empty; give another one, or --force")
            _refuse_connected(connection)
        for table in reversed(metadata.sorted_tables):
            connection.execute(text(f"drop table if exists {table.name} cascade"))
        connection.execute(text(f"drop table if exists {_VERSIONS}"))
        return fill(connection)


def create_sqlite(path: Path, fill: Callable[[Connection], T]) -> T:
    """Make a database in one file, complete and without a log beside it."""
    with _engine(f"sqlite:///{path}") as engine, _translated("restore into"):
        with engine.begin() as connection:
            made = fill(connection)
        with engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            driver.rollback()
            driver.execute("pragma journal_mode=delete").fetchall()
        return made


def refuse_open_sqlite(path: Path) -> None:
    """Raise `Conflict` if another program has the database open. It stays as it is, with no log beside it."""
    if not path.exists():
        return
    import sqlite3

    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        # Leaving the mode of several users requires that there is no other one.
        mode = connection.execute("pragma journal_mode=delete").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if "not a database" in str(error) or "malformed" in str(error):
            return  # nothing that a program could be using
        mode = "wal"
    finally:
        connection.close()
    if mode == "wal":
        raise Conflict(f"cannot restore over {path}: another program has it open; stop every frontend first")


def valid_token_hashes(connection: Connection) -> list[str]:
    return list(connection.execute(select(tokens.c.hash).where(tokens.c.revoked_at == 0)).scalars())


def is_used(connection: Connection) -> bool:
    there = set(inspect(connection).get_table_names())
    used = (name for name in _TELLING if name in there)
    return any(connection.execute(text(f"select 1 from {name} limit 1")).first() is not None for name in used)


def sqlite_path(url: str) -> Path | None:
    """The file of a SQLite database; None for PostgreSQL."""
    if not url.startswith("sqlite"):
        return None
    name = sqlalchemy.make_url(url).database
    return Path(name) if name and name != ":memory:" else None


@contextlib.contextmanager
def _engine(url: str, *, reads: bool = False) -> Iterator[Engine]:
    engines = make_engines(url, _LIMITS, Holding(), StoreClock())
    try:
        yield engines.reading if reads and engines.reading is not None else engines.steering
    finally:
        for engine in (engines.steering, engines.reading):
            if engine is not None:
                engine.dispose()


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    try:
        yield
    except EnginehouseError:
        raise
    except (SQLAlchemyError, OSError) as error:
        cause = str(getattr(error, "orig", None) or error).strip()
        reason = cause.splitlines()[0] if cause else type(error).__name__
        advice = ". Free some space there, and run it again" if db.is_full_disk(error) else ""
        raise Unavailable(f"cannot {doing} the database: {reason}{advice}", code="store_unavailable") from error


def _reflected(connection: Connection) -> list[Table]:
    known = {table.name for table in metadata.sorted_tables}
    found = MetaData()
    # Only tables of this program: others may share the database. A table of an older schema has the same name.
    found.reflect(connection, only=lambda name, _: name in known and name not in LEFT_OUT)
    return found.sorted_tables


def _refuse_foreign(connection: Connection) -> None:
    there = set(inspect(connection).get_table_names())
    ours = sorted(there & {table.name for table in metadata.sorted_tables})
    if ours and _VERSIONS not in there:
        raise Conflict(f"cannot restore into this database: another program has the table {ours[0]} in it")
    migrating.refuse_newer(connection)


def _refuse_connected(connection: Connection) -> None:
    if connection.dialect.name != "postgresql":
        return
    others = connection.execute(
        text(
            "select count(*) from pg_stat_activity where datname = current_database() and usename = current_user "
            "and pid <> pg_backend_pid() and backend_type = 'client backend'"
        )
    ).scalar_one()
    if others:
        raise Conflict(
            f"cannot restore over this database: {others} other connections of its user are open; stop every frontend"
        )


def _portable(value: object) -> object:
    # JSON has no infinity.
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _stored(column: Column[Any], value: object) -> object:
    return float(value) if isinstance(value, str) and isinstance(column.type, sqlalchemy.Float) else value
