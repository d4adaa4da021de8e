"""The real store on SQLite in memory, with the misfortunes of a database in front of it.

One connection and one engine per process, because compiling statements is what costs; each run begins with a copy of
the migrated template. Misfortunes: away (nothing happens), collided (the work is run and rolled back; the real rule
says how often it is tried), unknown (committed, and the caller hears an error), slow.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar, cast

from msgspec import Struct
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from tests.sim.loop import PROCESS, SimLoop
from tests.sim.rows import Changed, Changes, add_triggers
from tests.sim.shortcut import Shortcut

from enginehouse.store.attempts import Attempt
from enginehouse.store.db import Connection, Store, StorePool
from enginehouse.store.engines import StoreEngines
from enginehouse.store.limits import StoreLimits

T = TypeVar("T")
Committed = Callable[[str, list[Changed], bool], None]  # by whom, what, and whether it was confirmed
AT_ONCE = StoreLimits(pause_seconds=0.0)  # a transaction that collided is tried again without a pause
EPOCH = 1_700_000_000.0  # of the store's clock: any time that looks like one


class StoreWeather(Struct):
    """What may go wrong now. `away_for` names processes; "" among them means all."""

    collision_rate: float = 0.0
    unknown_rate: float = 0.0
    away_for: set[str] = set()


class Database:
    """The template, its one live copy, and what changes in it."""

    def __init__(self) -> None:
        loop = SimLoop(Random(0))
        self.engine: Engine = loop.run_until_complete(Store.open("sqlite://"))._engine
        loop.end()
        self.changes = Changes()
        # The pool keeps one connection per thread, and everything runs in this one.
        with contextlib.closing(self.engine.raw_connection()) as pooled:
            driver = pooled.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        self.connection: sqlite3.Connection = driver
        add_triggers(self.connection)
        self._template = sqlite3.connect(":memory:")
        self.connection.backup(self._template)
        self.changes.watch(self.connection)
        self.library: Connection = self.engine.connect()
        self.library.begin()
        self.connection.execute("commit")
        self.held: Connection = cast(Connection, Shortcut(self.library, self.connection))

    def begin_run(self, loop: SimLoop) -> None:
        """With a fresh copy, and with the time of the loop as the store's clock."""
        self._template.backup(self.connection)
        self.connection.create_function("store_now", 0, lambda: EPOCH + loop.time())
        self.changes.take()


_databases: list[Database] = []


def database() -> Database:
    """The one of this process."""
    if not _databases:
        _databases.append(Database())
    return _databases[0]


class SimStore(Store):
    """The real methods, with the rule for collisions; only the engine under it is this one."""

    def __init__(
        self,
        source: Database,
        weather: StoreWeather,
        chance: Random,
        committed: Callable[[str, list[Changed], bool], None],
    ) -> None:
        super().__init__(StoreEngines(cast(Engine, _SimEngine(source, weather, chance)), None), AT_ONCE)
        self._source = source
        self._weather = weather
        self._chance = chance
        self._committed = committed

    async def read(self, work: Callable[[Connection], T]) -> T:
        return await super().read(self._reading_only(work))

    async def look(self, work: Callable[[Connection], T]) -> T:
        return await super().look(self._reading_only(work))

    def _reading_only(self, work: Callable[[Connection], T]) -> Callable[[Connection], T]:
        """Here reads have the connection of transactions, so that nothing else would refuse a write."""

        def checked(connection: Connection) -> T:
            before = self._source.connection.total_changes
            result = work(connection)
            assert self._source.connection.total_changes == before, "a read has written"
            return result

        return checked

    def _run(self, pool: StorePool, work: Callable[[Connection], T], attempt: Attempt) -> T:
        weather = self._weather
        who = PROCESS.get().name
        if weather.away_for and ("" in weather.away_for or who in weather.away_for):
            raise _lost("the server is away")
        result = super()._run(pool, work, attempt)
        changed = self._source.changes.take()
        is_unknown = weather.unknown_rate > 0.0 and self._chance.random() < weather.unknown_rate
        if changed:
            self._committed(who, changed, not is_unknown)
        if is_unknown:
            raise _lost("the connection ended before the commit was confirmed")
        return result


class _SimEngine:
    """As much of an engine as the store needs: transactions on the one connection. They are begun and ended below the
    library, which believes itself in one all the time: its own way of beginning is a tenth of a run's cost.
    """

    def __init__(self, source: Database, weather: StoreWeather, chance: Random) -> None:
        self.dialect = source.engine.dialect
        self._source = source
        self._weather = weather
        self._chance = chance

    @contextlib.contextmanager
    def begin(self) -> Iterator[Connection]:
        source, weather = self._source, self._weather
        source.connection.execute("begin")
        try:
            yield source.held
            if weather.collision_rate and self._chance.random() < weather.collision_rate:
                raise OperationalError("", {}, _Collision("another transaction was in the way"))
        except BaseException:
            source.connection.execute("rollback")
            source.changes.take()
            raise
        source.connection.execute("commit")


class _Collision(sqlite3.OperationalError):
    sqlstate = "40001"  # as PostgreSQL says it


def _lost(reason: str) -> OperationalError:
    return OperationalError("", {}, sqlite3.OperationalError(reason))
