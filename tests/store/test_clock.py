"""The clock of a store on SQLite: it runs with the machine, not with the wall clock, and never backwards."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.store.test_store import add_node, node

from enginehouse.store import clock, db, leases
from enginehouse.store.db import Connection, Store
from enginehouse.store.schema import nodes

HOURS = 3600.0 * 5
SLACK_SECONDS = 5.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'test.db'}"


def step_wall_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


async def now_of(url: str) -> float:
    store = await Store.open(url)
    try:
        return await store.transaction(db.now)
    finally:
        store.close()


async def test_time_is_what_the_machine_has_counted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(url)
    try:
        assert abs(await store.transaction(db.now) - time.time()) < SLACK_SECONDS
        monkeypatch.setattr(clock, "machine_seconds", lambda: 1_000_000.0)
        first = await store.transaction(db.now)
        monkeypatch.setattr(clock, "machine_seconds", lambda: 1_000_100.0)
        assert await store.transaction(db.now) == first + 100.0
    finally:
        store.close()


@pytest.mark.parametrize("step_seconds", [-HOURS, HOURS])
async def test_a_wall_clock_that_is_set_changes_nothing_in_this_run_nor_in_the_next(
    url: str, monkeypatch: pytest.MonkeyPatch, step_seconds: float
) -> None:
    store = await Store.open(url)
    before = await store.transaction(db.now)

    def take(connection: Connection) -> bool:
        now = db.now(connection)
        return leases.acquire(connection, "duty", "me", now, now + 60.0)

    def steal(connection: Connection) -> bool:
        now = db.now(connection)
        return leases.acquire(connection, "duty", "other", now, now + 60.0)

    assert await store.transaction(take)
    step_wall_clock(monkeypatch, step_seconds)
    assert not await store.transaction(steal), "a lease does not end by the wall clock"
    assert 0 <= await store.transaction(db.now) - before < SLACK_SECONDS
    store.close()
    again = await Store.open(url)
    assert not await again.transaction(steal), "nor does it after a restart"
    assert 0 <= await again.transaction(db.now) - before < SLACK_SECONDS
    again.close()


async def test_two_programs_on_one_file_agree(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await Store.open(url)
    step_wall_clock(monkeypatch, HOURS)
    second = await Store.open(url)
    try:
        times = [await store.transaction(db.now) for store in (first, second, first, second)]
        assert times == sorted(times)
        assert times[-1] - times[0] < SLACK_SECONDS
    finally:
        first.close()
        second.close()


@pytest.mark.parametrize("boot", ["another boot", ""])  # where a boot cannot be told, each start is one
@pytest.mark.parametrize("step_seconds", [-HOURS, HOURS])
async def test_after_a_boot_time_goes_on_from_the_wall_clock_but_never_before_what_is_written(
    url: str, monkeypatch: pytest.MonkeyPatch, step_seconds: float, boot: str
) -> None:
    store = await Store.open(url)
    await add_node(store, node())
    written = await store.transaction(db.now)
    await store.transaction(lambda c: c.execute(nodes.update().values(updated_at=written)))
    store.close()
    monkeypatch.setattr(clock, "boot_id", lambda: boot)
    step_wall_clock(monkeypatch, step_seconds)
    monkeypatch.setattr(clock, "machine_seconds", lambda: 1.0)
    found = await now_of(url)
    assert found >= written
    assert abs(found - (written if step_seconds < 0 else time.time())) < SLACK_SECONDS
