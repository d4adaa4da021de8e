"""The database: one method, `transaction(work)`, with `work` a synchronous function of a connection, run in a thread.

A transaction therefore cannot contain an await. SQLite and PostgreSQL are equals: whatever differs between them
stands in this file. Every failure of the database leaves here as `Unavailable` (`store_unavailable`); nothing is
accepted that was not committed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import psycopg
import sqlalchemy
from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, event, text
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from enginehouse.core.errors import Hopeless, Unavailable

__all__ = ["Connection", "Store", "now"]

T = TypeVar("T")
log = logging.getLogger(__name__)

# SQLite has one writer anyway: one thread means that our own transactions queue instead of colliding.
_SQLITE_THREADS = 1
_POSTGRES_THREADS = 8
_BUSY_MILLISECONDS = 5000  # for a second program on the same file (a backup, a shell); our own never collide
_TRIES = 5  # of two transactions that collide one goes through; the other may meet it once more before it is done
_PAUSE_SECONDS = 0.02  # longer than a transaction takes
# Serialization failure, deadlock, a lock not given within the limit that a role may have.
_COLLISIONS = frozenset({"40001", "40P01", "55P03"})
# A transaction never waits for anything but the database, so one that stands still this long belongs to a frontend that
# is frozen. Its locks must not hold the others up: the server ends it, and it is told so when it wakes.
_FROZEN_MILLISECONDS = 5000
_migrating = threading.Lock()
MIGRATION_SECONDS = 60.0  # to wait for another frontend's; one that hangs for longer needs somebody's look
MIGRATION_LOCK = 7_301_004  # any fixed number: frontends that start at once migrate one after another


class Store:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        threads = _SQLITE_THREADS if engine.dialect.name == "sqlite" else _POSTGRES_THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")

    @classmethod
    async def open(cls, url: str) -> Store:
        """Connect and bring the schema to its newest form. `url` is a SQLAlchemy URL, or `postgresql://…` as people
        write it.
        """
        store = cls(_engine(url))
        try:
            await asyncio.get_running_loop().run_in_executor(store._threads, store._migrate)
        except (SQLAlchemyError, OSError) as error:
            store.close()
            raise Unavailable(f"cannot open the database: {_first_line(error)}", code="store_unavailable") from error
        return store

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction: committed when it returns, rolled back when it raises. It is run again when
        the transaction collided with another one, so it must have no effect but on the connection.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, work)
        except DataError as error:
            # Trying again cannot help: the checks before this door let something through that no column takes.
            log.warning("store.refused error=%s", _first_line(error))
            raise Hopeless("cannot store this: a value does not fit; the log of the frontend has it") from error
        except (DBAPIError, PoolTimeout) as error:
            # The database's own words name tables and hosts; they are for the log.
            log.warning("store.failed error=%s", _first_line(error))
            unavailable = Unavailable("cannot use the database now: try again in a moment", code="store_unavailable")
            unavailable.retry_after_seconds = 2.0
            raise unavailable from error

    def _run(self, work: Callable[[Connection], T]) -> T:
        for left in reversed(range(_TRIES)):
            try:
                with self._engine.begin() as connection:
                    return work(connection)
            except DBAPIError as error:
                if not left or not _collided(error):
                    raise
                # In a thread of the store. Uneven, so that two which collided do not meet again in step.
                time.sleep(random.uniform(0.0, _PAUSE_SECONDS * (_TRIES - left)))
        raise AssertionError("unreachable: the last try returns or raises")

    def close(self) -> None:
        self._threads.shutdown()
        self._engine.dispose()

    def _migrate(self) -> None:
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        # Alembic keeps its context in a global, so within one process only one may migrate at a time.
        with _migrating, self._engine.connect() as connection:
            if self._engine.dialect.name == "postgresql":
                _wait_for_migration_lock(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.commit()
            if self._engine.dialect.name == "postgresql":
                connection.execute(text("select pg_advisory_unlock(:key)"), {"key": MIGRATION_LOCK})
                connection.commit()


def _wait_for_migration_lock(connection: Connection) -> None:
    """Asked for again and again instead of waited for: a role may have a limit on waiting for locks."""
    deadline = time.monotonic() + MIGRATION_SECONDS
    while not connection.execute(text("select pg_try_advisory_lock(:key)"), {"key": MIGRATION_LOCK}).scalar_one():
        connection.commit()
        if time.monotonic() > deadline:
            raise OSError(f"another frontend has been changing the schema for {MIGRATION_SECONDS:.0f} s")
        time.sleep(0.05)  # in a thread of the store, never on the event loop
    connection.commit()  # the lock belongs to the session and outlives this


def now(connection: Connection) -> float:
    """The store's clock: what leases, heartbeats and waits are judged by, on whichever machine the question comes
    from.
    """
    value = connection.exec_driver_sql(_NOW[connection.dialect.name]).scalar_one()
    return float(value)


_NOW = {
    "sqlite": "select (julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "select extract(epoch from clock_timestamp())",
}


class _WithHints(SQLiteCompiler):
    """SQLite has hints for tables (`INDEXED BY …`), which the library leaves out."""

    def get_from_hint_text(self, table: object, text: str | None) -> str | None:
        return text


def _engine(url: str) -> Engine:
    for plain in ("postgresql://", "postgres://"):
        if url.startswith(plain):
            url = "postgresql+psycopg://" + url.removeprefix(plain)
    if url.startswith("sqlite"):
        engine = sqlalchemy.create_engine(url)
        engine.dialect.statement_compiler = _WithHints
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_immediate)
        return engine
    engine = sqlalchemy.create_engine(
        url,
        pool_size=_POSTGRES_THREADS,
        max_overflow=0,
        pool_timeout=5,
        pool_pre_ping=True,  # a restarted server costs one extra round trip, not a failed request
        connect_args={
            "connect_timeout": 5,
            # A server that vanished without a word is noticed within half a minute, not within two hours.
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
        },
    )
    event.listen(engine, "connect", _prepare_postgres)
    return engine


def _prepare_postgres(connection: psycopg.Connection, _record: object) -> None:
    # A limit that the role has already is the operator's, and stays. Not as an option of the connection: poolers that
    # stand between refuse those.
    limit = "idle_in_transaction_session_timeout"
    query = f"select set_config('{limit}', '{_FROZEN_MILLISECONDS}', false) where current_setting('{limit}') = '0'"
    connection.execute(query.encode())
    connection.commit()


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # The driver must not open transactions by itself: `_begin_immediate` does, so that a reader that turns writer
    # cannot fail half-way.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"pragma busy_timeout={_BUSY_MILLISECONDS}")
    _switch_to_wal(cursor)
    # FULL: what was acknowledged as accepted survives a power cut.
    cursor.execute("pragma synchronous=full")
    cursor.execute("pragma foreign_keys=on")
    cursor.close()


def _switch_to_wal(cursor: sqlite3.Cursor) -> None:
    """The one statement that SQLite's own patience does not cover: two programs that open a new file at once."""
    for attempt in range(1, 51):
        try:
            cursor.execute("pragma journal_mode=wal")
            return
        except sqlite3.OperationalError:
            if attempt == 50:
                raise
            time.sleep(0.02)  # in a thread of the store, never on the event loop


def _begin_immediate(connection: Connection) -> None:
    connection.exec_driver_sql("begin immediate")


def _collided(error: DBAPIError) -> bool:
    """Whether another transaction was in the way: a deadlock, or the same row inserted at the same time."""
    return isinstance(error, IntegrityError) or getattr(error.orig, "sqlstate", None) in _COLLISIONS


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
