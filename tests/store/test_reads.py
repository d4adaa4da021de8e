"""Reads have threads and connections of their own, on SQLite and on PostgreSQL: no transaction waits for a read, no
read for a writer, and what was given to a read cannot write.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from sqlalchemy.exc import CompileError
from tests.store.test_outages import add, names

from enginehouse.core.errors import Hopeless, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.store import claims, db, leases, models, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.engines import POSTGRES_THREADS, SQLITE_THREADS
from enginehouse.store.limits import StoreLimits
from enginehouse.store.read_gate import LONG_LOG_BYTES

LIMIT_SECONDS = 20.0
CALLERS = 12  # more reads at once than there are threads for them
MOST_CONNECTIONS = 8  # of one frontend; docs/operating.md says so


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    made = await Store.open(database_url, StoreLimits(answer_seconds=LIMIT_SECONDS))
    yield made
    made.close()


class Slow:
    """Work that goes on until it is told to end, and how many threads are in it."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()

    def __call__(self, connection: Connection) -> set[str]:
        found = names(connection)
        self.begun.release()
        assert self.may_end.wait(LIMIT_SECONDS)
        return found

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, True, LIMIT_SECONDS)


@contextlib.asynccontextmanager
async def slow_reads(store: Store, count: int) -> AsyncIterator[list[asyncio.Task[set[str]]]]:
    """So many reads under way, of which at least one has begun; they end with the block."""
    slow = Slow()
    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        tasks = [group.create_task(store.read(slow)) for _ in range(count)]
        try:
            await slow.until_begun()
            yield tasks
            assert not any(task.done() for task in tasks), "they went on all the time"
        finally:
            slow.may_end.set()


async def test_lists_that_take_long_delay_neither_a_lease_nor_a_claim_nor_a_look(store: Store) -> None:
    def lease(connection: Connection) -> bool:
        now = db.now(connection)
        return leases.acquire(connection, "poll", "me", now, now + 10)

    def claim(connection: Connection) -> int:
        now = db.now(connection)
        claims.renew(connection, "me", now + 10)
        return len(claims.take_over(connection, "me", now, now + 10))

    async with slow_reads(store, CALLERS):
        assert await store.transaction(lease)
        assert await store.transaction(claim) == 0
        await store.transaction(add("written"))
        assert await store.look(names) == {"written"}


async def test_a_transaction_delays_no_read_which_sees_what_was_committed_before(store: Store) -> None:
    writing, may_end = threading.Event(), threading.Event()

    def write_slowly(connection: Connection) -> None:
        add("second")(connection)
        writing.set()
        assert may_end.wait(LIMIT_SECONDS)

    await store.transaction(add("first"))
    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        task = group.create_task(store.transaction(write_slowly))
        try:
            assert await asyncio.to_thread(writing.wait, LIMIT_SECONDS)
            assert await store.read(names) == {"first"}
            assert await store.look(names) == {"first"}
            assert not task.done()
        finally:
            may_end.set()
        await task
        assert await store.read(names) == {"first", "second"}


async def test_a_read_sees_what_its_caller_has_stored_before(store: Store) -> None:
    async def store_and_read(number: int) -> None:
        for name in (f"{number}-first", f"{number}-second"):
            await store.transaction(add(name))
            assert name in await store.read(names)
            assert name in await store.look(names)

    async with asyncio.TaskGroup() as group:
        for number in range(10):
            group.create_task(store_and_read(number))


async def test_a_read_sees_one_moment(store: Store) -> None:
    has_read, go_on = threading.Event(), threading.Event()

    def read_twice(connection: Connection) -> tuple[set[str], set[str]]:
        before = names(connection)
        has_read.set()
        assert go_on.wait(LIMIT_SECONDS)
        return before, names(connection)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(store.read(read_twice))
        try:
            assert await asyncio.to_thread(has_read.wait, LIMIT_SECONDS)
            await store.transaction(add("meanwhile"))
        finally:
            go_on.set()
        assert await task == (set(), set())
    assert await store.read(names) == {"meanwhile"}


@pytest.mark.parametrize("method", ["read", "look"])
async def test_a_read_cannot_write(store: Store, method: str) -> None:
    ask = getattr(store, method)
    with pytest.raises(Hopeless):
        await ask(add("written"))
    with pytest.raises((Hopeless, CompileError)):
        await ask(lambda connection: nodes.get(connection, NodeId("any"), lock=True))
    assert not store.is_away
    assert await ask(names) == set()
    await store.transaction(add("written"))
    assert await ask(names) == {"written"}


async def test_what_a_read_raises_reaches_its_caller(store: Store) -> None:
    def fail(_connection: Connection) -> None:
        raise NotFound("cannot find it")

    for _ in range(CALLERS):
        with pytest.raises(NotFound):
            await store.read(fail)
    assert await store.read(names) == set()


async def test_reads_are_closed_with_the_store(store: Store) -> None:
    async with slow_reads(store, 1) as tasks:
        pass
    store.close()
    assert tasks[0].result() == set()
    before = threading.active_count()
    with pytest.raises(RuntimeError):
        await store.read(names)
    assert threading.active_count() <= before


async def test_a_frontend_has_so_many_connections_and_no_more(postgres: Callable[[], str]) -> None:
    store = await Store.open(postgres(), StoreLimits(answer_seconds=LIMIT_SECONDS))
    count = "select count(*) from pg_stat_activity where datname = current_database()"
    enough = threading.Barrier(MOST_CONNECTIONS + 1)

    def wait(connection: Connection) -> int:
        found = int(connection.exec_driver_sql(count).scalar_one())
        enough.wait(LIMIT_SECONDS)
        return found

    try:
        async with asyncio.TaskGroup() as group:
            for method, threads in (
                (store.transaction, POSTGRES_THREADS.steering),
                (store.look, POSTGRES_THREADS.looking),
                (store.read, POSTGRES_THREADS.reading),
            ):
                for _ in range(threads):
                    group.create_task(method(wait))
            await asyncio.to_thread(enough.wait, LIMIT_SECONDS)
        found = await store.read(lambda connection: int(connection.exec_driver_sql(count).scalar_one()))
        assert found == MOST_CONNECTIONS
    finally:
        store.close()


async def test_a_full_queue_of_reads_is_no_outage_of_the_database(sqlite_url: str) -> None:
    """Whoever waits in it for too long is told so; leases go on."""
    store = await Store.open(sqlite_url, StoreLimits(answer_seconds=1.0))
    slow = Slow()
    try:
        async with asyncio.TaskGroup() as group:

            async def refused() -> None:
                with pytest.raises(Unavailable):
                    await store.read(slow)

            tasks = [group.create_task(refused()) for _ in range(SQLITE_THREADS.reading + 3)]
            await asyncio.wait(tasks, timeout=LIMIT_SECONDS)
            assert all(task.done() for task in tasks)
            assert not store.is_away
            await store.transaction(add("written"))
            slow.may_end.set()
        assert await store.look(names) == {"written"}
    finally:
        slow.may_end.set()
        store.close()


async def test_reads_go_on_while_another_program_has_locked_the_file(sqlite_url: str) -> None:
    store = await Store.open(sqlite_url, StoreLimits(answer_seconds=1.0))
    try:
        await store.transaction(add("before"))
        with contextlib.closing(sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)) as other:
            other.execute("begin immediate")
            with pytest.raises(Unavailable):
                await store.transaction(add("refused"))
            for _ in range(CALLERS):
                assert await store.read(names) == {"before"}
            was_away = store.is_away
            assert was_away, "reads do not say whether it can be written"
            other.execute("rollback")
        await store.transaction(add("after"))
        assert not store.is_away
    finally:
        store.close()


async def test_a_database_in_memory_has_one_connection_for_everything() -> None:
    store = await Store.open("sqlite://")
    try:
        await store.transaction(add("first"))
        assert await store.read(names) == {"first"}
        assert await store.look(names) == {"first"}
    finally:
        store.close()


async def test_the_log_of_writes_has_an_end_although_reads_always_overlap(sqlite_url: str) -> None:
    """SQLite begins its log anew only at a moment without reads."""
    store = await Store.open(sqlite_url)
    log = Path(f"{sqlite_url.removeprefix('sqlite:///')}-wal")
    large = Model(name="large", backend="x" * 200_000, files=())
    begun = [threading.Event()]
    is_over = False

    def write(connection: Connection) -> None:
        models.remove(connection, "large")
        models.insert(connection, large, 1.0)

    def until_another_has_begun(connection: Connection) -> None:
        names(connection)
        begun[-1].set()
        begun.append(threading.Event())
        begun[-1].wait(0.1)  # unless reads are held back

    async def read_on() -> None:
        while not is_over:
            await store.read(until_another_has_begun)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(read_on())
            longest = 0
            for _ in range(800):
                await store.transaction(write)
                longest = max(longest, log.stat().st_size)
            is_over = True
        assert longest < 3 * LONG_LOG_BYTES
    finally:
        store.close()
