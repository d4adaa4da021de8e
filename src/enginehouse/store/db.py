"""The database: `transaction(work)`, and `look(work)` and `read(work)` for what only reads. `work` is a synchronous
function of a connection and runs in a thread.

A transaction therefore cannot contain an await. SQLite and PostgreSQL are equal; their differences are in `engines`.
Each of the three methods has threads and connections of its own, so that a long list delays no lease. Every database
failure leaves here as `Unavailable` (`store_unavailable`) within a limit. A request is accepted only after its commit,
and a refused one is never committed later. The log has one line when the database becomes unavailable and one when it
is back, for any number of failed transactions. A failed read does not make it unavailable, because a read may be slow
by itself; and a read that works proves only of a server that it is back: it may read a file that another program keeps
us from writing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.store import migrating
from enginehouse.store.attempts import Attempt
from enginehouse.store.clock import StoreClock
from enginehouse.store.engines import POSTGRES_THREADS, SQLITE_THREADS, Holding, StoreEngines, make_engines, make_gate
from enginehouse.store.limits import COMMIT_SECONDS, MIGRATION_SECONDS, StoreLimits

__all__ = ["Connection", "Store", "now"]  # the connection type belongs to SQLAlchemy, which only the store imports

T = TypeVar("T")
log = logging.getLogger(__name__)

_TRIES = 5  # of two colliding transactions one succeeds; the other may collide with it again before it ends
_PROBES = 2  # attempts at once while the database is away
_READ_PROBES = 1
_USEFUL_PART = 0.25  # of the limit, that an attempt must have left
# Serialization failure, deadlock, lock timeout.
_COLLISIONS = frozenset({"40001", "40P01", "55P03"})
_TOO_SLOW = "57014"  # the server cancelled a statement, so it is available
_READ_ONLY = "25006"
_DISK_FULL = "53100"
_FULL_SECONDS = 30.0  # heartbeats are stored every second, so a disk that is still full is noticed again
# SQLSTATE classes that mean the server is unavailable: connection errors, too many connections, operator intervention.
# A full disk is not one of them, because reads still work.
_AWAY_CLASSES = ("08", "57", "53300")
_READABLE_WORDS = ("disk is full", "readonly", "disk i/o error")  # SQLite gives no code for these
_QUIET_SECONDS = 60.0  # the same failure is logged once within this time
_MOST_LOGGED = 100
# Failures that a retry cannot fix. The driver gives no code for a failed connect, only the server's text.
_HOPELESS_WORDS = (
    *("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied"),
    *("permission denied", "invalid", "unable to open database file", "not a database", "readonly"),
)
MIGRATION_LOCK = 7_301_004  # any fixed number: frontends that start together migrate one after another
_FIRST_WAIT_SECONDS = 0.2  # between two attempts to reach the database at startup
_LONGEST_WAIT_SECONDS = 2.0


_OPEN = nullcontext()


def _nothing() -> None:
    pass


class StorePool:
    """The threads and connections for one kind of work. No other kind waits for them."""

    def __init__(
        self, name: str, engine: Engine, threads: int, probes: int, gate: AbstractContextManager[None] = _OPEN
    ) -> None:
        self.engine = engine
        self.gate = gate
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix=f"store-{name}")
        self.probes = asyncio.Semaphore(probes)


class Store:
    def __init__(
        self, engines: StoreEngines, limits: StoreLimits | None = None, holding: Holding | None = None
    ) -> None:
        self._engine = engines.steering
        self._limits = limits or StoreLimits()
        self._holding = holding or Holding()
        self._is_server = self._engine.dialect.name != "sqlite"
        threads = POSTGRES_THREADS if self._is_server else SQLITE_THREADS
        self._steering = self._looking = self._reading = StorePool("steering", self._engine, threads.steering, _PROBES)
        if engines.reading is not None:
            gate = make_gate(engines.reading)
            self._looking = StorePool("looking", engines.reading, threads.looking, _READ_PROBES, gate)
            self._reading = StorePool("reading", engines.reading, threads.reading, _READ_PROBES, gate)
        self._under_way: set[Attempt] = set()
        self._away_since: float | None = None
        self._back_at = -math.inf
        self._full_at = -math.inf
        self._logged_at: dict[str, float] = {}  # when each failure was last seen
        self.on_back: Callable[[], None] = _nothing  # called when the database is available again

    @classmethod
    async def open(cls, url: str, limits: StoreLimits | None = None) -> Store:
        """Connect and migrate the schema to the newest revision.

        `url` is a SQLAlchemy URL or a plain `postgresql://…`. A database that is away is waited for within the limits.
        """
        limits, holding, clock = limits or StoreLimits(), Holding(), StoreClock()
        store = cls(make_engines(url, limits, holding, clock), limits, holding)
        running, pause = asyncio.get_running_loop(), _FIRST_WAIT_SECONDS
        deadline = running.time() + limits.start_seconds
        while True:
            try:
                prepare = partial(store._prepare, clock)
                await store._attempt(store._steering, prepare, 2 * MIGRATION_SECONDS)
                return store
            except (SQLAlchemyError, OSError) as error:
                reason = _first_line(error)
                if not _may_heal(error) or running.time() + pause > deadline:
                    store.close()
                    raise Unavailable(f"cannot open the database: {reason}", code="store_unavailable") from error
                if pause == _FIRST_WAIT_SECONDS:
                    log.warning("store.waiting limit_seconds=%g error=%s", limits.start_seconds, reason)
            except (asyncio.CancelledError, EnginehouseError):
                store.close()
                raise
            await asyncio.sleep(pause)
            pause = min(_LONGEST_WAIT_SECONDS, 2 * pause)

    @property
    def is_away(self) -> bool:
        """Whether the most recent transaction found the database unavailable."""
        return self._away_since is not None

    @property
    def is_full(self) -> bool:
        """Whether the disk of the database was full a moment ago; reads go on."""
        return asyncio.get_running_loop().time() - self._full_at < _FULL_SECONDS

    async def transaction(self, work: Callable[[Connection], T]) -> T:
        """Run `work` in one transaction: commit when it returns, roll back when it raises.

        `work` is retried after a collision with another transaction: it must have no effects outside of it.
        """
        return await self._answer(self._steering, work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run `work`, which must only read, apart from all transactions: for whatever is shown to somebody, however
        long it is.

        It sees one moment of the database: everything that was committed when it began, so also what its caller has
        stored before. That moment is over when it returns, so nothing may be written because of it. What decides and
        then writes is one `transaction`, which reads again what it decides by. Reads wait for each other; a loop uses
        `look`.
        """
        return await self._answer(self._reading, work)

    async def look(self, work: Callable[[Connection], T]) -> T:
        """`read` for the loops of this frontend: short, one after another, and not behind the reads of callers, of
        whom there may be any number.
        """
        return await self._answer(self._looking, work)

    async def _answer(self, pool: StorePool, work: Callable[[Connection], T]) -> T:
        began = asyncio.get_running_loop().time()
        try:
            attempt = self._attempt if self._away_since is None else self._probe
            result = await attempt(pool, lambda attempt: self._run(pool, work, attempt), self._limits.answer_seconds)
        except DataError as error:
            # A retry cannot help: the earlier validation accepted a value that does not fit its column.
            log.warning("store.refused error=%s", _first_line(error))
            raise Hopeless("cannot store this: a value does not fit its column. See the frontend's log") from error
        except (DBAPIError, PoolTimeout, TimeoutError) as error:
            is_read = pool is not self._steering
            if is_read and _is_write(error):
                raise Hopeless("cannot write to the database here: this was to be a read") from error
            if is_full_disk(error):
                self._full_at = asyncio.get_running_loop().time()
                self._log_seldom("store.failed", error)
                # The code of every other outage of the store: whoever handles those handles this one too.
                raise Unavailable(
                    "cannot store anything: the disk of the database is full. Free some space on the server",
                    code="store_unavailable",
                ) from error
            # What began before the database was back failed by what was before.
            if began >= self._back_at:
                (self._note_failed_read if is_read else self._note_failure)(error)
            unavailable = Unavailable(
                "cannot use the database: it is unavailable. Try again in a moment", code="store_unavailable"
            )
            unavailable.retry_after_seconds = 2.0
            raise unavailable from error
        if self._away_since is not None and (pool is self._steering or self._is_server):
            self._note_back(self._away_since)
        return result

    async def _probe(self, pool: StorePool, work: Callable[[Attempt], T], limit_seconds: float) -> T:
        """An attempt while the database is away. Few at once: each is a connection that a frozen server has to answer
        when it goes on, and it takes only so many.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.timeout(limit_seconds):
            await pool.probes.acquire()
        try:
            left = limit_seconds - (clock() - began)
            if left < limit_seconds * _USEFUL_PART and self._away_since is not None:
                raise TimeoutError(f"no answer within {limit_seconds:g} s")
            return await self._attempt(pool, work, limit_seconds if self._away_since is None else left)
        finally:
            pool.probes.release()

    async def _attempt(self, pool: StorePool, work: Callable[[Attempt], T], limit_seconds: float) -> T:
        """Raise `TimeoutError` after the limit; the work is then never committed."""
        attempt = Attempt()
        running = asyncio.get_running_loop()
        # `wait` does not cancel the future: after a freeze of the process, the outcome and the timeout arrive at the
        # same moment, and the outcome must win.
        outcome = running.run_in_executor(pool.threads, self._perform, work, attempt)
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

    def _run(self, pool: StorePool, work: Callable[[Connection], T], attempt: Attempt) -> T:
        for left in reversed(range(_TRIES)):
            try:
                with pool.gate, pool.engine.begin() as connection:
                    result = work(connection)
                    attempt.begin_commit()
                return result
            except DBAPIError as error:
                if not left or not _collided(error):
                    raise
                # Runs in a thread of the store. The random delay keeps the same two transactions from colliding again.
                time.sleep(random.uniform(0.0, self._limits.pause_seconds * (_TRIES - left)))
                attempt.begin_again()
        raise AssertionError("unreachable: the last try returns or raises")

    def _note_failure(self, error: Exception) -> None:
        if not _is_away(error):
            self._log_seldom("store.failed", error)
        elif self._away_since is None:
            self._away_since = asyncio.get_running_loop().time()
            log.warning("store.lost error=%s", _first_line(error))

    def _note_failed_read(self, error: Exception) -> None:
        """If the database is away, the next transaction finds that out."""
        if self._away_since is None:
            self._log_seldom("store.slow" if isinstance(error, TimeoutError) else "store.failed", error)

    def _log_seldom(self, what: str, error: Exception) -> None:
        # The database's message names tables and hosts, so it goes to the log only.
        reason, now = _first_line(error), asyncio.get_running_loop().time()
        last = self._logged_at.pop(reason, -_QUIET_SECONDS)
        self._logged_at = {**dict(list(self._logged_at.items())[-_MOST_LOGGED:]), reason: now}
        if now - last >= _QUIET_SECONDS:
            log.warning("%s error=%s", what, reason)

    def _note_back(self, since: float) -> None:
        self._away_since, self._back_at = None, asyncio.get_running_loop().time()
        log.warning("store.recovered lost_seconds=%.1f", asyncio.get_running_loop().time() - since)
        self.on_back()

    def close(self) -> None:
        """Transactions under way get the usual limit to finish; then they are cut off."""
        deadline = time.monotonic() + self._limits.answer_seconds
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.01)  # the program is ending, so blocking is fine
        for attempt in tuple(self._under_way):
            attempt.cut()
        for pool in (self._reading, self._looking, self._steering):
            pool.threads.shutdown(cancel_futures=True)
            pool.engine.dispose()

    def _prepare(self, clock: StoreClock, attempt: Attempt) -> None:
        is_postgres = self._engine.dialect.name == "postgresql"
        with self._engine.connect() as connection:
            if is_postgres:
                # A separate session, closed afterwards: changing a large table may take long.
                connection.detach()
                connection.execute(text("set statement_timeout = 0"))
                # On a busy machine, the pause between two statements may exceed the limit for requests.
                idle = int(1000 * MIGRATION_SECONDS)
                connection.execute(text(f"set idle_in_transaction_session_timeout = {idle}"))
                connection.commit()
                _wait_for_migration_lock(connection)
            migrating.refuse_newer(connection)
            migrating.upgrade(connection)
            attempt.begin_commit()
            connection.commit()
            if not is_postgres:
                clock.anchor(connection)
                connection.commit()


def _wait_for_migration_lock(connection: Connection) -> None:
    """Poll for the lock, because a role may have a lock timeout. The lock belongs to the session."""
    deadline = time.monotonic() + MIGRATION_SECONDS
    while not connection.execute(text("select pg_try_advisory_lock(:key)"), {"key": MIGRATION_LOCK}).scalar_one():
        connection.commit()
        if time.monotonic() > deadline:
            raise OSError(f"the migration lock was held by another frontend for {MIGRATION_SECONDS:.0f} s")
        time.sleep(0.05)  # in a thread of the store, not on the event loop
    connection.commit()


def now(connection: Connection) -> float:
    """The store's clock. Leases, heartbeats and due times are compared with it on every machine."""
    value = connection.exec_driver_sql(_NOW[connection.dialect.name]).scalar_one()
    return float(value)


CLOCK = {
    "sqlite": "store_now()",
    "postgresql": "extract(epoch from clock_timestamp())",
}
_NOW = {dialect: f"select {clock}" for dialect, clock in CLOCK.items()}


def _sqlstate(error: BaseException) -> str:
    return str(getattr(getattr(error, "orig", None), "sqlstate", None) or "")


def _collided(error: DBAPIError) -> bool:
    """Whether another transaction was in the way: a deadlock, or the same row inserted at the same time."""
    return isinstance(error, IntegrityError) or _sqlstate(error) in _COLLISIONS


def _is_away(error: Exception) -> bool:
    """Whether the database is unavailable, as opposed to a failure of this transaction."""
    state = _sqlstate(error)
    if isinstance(error, PoolTimeout | TimeoutError):
        return True
    if not state:
        words = _first_line(error).lower()
        return isinstance(error, OperationalError) and not any(word in words for word in _READABLE_WORDS)
    return state.startswith(_AWAY_CLASSES) and state != _TOO_SLOW


def is_full_disk(error: Exception) -> bool:
    return _sqlstate(error) == _DISK_FULL or (isinstance(error, DBAPIError) and "disk is full" in _first_line(error))


def _is_write(error: Exception) -> bool:
    """Whether a connection for reads refused to write."""
    return _sqlstate(error) == _READ_ONLY or "readonly database" in _first_line(error)


def _may_heal(error: Exception) -> bool:
    """Whether opening the database may succeed on a retry: it is recovering, or its machine is starting."""
    words = _first_line(error).lower()
    if any(word in words for word in _HOPELESS_WORDS):
        return False
    return isinstance(error, OSError) or _is_away(error) or _sqlstate(error) in _COLLISIONS


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
