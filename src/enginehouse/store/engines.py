"""Connections to SQLite and PostgreSQL. Every driver default is set explicitly.

All differences between the two databases are here. Each connection is registered with the attempt of its thread before
the first statement, so that it can be shut down while it hangs. Connections for reads cannot write: the database
refuses it. On both databases their transactions see one moment, wait for no writer and delay none.
"""

from __future__ import annotations

import select
import sqlite3
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import sqlalchemy
from msgspec import Struct
from sqlalchemy import Connection, Engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError

from enginehouse.core.errors import Invalid
from enginehouse.store.attempts import Attempt, Driver, GivenUp
from enginehouse.store.clock import StoreClock
from enginehouse.store.limits import KEEPALIVE_IDLE_SECONDS, StoreLimits
from enginehouse.store.read_gate import KEPT_LOG_BYTES, ReadGate

if TYPE_CHECKING:
    import psycopg

_WAL_TRIES = 50


class StoreThreads(Struct, frozen=True):
    """Threads per kind of work. On PostgreSQL each has a connection, so a frontend has at most their sum."""

    steering: int
    looking: int  # one: the looks of loops are short, and in order none is older than the one before
    reading: int

    @property
    def all_that_read(self) -> int:
        return self.looking + self.reading


# SQLite has one writer, so with one thread our own transactions queue instead of colliding. More threads for reads
# would not read faster: decoding rows takes most of the time, and the interpreter runs one thread at a time.
SQLITE_THREADS = StoreThreads(steering=1, looking=1, reading=2)
# Eight in all: a server takes only so many connections, and operators have counted on that number.
POSTGRES_THREADS = StoreThreads(steering=5, looking=1, reading=2)


class Holding(threading.local):
    """The attempt that this thread works for."""

    attempt: Attempt | None = None

    def note(self, connection: Driver) -> None:
        if self.attempt is not None:
            self.attempt.hold(connection)


class _WithHints(SQLiteCompiler):
    """Emits SQLite's table hints (`INDEXED BY …`), which SQLAlchemy omits."""

    def get_from_hint_text(self, table: object, text: str | None) -> str | None:
        return text


class _WithoutLocks(_WithHints):
    """Refuses row locks, which SQLite ignores: PostgreSQL refuses them in a read, and both must do the same."""

    def for_update_clause(self, select: object, **options: object) -> NoReturn:
        raise sqlalchemy.exc.CompileError("a read cannot lock rows")


class StoreEngines(Struct, frozen=True):
    """`reading` is None for a database in memory, which only its one connection can see."""

    steering: Engine
    reading: Engine | None


def make_engines(url: str, limits: StoreLimits, holding: Holding, clock: StoreClock) -> StoreEngines:
    for plain in ("postgresql://", "postgres://"):
        if url.startswith(plain):
            url = "postgresql+psycopg://" + url.removeprefix(plain)
    try:
        if not url.startswith("sqlite"):
            return StoreEngines(
                _postgres(url, limits, holding, POSTGRES_THREADS.steering),
                _postgres(url, limits, holding, POSTGRES_THREADS.all_that_read, reads=True),
            )
        steering = _sqlite(url, limits, holding, clock)
        is_in_memory = steering.url.database in (None, "", ":memory:")
        return StoreEngines(steering, None if is_in_memory else _sqlite(url, limits, holding, clock, reads=True))
    except (ArgumentError, ValueError) as error:
        # The library's message is not shown: it contains the URL, and with it the password.
        raise Invalid(
            "cannot use the database URL: it must look like postgresql://user:password@host:5432/name or "
            "sqlite:////path/of/file.db",
            code="invalid_setting",
            param="database_url",
        ) from error


def make_gate(reading: Engine) -> AbstractContextManager[None]:
    """What every read passes; on PostgreSQL nothing."""
    if reading.dialect.name != "sqlite":
        return nullcontext()
    return ReadGate(Path(f"{reading.url.database}-wal"))


def _sqlite(url: str, limits: StoreLimits, holding: Holding, clock: StoreClock, *, reads: bool = False) -> Engine:
    engine = sqlalchemy.create_engine(url)
    engine.dialect.statement_compiler = _WithoutLocks if reads else _WithHints
    # A transaction that reads first and then writes must not fail half-way, so it takes the file's one lock at once. A
    # read takes none: it sees the last commit before its first statement, while others write.
    beginning = "begin" if reads else "begin immediate"

    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # The driver must not open transactions itself; `begin` does.
        connection.isolation_level = None
        connection.create_function("store_now", 0, clock.now)
        cursor = connection.cursor()
        # For a second process on the same file, such as a backup or a shell; our own transactions never collide.
        cursor.execute(f"pragma busy_timeout={limits.statement_milliseconds}")
        _switch_to_wal(cursor)
        # FULL: an acknowledged commit survives a power cut.
        cursor.execute("pragma synchronous=full")
        cursor.execute("pragma foreign_keys=on")
        cursor.execute(f"pragma journal_size_limit={KEPT_LOG_BYTES}")
        if reads:
            cursor.execute("pragma query_only=on")
        cursor.close()

    def begin(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        holding.note(driver)
        connection.exec_driver_sql(beginning)

    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin)
    return engine


def _switch_to_wal(cursor: sqlite3.Cursor) -> None:
    """Retry the one statement that `busy_timeout` does not cover: two processes may open a new file at once."""
    for attempt in range(1, _WAL_TRIES + 1):
        try:
            cursor.execute("pragma journal_mode=wal")
            return
        except sqlite3.OperationalError:
            if attempt == _WAL_TRIES:
                raise
            time.sleep(0.02)  # in a thread of the store, not on the event loop


def _postgres(url: str, limits: StoreLimits, holding: Holding, threads: int, *, reads: bool = False) -> Engine:
    import psycopg

    engine = sqlalchemy.create_engine(
        url,
        pool_size=threads,
        max_overflow=0,
        pool_timeout=limits.answer_seconds,  # never reached: there are as many connections as threads
        pool_pre_ping=True,  # a restarted server costs a new connection instead of a failed request
        connect_args={
            "connect_timeout": limits.connect_seconds,
            "keepalives_idle": KEEPALIVE_IDLE_SECONDS,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": limits.unacknowledged_milliseconds,
        },
    )

    # A limit set for the role by the operator takes precedence.
    server_limits = {
        "statement_timeout": limits.statement_milliseconds,
        "lock_timeout": limits.lock_milliseconds,
        "idle_in_transaction_session_timeout": limits.idle_milliseconds,
    }

    def prepare(connection: psycopg.Connection, _record: object) -> None:
        try:
            holding.note(connection)
            # Not as a connection option: poolers in between reject those.
            for name, value in server_limits.items():
                query = f"select set_config('{name}', '{value}', false) where current_setting('{name}') = '0'"
                connection.execute(query.encode())
            connection.commit()
            if reads:
                # Part of every `begin`, so that it holds behind poolers too, which forget what a session was told.
                connection.read_only = True
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        except (psycopg.Error, GivenUp):
            connection.close()
            raise

    really_ping = engine.dialect.do_ping

    def ping(connection: Any) -> bool:
        # The ping is the first statement on a pooled connection, and it may hang on a frozen server as well.
        holding.note(connection)
        # A server that has ended a connection has said so on it. While it has said nothing, a ping would only cost
        # every transaction a round trip.
        return not _has_said_something(connection) or really_ping(connection)

    engine.dialect.do_ping = ping  # type: ignore[method-assign, assignment]
    event.listen(engine, "connect", prepare)
    return engine


def _has_said_something(connection: psycopg.Connection) -> bool:
    """Whether the server has sent something unasked on a connection, such as its end. A closed one counts."""
    if connection.closed:
        return True
    ready = select.poll()
    ready.register(connection.fileno(), select.POLLIN)
    return bool(ready.poll(0))
