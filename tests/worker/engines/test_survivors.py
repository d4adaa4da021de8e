"""Processes that do not end when they are killed: their files stay, they are named, and nobody is sent to them."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.worker.world import KEY, World, is_reachable, link_tree, running_world, silent, tiny_chat, xllamacpp

from enginehouse.core import subjects, wire
from enginehouse.core.action import Action, InstallBackend, RemoveBackend, RemoveModel, StartReplica, StopReplica
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model
from enginehouse.core.wire import Command
from enginehouse.host import processes
from enginehouse.worker.commands.work import Work
from enginehouse.worker.engines.process_table import StartRequest
from enginehouse.worker.protocol.decode import encode_reply
from enginehouse.worker.protocol.stops import unload

Immortal = Callable[[str], None]


def second() -> Model:
    return msgspec.structs.replace(tiny_chat(), name="second")


async def perform(world: World, action: Action, generation: int = 2) -> Outcome:
    command = Command(intent=IntentId(f"i{generation}"), generation=generation, attempt=1, fence=1)
    return await world.actions.perform(Work(action=action, command=command), silent)


@pytest.fixture
def make_immortal(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Immortal]:
    """As a process is that waits in the kernel: signals change nothing."""
    spared: set[int] = set()
    stop_group = processes.stop_group

    async def stop(process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        if process.pid not in spared:
            await stop_group(process, grace_seconds)

    def spare(key: str) -> None:
        spared.add(world.supervisor._running[key].process.pid)

    monkeypatch.setattr(processes, "stop_group", stop)
    yield spare
    spared.clear()


async def start_both(world: World) -> None:
    await world.models.pull(second(), 1, silent)
    for model in (tiny_chat(), second()):
        await world.supervisor.start(StartRequest(model=model, slot=0, directory="xllamacpp", key=KEY))


async def test_a_delete_fails_keeps_the_directory_and_tells_what_it_stopped(
    world: World, make_immortal: Immortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    await start_both(world)
    make_immortal("second#0")
    remove = RemoveBackend(backend="llama-cpp", directory="xllamacpp")
    outcome = await perform(world, remove)
    assert (outcome.code, outcome.can_heal, outcome.stopped) == ("process_survived", True, ("tiny-chat#0",))
    assert "second#0 did not end after SIGKILL" in outcome.message
    assert [backend.name for backend in world.trees.list_installed()] == ["xllamacpp"]
    reply = wire.decode(encode_reply(subjects.DELETE, outcome, None), wire.BackendUpgradeReply, "the reply")
    assert (reply.success, reply.stopped_process_keys, reply.reports_stopped_processes) == (
        False,
        ("tiny-chat#0",),
        True,
    )
    assert world.supervisor.running() == ()  # nobody is sent to the survivor
    monkeypatch.undo()
    assert await perform(world, remove, 3) == Outcome(stopped=("second#0",))
    assert world.trees.list_installed() == ()


async def test_the_files_of_a_model_stay_where_its_process_does(world: World, make_immortal: Immortal) -> None:
    await start_both(world)
    make_immortal("tiny-chat#0")
    outcome = await perform(world, RemoveModel(model="tiny-chat"))
    assert outcome.code == "process_survived"
    assert {model.name for model in world.models.held_models()} == {"tiny-chat", "second"}


async def test_an_upgrade_succeeds_and_names_what_still_runs_from_the_old_version(
    world: World, make_immortal: Immortal
) -> None:
    """F-019."""
    await start_both(world)
    make_immortal("second#0")
    outcome = await perform(world, InstallBackend(backend="x", resolved=xllamacpp("2"), upgrade=True))
    assert (outcome.succeeded, outcome.stopped) == (True, ("tiny-chat#0",))
    assert outcome.message == "still running from the old version: second#0"
    again = StartReplica(model=second(), slot=0, directory="xllamacpp", key=KEY)
    assert (await perform(world, again, 3)).code == "process_survived"


async def test_a_stop_or_an_unload_says_so(world: World, make_immortal: Immortal) -> None:
    await start_both(world)
    address = world.supervisor._running["second#0"].address
    make_immortal("second#0")
    outcome = await perform(world, StopReplica(model="second", slot=0))
    reply = wire.decode(encode_reply(subjects.STOP_MODEL, outcome, None), wire.ModelStopReply, "the reply")
    assert (reply.matched, reply.terminated) == (True, False)
    assert reply.error.startswith("cannot stop second#0: process ")
    unloaded = await unload(world.parts, wire.encode(wire.ModelUnloadRequest(model_name="second")))
    assert not unloaded.succeeded
    assert await asyncio.to_thread(is_reachable, address)
    with pytest.raises(Unavailable):
        await world.supervisor.stop("second#0")


async def test_a_worker_leaves_all_the_same_and_the_next_one_ends_what_was_left(
    tmp_path: Path, installed_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(process: asyncio.subprocess.Process, grace_seconds: float) -> None:
        """As a process is that waits in the kernel."""

    async with asyncio.timeout(20):
        async with running_world(tmp_path) as world:
            link_tree(installed_tree, world.place.backends / "xllamacpp")
            await world.models.pull(tiny_chat(), 1, silent)
            request = StartRequest(model=tiny_chat(), slot=0, directory="xllamacpp", key=KEY)
            nonce = (await world.supervisor.start(request)).nonce
            monkeypatch.setattr(processes, "stop_group", refuse)
        assert list(processes.processes_with_nonce(nonce))
        monkeypatch.undo()
        async with running_world(tmp_path):
            assert not list(processes.processes_with_nonce(nonce))
