"""An engine that ends by itself comes back, bounded; what is asked for takes precedence. Both kinds of engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from tests.worker.engines.kinds import KINDS, engines_of, start_of, write_engine
from tests.worker.world import World, running_world, silent, tiny_chat, until

from enginehouse.core.errors import Hopeless
from enginehouse.core.replica import LOCALAI_GRPC, EngineProtocol
from enginehouse.worker.engines.restarts import RestartRules, Restarts

SOON = RestartRules(limit=3, first_seconds=0.05, longest_seconds=0.1)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_world(tmp_path / "data") as made:
        await made.models.pull(tiny_chat(), 1, silent)
        use(made, SOON)
        yield made


def use(world: World, rules: RestartRules) -> None:
    world.supervisor._restarts = Restarts(rules, asyncio.get_running_loop().time)


async def kill(world: World) -> None:
    """The engine ends by itself, as one that runs out of memory does."""
    (before,) = world.supervisor.running()
    engines_of(world)[0].send_signal(signal.SIGKILL)
    await until(lambda: before not in world.supervisor.running())


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_ends_is_started_again_with_the_same_request(world: World, kind: EngineProtocol) -> None:
    write_engine(world.place.backends / "stub", kind)
    first = await world.supervisor.start(start_of())
    await kill(world)
    await until(lambda: world.supervisor.running() != ())
    (again,) = world.supervisor.running()
    assert again.nonce != first.nonce
    assert (again.generation, again.protocol, again.checks_key) == (1, kind, True)
    # The same request finds it, so its key is the same; an engine of LocalAI's protocol has its model again.
    assert (await world.supervisor.start(start_of())).nonce == again.nonce
    if kind == LOCALAI_GRPC:
        assert [log for log in world.place.engine_logs.iterdir() if log.suffix == ".log"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_ends_again_and_again_is_given_up_with_its_last_words(
    world: World, kind: EngineProtocol
) -> None:
    write_engine(world.place.backends / "stub", kind, dies_seconds=0.5)
    await world.supervisor.start(start_of())
    await until(lambda: world.supervisor.failed() != ())
    await until(lambda: world.supervisor.running() == ())
    (failed,) = world.supervisor.failed()
    assert (failed.model_id, failed.replica_index) == ("tiny-chat", 0)
    assert "ended 4 times" in failed.message
    # Its server may have logged a lost connection before.
    assert re.search("with code 7: .*the card fell off the bus", failed.message)
    with pytest.raises(Hopeless, match=r"the card fell off the bus\. It can be started again in") as caught:
        await world.supervisor.start(start_of())
    assert caught.value.code == "backend_exited"
    # A stop is a word of somebody; then a start is tried again.
    await world.supervisor.stop("tiny-chat#0")
    await world.supervisor.start(start_of())
    assert world.supervisor.failed() == ()


async def test_the_pause_doubles_and_the_window_forgets(tmp_path: Path) -> None:
    now = 100.0
    kept = Restarts(RestartRules(limit=3, window_seconds=60.0, first_seconds=1.0, longest_seconds=3.0), lambda: now)
    request, identity = start_of(), ("r", "stub", 1)
    pauses = []
    for _ in range(3):
        pending = kept.note_end(request, identity, "with code 1")
        assert pending is not None
        pauses.append(pending.pause_seconds)
    assert pauses == [1.0, 2.0, 3.0]
    assert kept.note_end(request, identity, "with code 1") is None
    with pytest.raises(Hopeless, match="in 60 s"):
        kept.check(request, identity)
    kept.check(request, ("r", "stub", 2))  # another version of the engine
    assert len(kept.failed()) == 1
    now += 61.0
    kept.check(request, identity)
    assert kept.failed() == ()
    assert kept.note_end(request, identity, "with code 1") is not None


@pytest.mark.parametrize("kind", KINDS)
async def test_a_start_that_is_asked_for_takes_the_place_of_the_restart(world: World, kind: EngineProtocol) -> None:
    use(world, RestartRules(first_seconds=0.5))
    write_engine(world.place.backends / "stub", kind)
    await world.supervisor.start(start_of())
    await kill(world)
    asked = await world.supervisor.start(start_of(key="another-key"))
    await until(lambda: not [task for task in world.supervisor._watching if "_restart" in repr(task)])
    assert [one.nonce for one in world.supervisor.running()] == [asked.nonce]


@pytest.mark.parametrize("how", ["stop", "stop_model", "stop_from", "stop_all"])
async def test_what_is_stopped_does_not_come_back(world: World, how: str) -> None:
    use(world, RestartRules(first_seconds=0.3))
    write_engine(world.place.backends / "stub", "openai-http")
    await world.supervisor.start(start_of())
    await kill(world)
    match how:
        case "stop":
            assert not await world.supervisor.stop("tiny-chat#0")
        case "stop_model":
            await world.supervisor.stop_model("tiny-chat")
        case "stop_from":
            await world.supervisor.stop_from("stub")
        case _:
            await world.supervisor.stop_all()
    await until(lambda: not [task for task in world.supervisor._watching if "_restart" in repr(task)])
    assert world.supervisor.running() == ()


async def test_a_stop_that_comes_while_an_ended_engine_is_cleaned_up_after_wins(world: World) -> None:
    """The process is gone, and its restart is not decided yet."""
    use(world, RestartRules(first_seconds=0.01))
    write_engine(world.place.backends / "stub", "openai-http")
    for stop in (world.supervisor.stop_all, partial(world.supervisor.stop, "tiny-chat#0")):
        await world.supervisor.start(start_of())
        current = world.supervisor._running["tiny-chat#0"]
        current.process.kill()
        await current.process.wait()
        await stop()
        await until(lambda: not world.supervisor._watching)
        assert world.supervisor.running() == ()


async def test_a_restart_waits_for_a_delete_of_its_engine_and_then_does_not_happen(world: World) -> None:
    use(world, RestartRules(first_seconds=0.05))
    write_engine(world.place.backends / "stub", "openai-http")
    await world.supervisor.start(start_of())
    locks = world.supervisor._command_locks
    async with locks.hold("backend:stub"):
        await kill(world)
        waiting = locks._locks["backend:stub"].waiting
        await until(lambda: bool(waiting))
        await world.supervisor.stop_from("stub")
    await until(lambda: not [task for task in world.supervisor._watching if "_restart" in repr(task)])
    assert world.supervisor.running() == ()


async def test_an_engine_whose_files_are_gone_is_given_up(world: World) -> None:
    write_engine(world.place.backends / "stub", "openai-http")
    await world.supervisor.start(start_of())
    for path in (world.place.models / "tiny-chat").glob("*.gguf"):
        await asyncio.to_thread(os.truncate, path, 3)
    await kill(world)
    await until(lambda: world.supervisor.failed() != ())
    assert "truncated" in world.supervisor.failed()[0].message


async def test_leaving_does_not_wait_for_a_restart(tmp_path: Path) -> None:
    async with asyncio.timeout(30), running_world(tmp_path / "data") as world:
        await world.models.pull(tiny_chat(), 1, silent)
        use(world, RestartRules(first_seconds=600.0, longest_seconds=600.0))
        write_engine(world.place.backends / "stub", "openai-http")
        await world.supervisor.start(start_of())
        await kill(world)
