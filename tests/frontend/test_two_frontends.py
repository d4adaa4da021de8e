"""Two frontends on one database, SQLite and PostgreSQL: what collides is done once, and nobody fails for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from nacl.signing import SigningKey
from sqlalchemy import text
from tests.frontend.world import LEASE_SECONDS, Time, WatchedStore, World

from enginehouse.core.action import RemoveBackend
from enginehouse.core.errors import Conflict, Hopeless
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change, Outcome
from enginehouse.core.operation import Operation
from enginehouse.core.progress import Progress
from enginehouse.store import claims, db, history, intents, leases, nodes, operations
from enginehouse.store.db import Connection
from enginehouse.store.supersession import add_intent

LIMIT_SECONDS = 10

pytestmark = pytest.mark.slow  # a real PostgreSQL


@asynccontextmanager
async def opened(database_url: str, time: Time) -> AsyncIterator[tuple[World, World]]:
    made = []
    for owner in ("first frontend", "second frontend"):
        store = await WatchedStore.open(database_url)
        assert isinstance(store, WatchedStore)
        made.append(World(store, time, owner=owner))
        await made[-1].start()
    yield made[0], made[1]
    for world in made:
        world.store.close()


@pytest.fixture
async def pair(database_url: str, time: Time) -> AsyncIterator[tuple[World, World]]:
    async with opened(database_url, time) as made:
        yield made


@pytest.fixture
async def postgres_pair(postgres: Callable[[], str], time: Time) -> AsyncIterator[tuple[World, World]]:
    """For what cannot happen on SQLite, where one transaction at a time runs."""
    async with opened(postgres(), time) as made:
        yield made


class Held:
    """A transaction that has done its work and is not committed until it is let go."""

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.let_go = threading.Event()

    def wait(self) -> None:
        self.is_done.set()
        assert self.let_go.wait(LIMIT_SECONDS)


async def test_both_send_at_once_and_every_intent_goes_out_once(pair: tuple[World, World]) -> None:
    one, two = pair
    await one.join_many(*(f"node-{number}" for number in range(10)))
    for world in pair:
        await world.install()
    async with asyncio.TaskGroup() as group:
        for world in pair * 3:
            group.create_task(world.dispatcher.step())
    assert len(one.bus.take() + two.bus.take()) == 10


async def test_a_reply_that_its_owner_did_not_hear_is_taken_by_another_when_the_lease_has_ended(
    pair: tuple[World, World], time: Time
) -> None:
    """The owner died before it came; one of LocalAI's workers says it once."""
    one, two = pair
    await one.join("node", is_localai=True)
    intent = await one.intent(await one.install())
    await one.dispatcher.step()
    intent = await one.intent_now(intent)
    await two.reply(intent, Outcome(code="disk_full", message="cannot install: the disk is full"))
    assert (await two.intent_now(intent)).state == "running"
    await two.collector.late_step()  # not yet: its owner may still live
    time.passed += LEASE_SECONDS + 1
    await two.collector.late_step()
    async with asyncio.timeout(LIMIT_SECONDS):
        await two.collector.replies_step()
    after = await two.intent_now(intent)
    assert (after.state, after.message) == ("failed", "cannot install: the disk is full")


async def test_a_frontend_without_a_bus_leaves_its_work_to_one_that_hears(
    pair: tuple[World, World], time: Time
) -> None:
    one, two = pair
    await one.join("node")
    intent = await one.intent(await one.install())
    await one.dispatcher.step()
    one.bus.is_connected = False
    for _ in range(8):
        time.passed += LEASE_SECONDS / 6
        await one.dispatcher.renew_step()
    await two.dispatcher.renew_step()
    assert (await two.intent_now(intent)).owner == "second frontend"
    await two.reply(await two.intent_now(intent), Outcome())
    assert (await two.intent_now(intent)).state == "succeeded"


async def test_a_frontend_without_a_bus_takes_nothing_over(pair: tuple[World, World], time: Time) -> None:
    one, two = pair
    await one.join("node")
    intent = await one.intent(await one.install())
    await one.dispatcher.step()
    two.bus.is_connected = False
    time.passed += 2 * LEASE_SECONDS
    await two.dispatcher.renew_step()
    assert (await two.intent_now(intent)).owner == "first frontend"
    two.bus.is_connected = True
    await two.dispatcher.renew_step()
    assert (await two.intent_now(intent)).owner == "second frontend"


async def test_a_newer_request_waits_for_a_claim_instead_of_failing(postgres_pair: tuple[World, World]) -> None:
    one, two = postgres_pair
    await one.join("first")
    install = await one.install()
    held = Held()

    def claim(connection: Connection) -> None:
        now = db.now(connection)
        assert len(claims.claim_due(connection, "first frontend", now, now + 30, 10)) == 1
        held.wait()

    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(one.store.transaction(claim))
        await asyncio.to_thread(held.is_done.wait, LIMIT_SECONDS)
        delete = group.create_task(two.request("delete"))
        await _is_waiting_for_a_lock(one)
        held.let_go.set()
    assert (await one.intent(install)).state == "superseded"
    assert (await one.intent(delete.result())).state == "accepted"


async def test_an_intent_that_another_frontend_holds_stops_no_step(postgres_pair: tuple[World, World]) -> None:
    one, two = postgres_pair
    first, second = await one.join_many("first", "second")
    view = await one.install("first")
    await one.dispatcher.step()
    intent = await one.intent(view)
    await one.set_health(first.id, "offline")
    held = Held()

    def settle(connection: Connection) -> None:
        intents.set_progress(connection, {intent.id: Progress(attempt=1, sequence=1)}, intent.owner, 0.0)
        held.wait()

    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(one.store.transaction(settle))
        await asyncio.to_thread(held.is_done.wait, LIMIT_SECONDS)
        other = await two.install("second")
        await two.dispatcher.step()
        assert (await two.intent(other)).state == "running"
        held.let_go.set()
    await two.dispatcher.step()
    assert (await one.intent(view)).reason == "node_away"
    assert second.id != first.id


async def _is_waiting_for_a_lock(world: World) -> None:
    query = text("select count(*) from pg_stat_activity where wait_event_type = 'Lock'")
    while not await world.store.transaction(lambda connection: connection.execute(query).scalar_one()):
        pass


async def test_two_transactions_that_lock_crosswise_both_go_through(postgres_pair: tuple[World, World]) -> None:
    one, two = postgres_pair
    both_have_one = threading.Barrier(2, timeout=LIMIT_SECONDS)
    runs: list[str] = []

    def lock(connection: Connection, names: tuple[str, str]) -> None:
        runs.append(names[0])
        now = db.now(connection)
        leases.acquire(connection, names[0], names[0], now, now + 10)
        if len(runs) <= 2:
            both_have_one.wait()
        leases.acquire(connection, names[1], names[0], now, now + 10)

    async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(one.store.transaction(lambda c: lock(c, ("a", "b"))))
        group.create_task(two.store.transaction(lambda c: lock(c, ("b", "a"))))
    # The one that lost may lose again while the other is still on its way; what counts is that both arrive.
    assert 3 <= len(runs) <= 1 + db._TRIES
    assert {"a", "b"} == set(runs)


async def test_a_machine_that_registers_at_both_at_once_is_one_node(pair: tuple[World, World]) -> None:
    """In the order of their challenges; one that is overtaken changes nothing."""
    key = SigningKey(b"1" * 32)

    async def ask(world: World) -> str | None:
        try:
            return (await world.register("first", key)).node.id
        except Conflict:
            return None

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(world)) for world in pair * 5]
    assert len({task.result() for task in asked} - {None}) == 1
    assert len((await pair[0].nodes.every())[0]) == 1


async def test_both_ask_for_a_new_model_at_once_and_one_load_is_made(pair: tuple[World, World]) -> None:
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(world.loader.request("tiny", None, "someone")) for world in pair * 5]
    assert len({str(task.result()) for task in asked}) == 1


async def test_a_value_that_no_column_takes_is_not_the_databases_absence(postgres_pair: tuple[World, World]) -> None:
    one, _ = postgres_pair
    with pytest.raises(Hopeless):
        await one.store.transaction(lambda c: leases.acquire(c, "nul \0", "x", 1.0, 2.0))


async def test_what_people_look_at_is_the_same_on_both_databases(pair: tuple[World, World]) -> None:
    one, two = pair
    await one.join("first")
    done, failed = await one.install(), await one.install(name="other")
    await one.dispatcher.step()
    await one.reply(await one.intent(done), Outcome())
    await one.reply(await one.intent(failed), Outcome(code="not_found", message="no"))
    waiting = await one.request("delete", name="other")
    load = await one.loader.request("tiny", None, "someone")
    shown = [view.jobID for view in await two.board.unfinished(9)]
    assert shown == [load, waiting.jobID, failed.jobID]
    assert set(await one.store.transaction(history.open_ids)) == {load, waiting.jobID}
    every = await one.store.transaction(lambda c: history.changed_since(c, 0.0))
    revisions = await one.store.transaction(lambda c: history.revisions(c, every))
    snapshots = await one.store.transaction(lambda c: one.board._read(c, every))
    assert revisions == {snapshot.operation.id: snapshot.revision for snapshot in snapshots}
    assert len(revisions) == 4
    one.time.passed += 30 * 24 * 3600
    now = await one.now()
    assert await one.store.transaction(lambda c: history.prune(c, now, 1, 10)) == 2
    assert set(await one.store.transaction(lambda c: history.changed_since(c, 0.0))) == {load, waiting.jobID}
    assert len(await one.store.transaction(nodes.every)) == 1


async def test_an_intent_that_serves_a_kept_operation_is_kept(pair: tuple[World, World]) -> None:
    one, _ = pair
    await one.join("first")

    def fill(connection: Connection) -> None:
        for number in (1, 2):
            made = Operation(
                id=OperationId(f"o{number}"), kind="delete", name="x", author="a", created_at=float(number), targets=()
            )
            operations.insert(connection, made)
            action = RemoveBackend(backend="x", directory="x")
            add_intent(connection, made.id, NodeId("n"), action, IntentId(f"i{number}"), 1.0)

    await one.store.transaction(fill)
    intent = await one.store.transaction(lambda c: operations.intent(c, IntentId("i1")))
    assert intent is not None
    await one.store.transaction(lambda c: operations.apply(c, intent, Change(kind="cancel", now=3.0)))
    assert await one.store.transaction(lambda c: history.prune(c, 100.0, 1, 10)) == 1
    assert await one.store.transaction(lambda c: operations.intent(c, IntentId("i1"))) is not None
    await one.store.transaction(lambda c: operations.insert(c, _newer()))
    assert await one.store.transaction(lambda c: history.prune(c, 100.0, 1, 10)) == 1
    assert await one.store.transaction(lambda c: operations.intent(c, IntentId("i1"))) is None


def _newer() -> Operation:
    return Operation(id=OperationId("o3"), kind="delete", name="x", author="a", created_at=3.0, targets=())


async def test_frontends_that_bring_the_same_or_other_tokens_at_once_all_come_up(
    postgres_pair: tuple[World, World],
) -> None:
    """As after a power cut, or while a token is changed everywhere."""
    for number in range(10):
        same, other = "s" * 40 + str(number), "o" * 40 + str(number)
        async with asyncio.timeout(LIMIT_SECONDS), asyncio.TaskGroup() as group:
            for token in (same, same, other):
                for world in postgres_pair:
                    group.create_task(world.keys.create("join", "join", token))
        (kept,) = await postgres_pair[0].keys.every()
        assert (kept.role, kept.name) == ("join", "join")
