"""The database: one method, `transaction(work)`, with `work` a synchronous function of a connection, run in a thread.

A transaction therefore cannot contain an await. SQLite and PostgreSQL are equals: whatever differs between them stands
in `engines`. Every failure of the database leaves here as `Unavailable` (`store_unavailable`) within a limit; nothing
is accepted that was not committed, and nothing that was refused is committed later. One line tells that the database
is away and one that it is back, however many ask meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from enginehouse.core.errors import Hopeless, Unavailable
from enginehouse.store.attempts import Attempt
from enginehouse.store.clock import StoreClock
from enginehouse.store.engines import POSTGRES_THREADS, SQLITE_THREADS, Holding, make_engine
from enginehouse.store.limits import COMMIT_SECONDS, MIGRATION_SECONDS, StoreLimits

__all__ = ["Connection", "Store", "StoreLimits", "now"]

T = TypeVar("T")
log = logging.getLogger(__name__)

_TRIES = 5  # of two transactions that collide one goes through; the other may meet it once more before it is done
_PAUSE_SECONDS = 0.02  # longer than a transaction takes
# Serialization failure, deadlock, a lock not given within the limit.
_COLLISIONS = frozenset({"40001", "40P01", "55P03"})
_TOO_SLOW = "57014"  # the server ended a statement of its own accord: it is there
# Errors that say that the server is not to be used now: connections, too many of them, its operator. A full disk is
# none of them: what only reads goes on.
_AWAY_CLASSES = ("08", "57", "53300")
_READABLE_WORDS = ("disk is full", "readonly", "disk i/o error")  # of SQLite, which has no codes here
_QUIET_SECONDS = 60.0  # within which the same failure is not told again
_MOST_TOLD = 100
# What no waiting heals. The driver gives no code for what ends the opening of a connection, only the server's words.
_HOPELESS_WORDS = (
    *("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied"),
    *("permission denied", "invalid", "unable to open database file", "not a database", "readonly"),
)
_migrating = threading.Lock()
MIGRATION_LOCK = 7_301_004  # any fixed number: frontends that start at once migrate one after another
_FIRST_WAIT_SECONDS = 0.2  # between two looks for a database that is not there yet
_LONGEST_WAIT_SECONDS = 2.0


def _nothing() -> None:
    pass


class Store:
    def __init__(self, engine: Engine, limits: StoreLimits | None = None, holding: Holding | None = None) -> None:
        self._engine = engine
        self._limits = limits or StoreLimits()
        self._holding = holding or Holding()
        threads = SQLITE_THREADS if engine.dialect.name == "sqlite" else POSTGRES_THREADS
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="store")
        self._under_way: set[Attempt] = set()
        self._away_since: float | None = None
        self._told: dict[str, float] = {}  # when each failure was last seen
        self.on_back: Callable[[], None] = _nothing  # the database answers again after it was away

    @classmethod
    async def open(cls, url: str, limits: StoreLimits | None = None) -> Store:
        """Connect and bring the schema to its newest form. `url` is a SQLAlchemy URL, or `postgresql://…` as people
        write it. A database that is not there yet is waited for as long as the limits say.
        """
        limits, holding, clock = limits or StoreLimits(), Holding(), StoreClock()
        store = cls(make_engine(url, limits, holding, clock), limits, holding)
        running, pause = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
        deadline = running.time() + limits.start_seconds
        while True:
            try:
                await store._attempt(lambda attempt: store._prepare(clock, attempt), 2 * MIGRATION_SECONDS)
                return store
            except (SQLAlchemyError, OSError) as error:
                reason = _first_line(error)
                if not _may_heal(error) or running.time() + pause > deadline:
                    store.close()
                    raise Unavailable(f"cannot open the database: {reason}", code="store_unavailable") from error
                if pause == _FIRST_WAIT_SECONDS:
                    log.warning("store.waiting limit_seconds=%g error=%s", limits.start_seconds, reason)
            except asyncio.CancelledError:
                store.close()
                raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_WAIT_SECONDS, 2 * pause)

    @property
    def is_away(self) -> bool:
        """Whether the last that was heard of the database is that it does not answer."""
        return self._away_since is not None

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction: committed when it returns, rolled back when it raises. It is run again when
        the transaction collided with another one, so it must have no effect but on the connection.
        """
        try:
            result = await self._attempt(lambda attempt: self._run(work, attempt), self._limits.answer_seconds)
        except DataError as error:
            # Trying again cannot help: the checks before this door let something through that no column takes.
            log.warning("store.refused error=%s", _first_line(error))
            raise Hopeless("cannot store this: a value does not fit; the log of the frontend has it") from error
        except (DBAPIError, PoolTimeout, TimeoutError) as error:
            self._note_failure(error)
            unavailable = Unavailable("cannot use the database now: try again in a moment", code="store_unavailable")
            unavailable.retry_after_seconds = 2.0
            raise unavailable from error
        if self._away_since is not None:
            self._note_back(self._away_since)
        return result

    async def _attempt(self, work: Callable[[Attempt], T], limit_seconds: float) -> T:
        """`TimeoutError` after the limit, and then the work is not committed later."""
        attempt = Attempt()
        running = asyncio.get_running_loop()
        # Waited for without being cancelled: a frontend that was frozen finds the outcome and the end of the limit at
        # the same moment, and the outcome is the truth.
        outcome = running.run_in_executor(self._threads, self._perform, work, attempt)
        try:
            done, _ = await asyncio.wait((outcome,), timeout=limit_seconds)
            if not done and not attempt.give_up():
                done, _ = await asyncio.wait((outcome,), timeout=COMMIT_SECONDS)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if done:
            return outcome.result()
        attempt.cut()
        outcome.cancel()
        raise TimeoutError(f"no answer within {limit_seconds:g} s")

    def _perform(self, work: Callable[[Attempt], T], attempt: Attempt) -> T:
        self._holding.attempt = attempt
        self._under_way.add(attempt)
        try:
            return work(attempt)
        finally:
            self._holding.attempt = None
            self._under_way.discard(attempt)
            attempt.end()

    def _run(self, work: Callable[[Connection], T], attempt: Attempt) -> T:
        for left in reversed(range(_TRIES)):
            try:
                with self._engine.begin() as connection:
                    result = work(connection)
                    attempt.begin_commit()
                return result
            except DBAPIError as error:
                if not left or not _collided(error):
                    raise
                # In a thread of the store. Uneven, so that two which collided do not meet again in step.
                time.sleep(random.uniform(0.0, _PAUSE_SECONDS * (_TRIES - left)))
                attempt.begin_again()
        raise AssertionError("unreachable: the last try returns or raises")

    def _note_failure(self, error: Exception) -> None:
        # The database's own words name tables and hosts; they are for the log.
        reason, now = _first_line(error), asyncio.get_running_loop().time()
        if not _is_away(error):
            told = self._told.pop(reason, -_QUIET_SECONDS)
            self._told = {**dict(list(self._told.items())[-_MOST_TOLD:]), reason: now}
            if now - told >= _QUIET_SECONDS:
                log.warning("store.failed error=%s", reason)
        elif self._away_since is None:
            self._away_since = now
            log.warning("store.away error=%s", reason)

    def _note_back(self, since: float) -> None:
        self._away_since = None
        log.warning("store.back away_seconds=%.1f", asyncio.get_running_loop().time() - since)
        self.on_back()

    def close(self) -> None:
        """What is under way has as long as anybody would have waited for it."""
        deadline = time.monotonic() + self._limits.answer_seconds
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)  # the program ends: nothing else is to be done
        for attempt in tuple(self._under_way):
            attempt.cut()
        self._threads.shutdown(cancel_futures=True)
        self._engine.dispose()

    def _prepare(self, clock: StoreClock, attempt: Attempt) -> None:
        is_postgres = self._engine.dialect.name == "postgresql"
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
        # Alembic keeps its context in a global, so within one process only one may migrate at a time.
        with _migrating, self._engine.connect() as connection:
            if is_postgres:
                # A session of its own, closed afterwards: a change of a large table may take long.
                connection.detach()
                connection.execute(text("set statement_timeout = 0"))
                # Between two statements a busy machine may take longer than the others' requests have to wait.
                idle = int(1000 * MIGRATION_SECONDS)
                connection.execute(text(f"set idle_in_transaction_session_timeout = {idle}"))
                connection.commit()
                _wait_for_migration_lock(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            attempt.begin_commit()
            connection.commit()
            if not is_postgres:
                clock.anchor(connection)
                connection.commit()


def _wait_for_migration_lock(connection: Connection) -> None:
    """Asked for again and again instead of waited for: a role may have a limit on waiting for locks. The lock belongs
    to the session, and ends with it.
    """
    deadline = time.monotonic() + MIGRATION_SECONDS
    while not connection.execute(text("select pg_try_advisory_lock(:key)"), {"key": MIGRATION_LOCK}).scalar_one():
        connection.commit()
        if time.monotonic() > deadline:
            raise OSError(f"another frontend has been changing the schema for {MIGRATION_SECONDS:.0f} s")
        time.sleep(0.05)  # in a thread of the store, never on the event loop
    connection.commit()


def now(connection: Connection) -> float:
    """The store's clock: what leases, heartbeats and waits are judged by, on whichever machine the question comes
    from.
    """
    value = connection.exec_driver_sql(_NOW[connection.dialect.name]).scalar_one()
    return float(value)


_NOW = {
    "sqlite": "select store_now()",
    "postgresql": "select extract(epoch from clock_timestamp())",
}


def _sqlstate(error: BaseException) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")


def _collided(error: DBAPIError) -> bool:
    """Whether another transaction was in the way: a deadlock, or the same row inserted at the same time."""
    return isinstance(error, IntegrityError) or _sqlstate(error) in _COLLISIONS


def _is_away(error: Exception) -> bool:
    """Whether it is the database that is not to be used now, rather than this one transaction."""
    state = _sqlstate(error)
    if isinstance(error, PoolTimeout | TimeoutError):
        return True
    if not state:
        words = _first_line(error).lower()
        return isinstance(error, OperationalError) and not any(word in words for word in _READABLE_WORDS)
    return state.startswith(_AWAY_CLASSES) and state != _TOO_SLOW


def _may_heal(error: Exception) -> bool:
    """Whether a database that could not be opened may be there in a moment: it recovers, or its machine starts."""
    words = _first_line(error).lower()
    if any(word in words for word in _HOPELESS_WORDS):
        return False
    return isinstance(error, OSError) or _is_away(error) or _sqlstate(error) in _COLLISIONS


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
