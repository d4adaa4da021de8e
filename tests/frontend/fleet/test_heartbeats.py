"""Heartbeats are stored together, and an unchanged report counts as a report of its mark; on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager

import msgspec
import pytest
from sqlalchemy import event, text
from tests.frontend.world import STALE_SECONDS, Time, WatchedStore, World, installed, running

import enginehouse
from enginehouse.core.action import InstallBackend
from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.core.replica import Replica
from enginehouse.core.report import CommandResult, Report, ReportStamp, digest_of
from enginehouse.frontend.delivery.reports import Answered
from enginehouse.store import db, replicas


@pytest.fixture
async def world(database_url: str, time: Time) -> AsyncIterator[World]:
    store = await WatchedStore.open(database_url)
    assert isinstance(store, WatchedStore)
    made = World(store, time)
    await made.start()
    yield made
    store.close()


class Worker:
    """The side of a worker: it sends the whole report only where the last answer did not confirm it."""

    def __init__(self, world: World, node_id: NodeId) -> None:
        self.world = world
        self.node_id = node_id
        self.report = Report(boot_id="boot", mark=1.0, boot_mark=1.0)
        self.confirmed = ""

    async def beat(self, **fields: object) -> Answered:
        self.report = msgspec.structs.replace(self.report, sequence=self.report.sequence + 1, **fields)
        said = self.said()
        answer = await self.world.reports.heartbeat(self.node_id, said)
        self.report = msgspec.structs.replace(self.report, mark=answer.mark)
        self.confirmed = answer.report_digest
        return answer

    def said(self) -> HeartbeatRequest:
        digest = digest_of(self.report)
        if digest != self.confirmed:
            return HeartbeatRequest(report=self.report, report_digest=digest)
        return self.unchanged()

    def unchanged(self) -> HeartbeatRequest:
        stamp = ReportStamp(sequence=self.report.sequence, mark=self.report.mark)
        return HeartbeatRequest(report_digest=digest_of(self.report), unchanged=stamp)


async def worker_of(world: World, name: str = "first", **fields: object) -> Worker:
    """One whose report is confirmed."""
    made = Worker(world, (await world.join(name)).id)
    await made.beat(**fields)
    assert made.confirmed == digest_of(made.report)
    return made


def digest_in(intent: Intent) -> str:
    assert isinstance(intent.action, InstallBackend)
    return intent.action.resolved.digest


async def together(*beats: Coroutine[None, None, Answered]) -> list[Answered | EnginehouseError]:
    """The answer, or the refusal, of each of these at once."""

    async def one(beat: Coroutine[None, None, Answered]) -> Answered | EnginehouseError:
        try:
            return await beat
        except EnginehouseError as error:
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(beat)) for beat in beats]
    return [task.result() for task in tasks]


@contextmanager
def counted(world: World) -> Iterator[list[str]]:
    """The statements that the database gets."""
    found: list[str] = []

    def note(*arguments: object) -> None:
        found.append(str(arguments[2]))

    event.listen(world.store._engine, "before_cursor_execute", note)
    yield found
    event.remove(world.store._engine, "before_cursor_execute", note)


async def stored_report(world: World, node_id: NodeId) -> tuple[str, float]:
    """The row as it is, past everything that reads it."""

    def work(connection: db.Connection) -> tuple[str, float]:
        row = connection.execute(text("select report, updated_at from nodes where id = :id"), {"id": node_id}).one()
        return str(row[0]), float(row[1])

    return await world.store.transaction(work)


# Together ----------------------------------------------------------------------------------------


async def test_heartbeats_that_arrive_together_are_few_statements(world: World, time: Time) -> None:
    workers = [await worker_of(world, f"n{number}", backends=(installed("engine", "1"),)) for number in range(20)]
    before = [await stored_report(world, worker.node_id) for worker in workers]
    time.passed += 1
    world.reports.heartbeats.transactions.gather_seconds = 0.05
    with counted(world) as found:
        await together(*(worker.beat() for worker in workers))
    assert len(found) <= 8, found  # at most two transactions: the first may be alone
    assert all(worker.confirmed == digest_of(worker.report) for worker in workers)
    assert [await stored_report(world, worker.node_id) for worker in workers] == before, "no wide row is written"
    for worker in workers:
        node, _ = await world.nodes.get(worker.node_id)
        assert (node.report.sequence, node.last_heartbeat) == (2, worker.report.mark)
        assert node.report.backends == (installed("engine", "1"),)


async def test_reports_that_settle_an_install_on_many_nodes_are_few_statements(world: World, time: Time) -> None:
    workers = [await worker_of(world, f"n{number:02d}") for number in range(20)]
    view = await world.install(name="engine")
    intents = [await world.intent(view, row) for row in range(20)]
    await world.dispatcher.step()
    time.passed += 1
    for worker in workers:
        await worker.beat()  # with a mark from after the command
    world.reports.transactions.gather_seconds = 0.05
    directory = intents[0].subject.removeprefix("backend:")
    by_node = {intent.node_id: intent for intent in intents}
    with counted(world) as found:
        await together(
            *(
                worker.beat(backends=(installed(directory, digest_in(by_node[worker.node_id]), 1),))
                for worker in workers
            )
        )
    assert {(await world.intent_now(intent)).state for intent in intents} == {"succeeded"}
    assert (await world.board.view(view.jobID)).status == "succeeded"
    assert len(found) <= 60, found  # of two transactions, and of what watchers are shown
    assert all(worker.confirmed == digest_of(worker.report) for worker in workers)


async def test_a_crowd_shares_transactions_for_longer_than_a_few(world: World) -> None:
    workers = [await worker_of(world, f"n{number}") for number in range(12)]
    heartbeats = world.reports.heartbeats.transactions
    heartbeats.gather_seconds = 0.01
    await together(*(worker.beat() for worker in workers))
    assert heartbeats.pause_seconds == pytest.approx(0.05)
    await workers[0].beat()
    assert heartbeats.pause_seconds == pytest.approx(0.01), "after a single one the next is answered sooner again"


async def test_an_unknown_node_among_others_is_told_alone(world: World) -> None:
    worker = await worker_of(world)
    nobody = world.reports.heartbeat(NodeId("nobody"), HeartbeatRequest())
    answers = await together(worker.beat(), nobody)
    assert isinstance(answers[0], Answered)
    assert isinstance(answers[1], NotFound)


async def test_each_is_told_that_the_database_is_away_and_nothing_is_stored(world: World) -> None:
    workers = [await worker_of(world, f"n{number}") for number in range(3)]
    heard = [(await world.nodes.get(worker.node_id))[0].last_heartbeat for worker in workers]
    world.store.is_away = True
    answers = await together(*(worker.beat() for worker in workers))
    assert [type(answer) for answer in answers] == [Unavailable] * 3
    world.store.is_away = False
    assert [(await world.nodes.get(worker.node_id))[0].last_heartbeat for worker in workers] == heard
    for worker in workers:
        worker.confirmed = ""
        assert (await worker.beat()).report_digest


async def test_a_client_that_leaves_takes_no_other_heartbeat_with_it(world: World) -> None:
    first, second = await worker_of(world, "first"), await worker_of(world, "second")
    world.reports.heartbeats.transactions.gather_seconds = 0.2  # so that the first waits for its turn to store both
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        leaving, staying = group.create_task(first.beat()), group.create_task(second.beat())
        await asyncio.sleep(0)
        leaving.cancel()
    assert staying.result().report_digest == digest_of(second.report)
    assert (await world.nodes.get(second.node_id))[0].report.sequence == 2


async def test_two_heartbeats_of_one_node_count_in_their_order(world: World) -> None:
    worker = await worker_of(world)
    away = msgspec.structs.replace(worker.unchanged(), bus="away", available_ram=1)
    here = HeartbeatRequest(available_ram=2)
    await together(*(world.reports.heartbeat(worker.node_id, said) for said in (away, here, away, here)))
    node, _ = await world.nodes.get(worker.node_id)
    assert (node.health, node.bus_away, node.capacity.available_ram) == ("healthy", False, 2)


# Unchanged ---------------------------------------------------------------------------------------


async def test_an_unchanged_report_settles_what_it_shows_once_its_mark_is_newer(world: World, time: Time) -> None:
    worker = await worker_of(world)
    requested = await world.request("delete", "first", name="engine")
    intent = await world.intent(requested)
    late = worker.unchanged()  # taken before the request
    await world.reports.heartbeat(worker.node_id, late)
    assert (await world.intent_now(intent)).state == "accepted"
    time.passed += 1
    await worker.beat()  # its mark is still from before
    time.passed += 1
    await worker.beat()
    assert (await world.intent_now(intent)).state == "succeeded"


async def test_an_unchanged_report_shows_that_a_command_was_lost(world: World, time: Time) -> None:
    worker = await worker_of(world)
    intent = await world.intent(await world.install("first"))
    await world.dispatcher.step()
    assert (await world.intent_now(intent)).state == "running"
    for _ in range(3):
        time.passed += 2
        await worker.beat()
    after = await world.intent_now(intent)
    assert (after.state, after.reason) == ("waiting", "worker_restarted")


async def test_an_unchanged_report_is_answered_with_what_was_cancelled_meanwhile(world: World) -> None:
    worker = await worker_of(world)
    requested = await world.install("first")
    await world.dispatcher.step()
    intent = await world.intent(requested)
    answer = await worker.beat(running=(intent.id,))
    assert (answer.cancelled, answer.report_digest) == ((), digest_of(worker.report))
    await world.cancellation.cancel(requested.jobID, None, "someone")
    assert (await worker.beat()).cancelled == (intent.id,)
    assert (await worker.beat()).cancelled == (intent.id,), "until it no longer runs"
    assert (await worker.beat(running=())).cancelled == ()


async def test_an_unchanged_report_does_not_repeat_a_result(world: World, time: Time) -> None:
    worker = await worker_of(world)
    intent = await world.intent(await world.install("first"))
    await world.dispatcher.step()
    running_one = await world.intent_now(intent)
    result = CommandResult(intent=intent.id, attempt=running_one.attempt, outcome=Outcome(code="x", message="failed"))
    await worker.beat(results=(result,))
    failed = await world.intent_now(intent)
    time.passed += 5
    await worker.beat()
    assert await world.intent_now(intent) == failed


async def test_an_unchanged_report_that_comes_late_changes_nothing(world: World, time: Time) -> None:
    worker = await worker_of(world)
    late = worker.unchanged()
    await worker.beat()
    await worker.beat()
    before, _ = await world.nodes.get(worker.node_id)
    time.passed += 5
    await world.reports.heartbeat(worker.node_id, msgspec.structs.replace(late, available_ram=77))
    assert (await world.nodes.get(worker.node_id))[0] == before


async def test_a_mark_from_the_future_is_limited_to_the_time_of_the_store(world: World) -> None:
    worker = await worker_of(world)
    worker.report = msgspec.structs.replace(worker.report, sequence=2**70, mark=1e18)
    await world.reports.heartbeat(worker.node_id, worker.unchanged())
    node, now = await world.nodes.get(worker.node_id)
    assert node.report.mark <= now


async def test_whatever_a_worker_calls_its_run_is_stored(world: World) -> None:
    worker = await worker_of(world, boot_id="b\0" * 100)
    await worker.beat()
    assert (await world.nodes.get(worker.node_id))[0].report.sequence == 2


@pytest.mark.parametrize("other", ["unknown", "another run"])
async def test_what_the_store_does_not_have_is_not_confirmed_and_heals_nobody(world: World, other: str) -> None:
    worker = await worker_of(world)
    boot_id = "another" if other == "another run" else "boot"
    worker.report = msgspec.structs.replace(worker.report, boot_id=boot_id, backends=(installed("engine", "1"),))
    await world.set_health(worker.node_id, "offline")
    before, _ = await world.nodes.get(worker.node_id)
    answer = await world.reports.heartbeat(worker.node_id, msgspec.structs.replace(worker.unchanged(), available_ram=7))
    assert answer.report_digest == ""
    assert (await world.nodes.get(worker.node_id))[0] == before, "it may be late, from before the report that is stored"
    worker.confirmed = answer.report_digest
    await worker.beat()
    node, _ = await world.nodes.get(worker.node_id)
    assert (node.health, len(node.report.backends), worker.confirmed) == ("healthy", 1, digest_of(worker.report))


async def test_a_node_that_was_away_is_healthy_after_what_it_did_was_settled(world: World, time: Time) -> None:
    worker = await worker_of(world)
    await world.set_health(worker.node_id, "offline")
    intent = await world.intent(await world.request("delete", "first", name="engine"))
    time.passed += 1
    await worker.beat()
    time.passed += 1
    await worker.beat()
    assert await world.health(worker.node_id) == "healthy"
    assert (await world.intent_now(intent)).state == "succeeded"
    assert world.bus.take() == []


async def test_a_replica_that_no_report_has_shown_is_forgotten_by_an_unchanged_one(world: World, time: Time) -> None:
    worker = await worker_of(world)
    replica = Replica(
        node_id=worker.node_id, model="tiny", slot=0, revision="r", address="h:1", nonce="n", backend="engine"
    )
    now = await world.now()
    await world.store.transaction(lambda connection: replicas.put(connection, replica, now))
    await world.reports.heartbeat(worker.node_id, worker.unchanged())
    assert len(await world.store.transaction(replicas.every)) == 1, "it may have been started after the report"
    time.passed += 1
    await worker.beat()
    time.passed += 1
    await worker.beat()
    assert await world.store.transaction(replicas.every) == []


async def test_a_replica_that_is_shown_is_kept_and_soon_costs_nothing(world: World, time: Time) -> None:
    worker = await worker_of(world)
    replica = Replica(
        node_id=worker.node_id, model="tiny", slot=0, revision="r", address="h:1", nonce="n", backend="engine"
    )
    now = await world.now()
    await world.store.transaction(lambda connection: replicas.put(connection, replica, now))
    await worker.beat(replicas=(running("n"),))
    for _ in range(3):
        time.passed += 40
        await worker.beat()
    with counted(world) as found:
        await worker.beat()
    assert len(found) <= 4, found
    assert len(await world.store.transaction(replicas.every)) == 1


# Other versions ----------------------------------------------------------------------------------


async def test_a_worker_that_knows_no_digests_sends_all_and_is_stored_once(world: World, time: Time) -> None:
    node = await world.join("first")
    report = Report(boot_id="b", sequence=1, mark=1.0, boot_mark=1.0, backends=(installed("engine", "1"),))
    answer = await world.reports.heartbeat(node.id, HeartbeatRequest(report=report))
    assert answer.report_digest == ""
    stored = await stored_report(world, node.id)
    for sequence in range(2, 5):
        time.passed += 1
        again = msgspec.structs.replace(report, sequence=sequence, mark=answer.mark)
        answer = await world.reports.heartbeat(node.id, HeartbeatRequest(report=again))
    assert await stored_report(world, node.id) == stored
    found, _ = await world.nodes.get(node.id)
    assert (found.report.sequence, found.health) == (4, "healthy")
    assert found.report.mark > 1.0
    changed = msgspec.structs.replace(report, sequence=5, backends=())
    await world.reports.heartbeat(node.id, HeartbeatRequest(report=changed))
    assert (await world.nodes.get(node.id))[0].report.backends == ()


async def test_what_a_frontend_of_an_early_version_stores_counts_where_it_is_newer(world: World, time: Time) -> None:
    worker = await worker_of(world)

    async def sql(statement: str, **values: object) -> None:
        await world.store.transaction(lambda connection: connection.execute(text(statement), values).close())

    await worker.beat()
    time.passed += STALE_SECONDS / 3
    heard_at = await world.now()
    amounts = '{"cores":7}'
    await sql("update nodes set last_heartbeat = :at, capacity = :amounts", at=heard_at, amounts=amounts)
    node, _ = await world.nodes.get(worker.node_id)
    assert (node.last_heartbeat, node.capacity.cores) == (heard_at, 7)
    # It stores a report without a word on its digest: what is stored counts.
    restarted = '{"boot_id":"new","sequence":1,"mark":5.0,"boot_mark":5.0}'
    await sql("update nodes set report = :report", report=restarted)
    node, _ = await world.nodes.get(worker.node_id)
    assert (node.report.boot_id, node.report.sequence, node.report.mark) == ("new", 1, 5.0)


@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_a_node_that_the_version_before_added_is_heard(world: World, time: Time, is_confirmed: bool) -> None:
    worker = await worker_of(world)
    time.passed += 5

    def forget(connection: db.Connection) -> None:
        connection.execute(text("delete from node_liveness"))

    await world.store.transaction(forget)
    worker.confirmed = worker.confirmed if is_confirmed else ""
    answer = await worker.beat()
    assert bool(answer.report_digest) is not is_confirmed, "a digest alone says nothing here"
    await worker.beat()
    node, _ = await world.nodes.get(worker.node_id)
    assert node.last_heartbeat >= answer.mark
    assert worker.confirmed


async def test_another_version_of_the_frontend_asks_for_the_report_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may know fields that this one dropped."""
    worker = await worker_of(world)
    monkeypatch.setattr(enginehouse, "__version__", "99")
    assert (await worker.beat()).report_digest == ""
    assert (await worker.beat()).report_digest == digest_of(worker.report)


async def test_heartbeats_without_a_report_keep_what_is_stored(world: World) -> None:
    worker = await worker_of(world, backends=(installed("engine", "1"),))
    before = (await world.nodes.get(worker.node_id))[0].report
    answer = await world.reports.heartbeat(worker.node_id, HeartbeatRequest(available_ram=5))
    node, _ = await world.nodes.get(worker.node_id)
    assert (answer.report_digest, node.report, node.health) == ("", before, "healthy")
