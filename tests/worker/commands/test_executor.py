"""Commands: once each, one at a time per subject, joined, refused, answered again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.worker.world import KEY, World, ask, is_reachable, silent, tiny_chat, until, xllamacpp

from enginehouse.core.action import Action, InstallBackend, PullModel, RemoveBackend, StartReplica, StopReplica
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Outcome
from enginehouse.core.wire import Command
from enginehouse.worker.commands.work import Work

START = StartReplica(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)


def work(
    action: Action, intent: str = "i", generation: int = 1, attempt: int = 1, fence: int = 1, expected: str = ""
) -> Work:
    command = Command(intent=IntentId(intent), generation=generation, attempt=attempt, fence=fence)
    return Work(action=action, command=command, expected_address=expected)


async def perform(world: World, action: Action, intent: str, generation: int = 1) -> Outcome:
    return await world.actions.perform(work(action, intent, generation), silent)


@pytest.fixture
def empty(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_an_upgrade_while_running_stops_the_old_process_last_and_the_next_start_is_the_new_tree(
    world: World,
) -> None:
    first = await perform(world, START, "start")
    upgrade = InstallBackend(backend="llama-cpp", resolved=xllamacpp("2"), upgrade=True)
    served_until_the_swap: list[bool] = []

    def report(phase: str, *_: object) -> None:
        if phase == "extracting":
            served_until_the_swap.append(is_reachable(first.address))

    upgraded = await world.actions.perform(work(upgrade, "upgrade", generation=2), report)
    assert upgraded == Outcome(
        digest=xllamacpp("2").digest, stopped=("tiny-chat#0",), message="from 2026.10.11549-1 to 2"
    )
    assert served_until_the_swap == [True]
    second = await perform(world, msgspec.structs.replace(START), "again", generation=2)
    assert second.nonce != first.nonce
    assert "Paris" in await asyncio.to_thread(ask, second.address, "What is the capital of France?")


async def test_a_failed_upgrade_leaves_the_same_process_serving(world: World) -> None:
    first = await perform(world, START, "start")
    wrong = msgspec.structs.replace(xllamacpp(), digest="sha256:0")
    outcome = await perform(world, InstallBackend(backend="x", resolved=wrong, upgrade=True), "upgrade", 2)
    assert (outcome.code, outcome.can_heal) == ("digest_mismatch", False)
    assert [replica.nonce for replica in world.supervisor.running()] == [first.nonce]


async def test_a_delete_stops_the_processes_first_and_says_which(world: World) -> None:
    await perform(world, START, "start")
    outcome = await perform(world, RemoveBackend(backend="llama-cpp", directory="xllamacpp"), "delete", 2)
    assert outcome == Outcome(stopped=("tiny-chat#0",))
    assert world.trees.list_installed() == ()
    again = await perform(world, RemoveBackend(backend="llama-cpp", directory="xllamacpp"), "delete2", 3)
    assert again == Outcome(message="already_absent")


async def test_a_repeat_of_a_finished_attempt_is_answered_from_the_journal(world: World) -> None:
    first = await perform(world, START, "start")
    await world.supervisor.stop_all()
    assert await perform(world, START, "start") == first
    assert world.supervisor.running() == ()


async def test_a_repeat_of_a_running_intent_joins_it(world: World) -> None:
    async with asyncio.TaskGroup() as group:
        first = group.create_task(world.actions.perform(work(START, "start"), silent))
        await until(lambda: world.actions.running() == ("start",))
        repeat = group.create_task(world.actions.perform(work(START, "start", attempt=2, fence=2), silent))
    assert first.result() == repeat.result()
    assert first.result().succeeded
    assert world.actions.running() == ()
    assert {(one.intent, one.attempt) for one in world.journal.results()} == {("start", 1), ("start", 2)}


async def test_an_older_generation_or_fence_is_refused(world: World) -> None:
    await perform(world, PullModel(model=tiny_chat()), "new", generation=5)
    for generation, fence in ((4, 9), (5, 0)):
        old = work(PullModel(model=tiny_chat()), f"old{generation}", generation=generation, fence=fence)
        outcome = await world.actions.perform(old, silent)
        assert (outcome.code, outcome.can_heal) == ("conflict", False)


async def test_one_that_became_old_while_it_waited_ends_before_its_turn(world: World) -> None:
    removed = RemoveBackend(backend="x", directory="xllamacpp")
    install = InstallBackend(backend="x", resolved=xllamacpp())
    async with asyncio.TaskGroup() as group:
        async with world.actions._locks.hold("backend:xllamacpp"):
            older = group.create_task(world.actions.perform(work(removed, "older", generation=1), silent))
            await until(lambda: world.actions.running() == ("older",))
            newer = group.create_task(world.actions.perform(work(install, "newer", generation=2), silent))
            await until(older.done)
            assert world.actions.running() == ("newer",)
    assert (older.result().code, older.result().can_heal) == ("superseded", False)
    assert newer.result().succeeded
    assert {one.intent: one.outcome.code for one in world.journal.results()} == {"older": "superseded", "newer": ""}
    assert [backend.generation for backend in world.trees.list_installed() if not backend.is_meta] == [2]


async def test_a_cancelled_command_leaves_no_trace_in_the_journal(empty: World) -> None:
    async with asyncio.TaskGroup() as group:
        wanted = InstallBackend(backend="llama-cpp", resolved=xllamacpp())
        task = group.create_task(empty.actions.perform(work(wanted), silent))
        await until(lambda: (empty.place.backends / ".enginehouse" / "staging" / "xllamacpp").exists())
        task.cancel()
    assert empty.journal.results() == ()
    assert empty.actions.running() == ()
    assert [path.name for path in empty.place.backends.iterdir()] == [".enginehouse"]


async def test_a_stop_checks_the_address_in_both_forms(world: World) -> None:
    started = await perform(world, START, "start")
    port = started.address.rpartition(":")[2]
    stop = StopReplica(model="tiny-chat", slot=0)
    wrong = await world.actions.perform(work(stop, "wrong", 2, expected="10.0.0.1:1"), silent)
    assert (wrong.code, wrong.can_heal) == ("conflict", False)
    right = await world.actions.perform(work(stop, "right", 3, expected=f"localhost:{port}"), silent)
    assert right.stopped == ("tiny-chat#0",)
    assert await world.actions.perform(work(stop, "gone", 4), silent) == Outcome()


async def test_installs_of_one_backend_take_turns_and_starts_go_side_by_side(world: World) -> None:
    other = msgspec.structs.replace(tiny_chat(), name="second")
    await perform(world, PullModel(model=other), "pull")
    start_other = StartReplica(model=other, slot=0, directory="xllamacpp", key=KEY)
    async with asyncio.TaskGroup() as group:
        async with world.actions._locks.hold("backend:xllamacpp", exclusive=False):
            first = group.create_task(perform(world, START, "a"))
            second = group.create_task(perform(world, start_other, "b"))
            install = group.create_task(perform(world, InstallBackend(backend="x", resolved=xllamacpp("2")), "c", 2))
            await asyncio.wait([first, second], timeout=30)
            assert first.result().succeeded
            assert second.result().succeeded
            assert not install.done()
    assert install.result().stopped == ("second#0", "tiny-chat#0")
