"""Connections to SQLite and PostgreSQL. Every driver default is set explicitly.

All differences between the two databases are here. Each connection is registered with the attempt of its thread before
the first statement, so that it can be shut down while it hangs.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import Any

import psycopg
import sqlalchemy
from sqlalchemy import Connection, Engine, event
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError

from enginehouse.core.errors import Invalid
from enginehouse.store.attempts import Attempt, Driver, GivenUp
from enginehouse.store.clock import StoreClock
from enginehouse.store.limits import KEEPALIVE_IDLE_SECONDS, StoreLimits

# SQLite has one writer, so with one thread our own transactions queue instead of colliding.
SQLITE_THREADS = 1
POSTGRES_THREADS = 8
_WAL_TRIES = 50


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


def make_engine(url: str, limits: StoreLimits, holding: Holding, clock: StoreClock) -> Engine:
    for plain in ("postgresql://", "postgres://"):
        if url.startswith(plain):
            url = "postgresql+psycopg://" + url.removeprefix(plain)
    try:
        return (_sqlite if url.startswith("sqlite") else _postgres)(url, limits, holding, clock)
    except (ArgumentError, ValueError) as error:
        # The library's message is not shown: it contains the URL, and with it the password.
        raise Invalid(
            "cannot use the database URL: it must look like postgresql://user:password@host:5432/name or "
            "sqlite:////path/of/file.db",
            code="invalid_setting",
            param="database_url",
        ) from error


def _sqlite(url: str, limits: StoreLimits, holding: Holding, clock: StoreClock) -> Engine:
    engine = sqlalchemy.create_engine(url)
    engine.dialect.statement_compiler = _WithHints

    def prepare(connection: sqlite3.Connection, _record: object) -> None:
        # The driver must not open transactions itself. `begin_immediate` does, so that a transaction which reads first
        # and then writes cannot fail half-way.
        connection.isolation_level = None
        connection.create_function("store_now", 0, clock.now)
        cursor = connection.cursor()
        # For a second process on the same file, such as a backup or a shell; our own transactions never collide.
        cursor.execute(f"pragma busy_timeout={limits.statement_milliseconds}")
        _switch_to_wal(cursor)
        # FULL: an acknowledged commit survives a power cut.
        cursor.execute("pragma synchronous=full")
        cursor.execute("pragma foreign_keys=on")
        cursor.close()

    def begin_immediate(connection: Connection) -> None:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        holding.note(driver)
        connection.exec_driver_sql("begin immediate")

    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", begin_immediate)
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


def _postgres(url: str, limits: StoreLimits, holding: Holding, _clock: StoreClock) -> Engine:
    engine = sqlalchemy.create_engine(
        url,
        pool_size=POSTGRES_THREADS,
        max_overflow=0,
        pool_timeout=limits.answer_seconds,  # never reached: there are as many connections as threads
        pool_pre_ping=True,  # a restarted server costs one extra round trip instead of a failed request
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
        except (psycopg.Error, GivenUp):
            connection.close()
            raise

    really_ping = engine.dialect.do_ping

    def ping(connection: Any) -> bool:
        # The ping is the first statement on a pooled connection, and it may hang on a frozen server as well.
        holding.note(connection)
        return really_ping(connection)

    engine.dialect.do_ping = ping  # type: ignore[method-assign, assignment]
    event.listen(engine, "connect", prepare)
    return engine
