"""A database that does not answer: frozen, behind a way that swallows everything, locked by another program, not there
yet. Whoever asks is told within a limit, and what was refused does not happen later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import create_engine, event
from sqlalchemy.exc import OperationalError
from tests.e2e.conftest import wait_for
from tests.fleet.databases import Server, running_server

from enginehouse.core.errors import Invalid, Unavailable
from enginehouse.core.model import Model
from enginehouse.store import models, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.limits import COMMIT_SECONDS, StoreLimits

ANSWER_SECONDS = 1.5
LIMITS = StoreLimits(answer_seconds=ANSWER_SECONDS)
LATE_SECONDS = 1.0  # of a busy machine
SOCKET = ".s.PGSQL.5432"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as made:
        yield made


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


def add(name: str) -> Callable[[Connection], None]:
    return lambda connection: models.insert(connection, Model(name=name, backend="engine", files=()), 1.0)


def names(connection: Connection) -> set[str]:
    return {model.name for model, _ in models.every(connection)}


async def refused(store: Store, work: Callable[[Connection], object], method: str = "transaction") -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await getattr(store, method)(work)
    assert caught.value.code == "store_unavailable"
    assert time.monotonic() - began < ANSWER_SECONDS + LATE_SECONDS


async def until_back(store: Store, method: str = "transaction") -> None:
    async with asyncio.timeout(5):
        while True:
            with contextlib.suppress(Unavailable):
                await getattr(store, method)(names)
                return


async def test_a_frozen_server_is_away_within_the_limit_and_what_was_refused_is_not_done_later(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(server.make_database(), LIMITS)
    told: list[str] = []
    store.on_back = lambda: told.append("back")
    try:
        await store.transaction(add("before"))
        with caplog.at_level(logging.INFO), frozen(server):
            async with asyncio.TaskGroup() as group:
                # More than there are threads: some never get one.
                for number in range(20):
                    group.create_task(refused(store, add(f"refused-{number}")))
            was_away = store.is_away
            assert was_away
            await refused(store, names)
            async with asyncio.TaskGroup() as group:
                for method in ("read", "look") * 10:
                    group.create_task(refused(store, names, method))
        await until_back(store, "read")
        await until_back(store, "look")
        await until_back(store)
        assert not store.is_away
        assert told == ["back"]
        # Whatever the server had received is carried out, or rolled back, before this: it answers in order.
        await store.transaction(add("after"))
        assert await store.transaction(names) == {"before", "after"}
        lines = [record.getMessage().split()[0] for record in caplog.records if record.name.endswith("store.db")]
        assert lines == ["store.lost", "store.recovered"], "a line per change"
    finally:
        store.close()


async def test_reads_of_a_frozen_server_end_within_the_limit_and_leave_the_verdict_to_transactions(
    server: Server,
) -> None:
    store = await Store.open(server.make_database(), LIMITS)
    try:
        await store.transaction(add("before"))
        assert await store.read(names) == await store.look(names) == {"before"}
        with frozen(server):
            async with asyncio.TaskGroup() as group:
                for method in ("read", "look") * 5:
                    group.create_task(refused(store, names, method))
            was_away = store.is_away
            assert not was_away
            await refused(store, names)
            is_away = store.is_away
            assert is_away
        await until_back(store, "look")
        was_away = store.is_away
        assert not was_away, "whatever the server answers shows that it is back"
        await until_back(store, "read")
        await until_back(store)
    finally:
        store.close()


async def test_reads_of_a_server_that_was_restarted_go_on(server: Server) -> None:
    """Their connections are checked before they are used."""
    store = await Store.open(server.make_database(), LIMITS)
    try:
        await store.transaction(add("before"))
        assert await store.read(names) == await store.look(names) == {"before"}
        server.stop()
        async with asyncio.TaskGroup() as group:
            for method in ("read", "look") * 5:
                group.create_task(refused(store, names, method))
        server.start()
        await until_back(store, "read")
        await until_back(store, "look")
        assert await store.read(names) == await store.look(names) == {"before"}
    finally:
        store.close()


@pytest.mark.parametrize("how", ["restarted", "ended by an administrator"])
async def test_a_connection_that_the_server_has_ended_is_replaced_before_it_is_used(server: Server, how: str) -> None:
    url = server.make_database()
    store = await Store.open(url, LIMITS)
    try:
        await store.transaction(add("before"))
        await store.read(names)
        if how == "restarted":
            server.stop()
            server.start()
        else:
            server.tell("select pg_terminate_backend(pid, 5000) from pg_stat_activity where pid <> pg_backend_pid()")
        assert await store.transaction(names) == await store.read(names) == {"before"}, "at the first attempt"
        assert not store.is_away
    finally:
        store.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_a_read_that_was_given_up_frees_its_thread(server: Server, tmp_path: Path, dialect: str) -> None:
    """Its statement is ended, wherever it hangs."""
    url = server.make_database() if dialect == "postgresql" else f"sqlite:///{tmp_path / 'test.db'}"
    store = await Store.open(url, LIMITS)
    endless = (
        "select pg_sleep(60)"
        if dialect == "postgresql"
        else "with recursive n(i) as (select 1 union all select i + 1 from n) select max(i) from n"
    )
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(6):
                group.create_task(refused(store, lambda connection: connection.exec_driver_sql(endless), "read"))
        assert not store.is_away
        await until_back(store, "read")
        await store.transaction(add("after"))
        assert await store.read(names) == {"after"}
    finally:
        store.close()


async def test_what_was_given_up_between_two_statements_is_not_committed(server: Server) -> None:
    """The thread is slow, not the server."""
    store = await Store.open(server.make_database(), LIMITS)
    go_on = threading.Event()

    def slow(connection: Connection) -> None:
        add("slow")(connection)
        go_on.wait(30)

    try:
        await refused(store, slow)
        go_on.set()
        await until_back(store)
        assert await store.transaction(names) == set()
    finally:
        go_on.set()
        store.close()


async def test_the_same_holds_for_sqlite(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite:///{tmp_path / 'test.db'}", LIMITS)
    go_on = threading.Event()

    def slow(connection: Connection) -> None:
        add("slow")(connection)
        go_on.wait(30)

    try:
        await refused(store, slow)
        await refused(store, add("queued"))  # its one thread is taken
        go_on.set()
        await until_back(store)
        assert await store.transaction(names) == set()
    finally:
        go_on.set()
        store.close()


@pytest.mark.parametrize("dialect", ["sqlite", "postgresql"])
async def test_what_was_committed_is_not_refused_because_its_frontend_was_frozen(
    server: Server, tmp_path: Path, dialect: str
) -> None:
    """It finds the outcome and the end of the limit at the same moment."""
    url = server.make_database() if dialect == "postgresql" else f"sqlite:///{tmp_path / 'test.db'}"
    store = await Store.open(url, LIMITS)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(store.transaction(add("kept")))
            await asyncio.sleep(0)  # its thread has it
            # The loop stands still, as in a frozen process; its threads do not.
            threading.Event().wait(ANSWER_SECONDS + 0.5)
        assert await store.transaction(names) == {"kept"}
    finally:
        store.close()


async def test_a_commit_that_has_begun_is_waited_for(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite:///{tmp_path / 'test.db'}", LIMITS)
    given_up = threading.Event()

    def commit_slowly(_connection: Connection) -> None:
        """Until a moment after the limit."""
        given_up.wait(ANSWER_SECONDS + COMMIT_SECONDS / 2)

    try:
        event.listen(store._engine, "commit", commit_slowly)
        await store.transaction(add("kept"))
        event.remove(store._engine, "commit", commit_slowly)
        assert await store.transaction(names) == {"kept"}
    finally:
        given_up.set()
        store.close()


async def test_a_file_that_another_program_has_locked_is_away_until_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "test.db"
    store = await Store.open(f"sqlite:///{path}", LIMITS)
    try:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            async with asyncio.TaskGroup() as group:
                for number in range(3):
                    group.create_task(refused(store, add(f"refused-{number}")))
            other.execute("rollback")
        await until_back(store)
        assert await store.transaction(names) == set()
    finally:
        store.close()


async def test_a_full_disk_is_told_once_and_what_only_reads_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(f"sqlite:///{tmp_path / 'test.db'}", LIMITS)
    large = Model(name="large", backend="x" * 1_000_000, files=())

    def cap(connection: Connection) -> None:
        pages = connection.exec_driver_sql("pragma page_count").scalar_one()
        connection.exec_driver_sql(f"pragma max_page_count={pages}")

    def uncap(connection: Connection) -> None:
        connection.exec_driver_sql("pragma max_page_count=1000000")

    try:
        await store.transaction(cap)
        for _ in range(5):
            await refused(store, lambda connection: models.insert(connection, large, 1.0))
            assert await store.transaction(names) == set()
            assert not store.is_away
        assert [record.getMessage() for record in caplog.records if "store." in record.getMessage()] == [
            "store.failed error=database or disk is full"
        ]
        await store.transaction(uncap)
        await store.transaction(lambda connection: models.insert(connection, large, 1.0))
        assert await store.transaction(names) == {"large"}
    finally:
        store.close()


class Swamp:
    """A way to the server; once it is `deep`, what is sent either way is taken and never arrives."""

    def __init__(self, there: str) -> None:
        self._there = there
        self.deep = False

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(self._there)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass(reader, there_writer))
                group.create_task(self._pass(there_reader, writer))
        except* OSError:
            pass
        finally:
            writer.close()
            there_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while received := await reader.read(65536):
            if not self.deep:
                writer.write(received)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def swamp(server: Server) -> AsyncIterator[tuple[Swamp, str]]:
    made = Swamp(f"{server.socket_directory}/{SOCKET}")
    directory = tempfile.mkdtemp(prefix="enginehouse-swamp-")  # short: a socket's path has little room
    listening = await asyncio.start_unix_server(made.accept, f"{directory}/{SOCKET}")
    try:
        yield made, directory
    finally:
        listening.close()
        shutil.rmtree(directory)


async def test_a_way_that_swallows_everything_is_no_different_from_a_frozen_server(server: Server) -> None:
    url = server.make_database()
    async with swamp(server) as (way, directory):
        store = await Store.open(url.replace(server.socket_directory, directory), LIMITS)
        try:
            await store.transaction(add("before"))
            way.deep = True
            async with asyncio.TaskGroup() as group:
                for number in range(10):
                    group.create_task(refused(store, add(f"refused-{number}")))
            way.deep = False
            await until_back(store)
            assert await store.transaction(names) == {"before"}
        finally:
            store.close()


async def test_a_statement_that_waits_for_a_lock_ends_on_the_server_too(server: Server) -> None:
    url = server.make_database()
    store, other = await Store.open(url, LIMITS), await Store.open(url, StoreLimits(answer_seconds=20.0))
    is_held, go_on = threading.Event(), threading.Event()

    def hold(connection: Connection) -> None:
        connection.exec_driver_sql("lock table models")
        is_held.set()
        go_on.wait(20)

    try:
        async with asyncio.TaskGroup() as group:
            holding = group.create_task(other.transaction(hold))
            await asyncio.to_thread(is_held.wait, 10)
            await refused(store, add("blocked"))
            await refused(store, names, "read")
            assert await store.transaction(nodes.every) == [], "what needs no such lock goes on"
            assert await store.read(nodes.every) == []
            go_on.set()
            await holding
        assert await store.transaction(names) == set()
    finally:
        go_on.set()
        store.close()
        other.close()


# Starting ------------------------------------------------------------------------------------------


async def test_a_database_that_is_not_there_yet_is_waited_for(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    url = server.make_database()
    server.stop()
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        opening = group.create_task(Store.open(url, StoreLimits(start_seconds=30.0)))
        try:
            await asyncio.to_thread(wait_for, "it to say so", lambda: "store.waiting" in caplog.text, 10.0)
        finally:
            server.start()
    store = opening.result()
    assert await store.transaction(nodes.every) == []
    store.close()
    assert caplog.text.count("store.waiting") == 1


async def test_a_server_that_is_frozen_while_it_is_opened_is_waited_for(server: Server) -> None:
    url = server.make_database()
    with frozen(server):
        with pytest.raises(Unavailable):
            await Store.open(url, StoreLimits(start_seconds=1.0))
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            opening = group.create_task(Store.open(url, StoreLimits(start_seconds=30.0)))
            group.create_task(asyncio.to_thread(server.thaw))
    store = opening.result()
    assert await store.transaction(nodes.every) == []
    store.close()


async def test_the_wait_for_a_database_has_an_end() -> None:
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await Store.open("postgresql://127.0.0.1:1/none", StoreLimits(start_seconds=1.0))
    assert caught.value.code == "store_unavailable"
    assert 0.3 < time.monotonic() - began < 5.0


@pytest.mark.parametrize("what", ["database", "role", "password"])
async def test_what_no_waiting_heals_ends_at_once(server: Server, what: str) -> None:
    url = server.make_database()
    if what == "database":
        url = url.replace(url.split("/")[3].split("?")[0], "absent")
    elif what == "role":
        url = url.replace("postgres@", "nobody@")
    else:
        server.tell("create role locked login password 'right'")
        server.require_password("locked")
        url = url.replace("postgres@", "locked:wrong@")
    began = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        await Store.open(url, StoreLimits(start_seconds=30.0))
    assert time.monotonic() - began < 10.0
    assert "\n" not in caught.value.message
    assert "wrong" not in caught.value.message


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:secret@h:abc/db", "postgresql://u:secret@h:/db", "postgresql://u:secret@[::1/db", "sqlite://h/d"],
)
async def test_an_address_that_is_none_is_one_sentence_without_its_password(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        await Store.open(url)
    assert "secret" not in caught.value.message
    assert "\n" not in caught.value.message


async def test_a_slow_migration_is_not_ended_by_the_limits_of_requests(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[str] = []
    really_upgrade = command.upgrade

    def upgrade(config: Any, revision: str) -> None:
        connection = config.attributes["connection"]
        names = ("statement_timeout", "idle_in_transaction_session_timeout")
        limits.extend(connection.exec_driver_sql(f"show {name}").scalar_one() for name in names)
        really_upgrade(config, revision)

    monkeypatch.setattr(command, "upgrade", upgrade)
    database = server.make_database()
    # One that is empty gets its tables at once, without the steps of a migration.
    engine = create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection:
        connection.exec_driver_sql("create table other (id integer)")
    engine.dispose()
    store = await Store.open(database, LIMITS)
    try:
        assert limits == ["0", "1min"]

        def idle_limit(connection: Connection) -> str:
            return str(connection.exec_driver_sql("show idle_in_transaction_session_timeout").scalar_one())

        assert await store.transaction(idle_limit) == f"{LIMITS.idle_milliseconds}ms"
    finally:
        store.close()


async def test_what_began_before_the_server_was_back_does_not_tell_that_it_is_away(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    store = await Store.open(server.make_database(), LIMITS)
    begun, end = threading.Event(), threading.Event()

    def hang(_connection: Connection) -> None:
        begun.set()
        end.wait(30)

    def lose(_connection: Connection) -> None:
        raise OperationalError("select 1", {}, Exception("the connection was lost"))

    away: list[bool] = []
    try:
        with caplog.at_level(logging.WARNING):
            async with asyncio.TaskGroup() as group:
                group.create_task(refused(store, hang))
                await asyncio.to_thread(begun.wait, 10)
                await refused(store, lose)
                away.append(store.is_away)
                await store.transaction(names)
                away.append(store.is_away)
            away.append(store.is_away)  # it was given up at its limit, most of which was before
    finally:
        end.set()
        store.close()
    assert away == [True, False, False]
    assert (caplog.text.count("store.lost"), caplog.text.count("store.recovered")) == (1, 1)
