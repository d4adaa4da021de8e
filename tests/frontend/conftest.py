"""A world per test, on a fresh SQLite file, with the store's clock in the test's hand."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.frontend.world import Time, WatchedStore, World

from enginehouse.store import db
from enginehouse.store.db import Connection


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    real = db.now

    def now(connection: Connection) -> float:
        return real(connection) + made.passed

    monkeypatch.setattr(db, "now", now)
    return made


@pytest.fixture
async def world(sqlite_url: str, time: Time) -> AsyncIterator[World]:
    store = await WatchedStore.open(sqlite_url)
    assert isinstance(store, WatchedStore)
    made = World(store, time)
    await made.start()
    yield made
    store.close()
