"""Commands that a frontend carries out for LocalAI's workers: begun, ended, taken over and settled by their rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.frontend.localai.scripted import MODEL, TOKEN, CarryingWorld, MemoryWorker
from tests.frontend.world import Time, WatchedStore

from enginehouse.core import subjects
from enginehouse.core.action import PullModel, RemoveModel, StartReplica, StopReplica
from enginehouse.core.errors import Hopeless
from enginehouse.core.ids import OperationId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.store import replicas

START = StartReplica(model=MODEL, slot=0, directory="image", key="unused")


@pytest.fixture
async def carrying(sqlite_url: str, time: Time) -> AsyncIterator[CarryingWorld]:
    store = await WatchedStore.open(sqlite_url)
    assert isinstance(store, WatchedStore)
    made = CarryingWorld(store, time)
    await made.start()
    yield made
    store.close()


@asynccontextmanager
async def at_work(*worlds: CarryingWorld) -> AsyncIterator[None]:
    """Their carriers run, and what comes of it is stored."""
    async with asyncio.TaskGroup() as group:
        running = []
        for world in worlds:
            assert world.carrier is not None
            running.append(group.create_task(world.carrier.step()))
            running.append(group.create_task(_settling(world)))
        yield
        for task in running:
            task.cancel()


async def _settling(world: CarryingWorld) -> None:
    while True:
        await world.collector.replies_step()


async def until(probe: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while True:
            if probe():
                return
            await asyncio.sleep(0.01)


async def ended(world: CarryingWorld, intent: Intent) -> Intent:
    async with asyncio.timeout(10):
        while True:
            now = await world.now_of(intent.id)
            if not now.is_open:
                return now
            await asyncio.sleep(0.01)


async def with_worker(world: CarryingWorld, **fields: object) -> tuple[MemoryWorker, Intent]:
    """A worker, and a start that this frontend has claimed."""
    node = await world.join_go()
    worker = MemoryWorker(world.bus, node.id, **fields)  # type: ignore[arg-type]
    await worker.listen()
    return worker, await world.request_action(node, START)


async def test_a_start_is_not_sent_but_carried_out_and_becomes_a_replica(carrying: CarryingWorld) -> None:
    worker, intent = await with_worker(carrying)
    assert (intent.state, worker.heard) == ("running", [])
    async with at_work(carrying):
        done = await ended(carrying, intent)
    assert done.state == "succeeded"
    ((verb, request),) = worker.heard
    assert (verb, request) == (subjects.INSTALL, {"backend": "image", "model_id": "m"})
    ((target, options, seconds),) = carrying.engine.loaded
    assert (target.key, target.protocol, options["ModelPath"]) == (TOKEN, LOCALAI_GRPC, "/go/models/m")
    assert seconds > 300
    ((replica, _),) = await carrying.store.transaction(lambda c: replicas.on_node(c, intent.node_id))
    assert (replica.address, replica.checks_key, TOKEN in replica.key) == (target.address, False, False)
    await carrying.router.step()
    assert [route.key for route in carrying.router.routes()] == [TOKEN]


async def test_slots_of_one_model_are_processes_of_their_own_and_stopped_alone(carrying: CarryingWorld) -> None:
    worker, first = await with_worker(carrying)
    node, _ = await carrying.nodes.get(first.node_id)
    async with at_work(carrying):
        second = await carrying.request_action(node, msgspec.structs.replace(START, slot=1))
        for intent in (first, second):
            assert (await ended(carrying, intent)).state == "succeeded"
        assert set(worker.processes) == {"m#0", "m#1"}
        stop = await carrying.request_action(node, StopReplica(model="m", slot=1))
        assert (await ended(carrying, stop)).state == "succeeded"
    assert set(worker.processes) == {"m#0"}
    left = await carrying.store.transaction(lambda c: replicas.on_node(c, node.id))
    assert [one.slot for one, _ in left] == [0]


@pytest.mark.parametrize("has_stop", [True, False], ids=["model.stop", "older"])
async def test_whatever_has_the_slot_is_ended_before_a_start(carrying: CarryingWorld, has_stop: bool) -> None:
    carrying.bus._network._tells_no_responders = True
    worker, intent = await with_worker(carrying, has_stop=has_stop)
    worker.processes = {"m#0": 7, "other#0": 8}
    async with at_work(carrying):
        assert (await ended(carrying, intent)).state == "succeeded"
    assert worker.verbs() == [subjects.STOP_MODEL if has_stop else subjects.STOP, subjects.INSTALL]
    assert worker.processes["other#0"] == 8


async def test_a_removal_ends_the_processes_of_its_model_and_no_files_are_known_then(carrying: CarryingWorld) -> None:
    worker, start = await with_worker(carrying)
    node, _ = await carrying.nodes.get(start.node_id)
    async with at_work(carrying):
        await ended(carrying, start)
        pull = await carrying.request_action(node, PullModel(model=MODEL))
        assert (await ended(carrying, pull)).state == "succeeded"
        known, _ = await carrying.nodes.get(node.id)
        assert [one.name for one in known.report.models] == ["m"]
        removal = await carrying.request_action(node, RemoveModel(model="m"))
        assert (await ended(carrying, removal)).state == "succeeded"
    assert worker.processes == {}
    assert worker.heard[-1] == (subjects.DELETE_MODEL, {"model_name": "m"})
    known, _ = await carrying.nodes.get(node.id)
    assert known.report.models == ()


async def test_an_address_that_is_not_the_node_s_gets_no_token(carrying: CarryingWorld) -> None:
    """S2."""
    worker, intent = await with_worker(carrying)
    worker.host = "elsewhere"
    async with at_work(carrying):
        done = await ended(carrying, intent)
    assert (done.state, done.reason, carrying.engine.loaded) == ("failed", "address_refused", [])


async def test_a_file_server_on_another_host_gets_no_token(carrying: CarryingWorld) -> None:
    node = await carrying.join_go(http_address="elsewhere:50050")
    intent = await carrying.request_action(node, PullModel(model=MODEL))
    async with at_work(carrying):
        done = await ended(carrying, intent)
    assert (done.state, done.reason, carrying.servers.asked) == ("failed", "address_refused", [])


async def test_a_refusal_has_the_words_of_the_worker_or_the_engine(carrying: CarryingWorld) -> None:
    worker, intent = await with_worker(carrying)
    worker.error = "no card is free"
    async with at_work(carrying):
        done = await ended(carrying, intent)
        assert (done.state, "no card is free" in done.message) == ("failed", True)
        worker.error, carrying.engine.error = "", Hopeless("the engine refused the model: too old", code="load_failed")
        node, _ = await carrying.nodes.get(intent.node_id)
        done = await ended(carrying, await carrying.request_action(node, START))
    assert (done.state, done.reason) == ("failed", "load_failed")
    assert "too old" in done.message
    assert "the words of m#0" in done.message


async def test_a_cancelled_command_ends_and_its_process_is_stopped_by_the_next_poll(carrying: CarryingWorld) -> None:
    carrying.engine.gate.clear()
    worker, intent = await with_worker(carrying)
    async with at_work(carrying):
        await until(lambda: bool(carrying.engine.loaded))
        await carrying.cancellation.cancel(OperationId(intent.id), None, "someone")
        assert carrying.carrier is not None
        carrying.carrier.wake()
        await until(lambda: not carrying.carrier._carried)  # type: ignore[union-attr]
    assert (await carrying.now_of(intent.id)).state == "cancelled"
    worker.processes["stranger#0"] = 9
    (question,) = await carrying.listings.ask([intent.node_id], await carrying.now())
    question.backends = ()
    await carrying.listings.keep(question)
    assert set(worker.processes) == {"stranger#0"}, "what was not started from here is left alone"


async def test_a_command_that_was_taken_over_is_given_up_by_the_one_who_had_it(
    carrying: CarryingWorld, time: Time
) -> None:
    """The first frontend is frozen during its load, and thaws when the second has finished."""
    second = CarryingWorld(carrying.store, time, owner="second")
    await second.start()
    carrying.engine.gate.clear()
    worker, intent = await with_worker(carrying)
    far = MemoryWorker(second.bus, intent.node_id)
    await far.listen()
    async with at_work(carrying):
        await until(lambda: bool(carrying.engine.loaded))
        time.passed += 31  # its lease
        await second.dispatcher.renew_step()
        taken = await second.now_of(intent.id)
        assert (taken.owner, taken.attempt, taken.fence) == ("second", intent.attempt, intent.fence + 1)
        async with at_work(second):
            assert (await ended(second, intent)).state == "succeeded"
        carrying.engine.error = Hopeless("the connection broke")
        carrying.engine.gate.set()
        await until(lambda: not carrying.carrier._carried)  # type: ignore[union-attr]
    assert (await carrying.now_of(intent.id)).state == "succeeded", "the late failure of the first does not count"
    assert worker.verbs() == [subjects.INSTALL], "it did not end the process of the second"


async def test_a_failure_of_a_former_owner_does_not_count(carrying: CarryingWorld, time: Time) -> None:
    _, intent = await with_worker(carrying)
    second = CarryingWorld(carrying.store, time, owner="second")
    time.passed += 31
    await second.dispatcher.renew_step()
    time.passed += 31  # the second is gone, too: its lease no longer keeps replies from being stored
    carrying.collector.settle(intent, Outcome(code="load_failed", message="late"))
    await carrying.collector.replies_step()
    assert (await carrying.now_of(intent.id)).state == "running"


async def test_a_frontend_that_was_frozen_during_a_push_ends_no_process_of_the_next_owner(
    carrying: CarryingWorld, time: Time
) -> None:
    carrying.servers.gate.clear()
    worker, intent = await with_worker(carrying)
    worker.processes = {"m#0": 50_099}  # of the second, which has got further
    assert carrying.carrier is not None
    async with asyncio.TaskGroup() as group:
        working = group.create_task(carrying.carrier._carry(intent))
        await until(lambda: bool(carrying.servers.asked))
        time.passed += 31
        await CarryingWorld(carrying.store, time, owner="second").dispatcher.renew_step()
        carrying.servers.gate.set()
        await working
    assert (worker.heard, worker.processes) == ([], {"m#0": 50_099})
    await carrying.collector.replies_step()
    assert (await carrying.now_of(intent.id)).owner == "second"
