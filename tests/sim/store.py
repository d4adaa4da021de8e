"""The real store on SQLite in memory, with the misfortunes of a database in front of it.

One connection and one engine per process, because compiling statements is what costs; each run begins with a copy of
the migrated template. Misfortunes: away (nothing happens), collided (the work is run and rolled back, then run again),
unknown (committed, and the caller hears an error), slow.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from random import Random
from typing import TypeVar

from msgspec import Struct
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError
from tests.sim.loop import PROCESS, SimLoop
from tests.sim.rows import Changed, Changes, add_triggers

from enginehouse.store import db
from enginehouse.store.db import Connection, Store

T = TypeVar("T")
Committed = Callable[[str, list[Changed], bool], None]  # by whom, what, and whether it was confirmed
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
        self.held: Connection = self.engine.connect()

    def begin_run(self) -> None:
        self._template.backup(self.connection)
        self.changes.take()


_databases: list[Database] = []


def database() -> Database:
    """The one of this process."""
    if not _databases:
        _databases.append(Database())
    return _databases[0]


class SimStore(Store):
    def __init__(
        self,
        source: Database,
        weather: StoreWeather,
        chance: Random,
        committed: Callable[[str, list[Changed], bool], None],
    ) -> None:
        super().__init__(source.engine)
        self._source = source
        self._weather = weather
        self._chance = chance
        self._committed = committed

    def _run(self, work: Callable[[Connection], T]) -> T:
        weather, chance = self._weather, self._chance
        who = PROCESS.get().name
        if weather.away_for and ("" in weather.away_for or who in weather.away_for):
            raise _lost("the server is away")
        try:
            if weather.collision_rate and chance.random() < weather.collision_rate:
                self._collide(work)
            # Not through the pool, as the real one does: taking a connection from it is a fifth of a run's cost.
            with self._source.held.begin():
                result = work(self._source.held)
        finally:
            changed = self._source.changes.take()
        is_unknown = weather.unknown_rate > 0.0 and chance.random() < weather.unknown_rate
        if changed:
            self._committed(who, changed, not is_unknown)
        if is_unknown:
            raise _lost("the connection ended before the commit was confirmed")
        return result

    def _collide(self, work: Callable[[Connection], object]) -> None:
        with contextlib.suppress(_Again), self._source.held.begin():
            work(self._source.held)
            raise _Again
        self._source.changes.take()


class _Again(Exception):
    """Rolls a transaction back that is run again."""


def _lost(reason: str) -> OperationalError:
    return OperationalError("", {}, sqlite3.OperationalError(reason))


@contextlib.contextmanager
def clock_of(loop: SimLoop) -> Iterator[None]:
    """The store's clock is the loop's while this lasts."""
    real = db.now

    def now(connection: Connection) -> float:
        return EPOCH + loop.time()

    db.now = now
    try:
        yield
    finally:
        db.now = real
