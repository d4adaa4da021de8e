"""Rows of the fault table about the supervisor, for engines of both protocols: real processes that end, fork, print,
take their time and hold on to ports.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.worker.engines.kinds import KINDS, engines_of, start_of, write_engine
from tests.worker.world import World, running_world, silent, tiny_chat, until

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.replica import EngineProtocol
from enginehouse.host import processes
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.restarts import RestartRules, Restarts
from enginehouse.worker.engines.supervisor import LOG_BYTES

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
CRASHES = 500 if IS_PROOF else 8  # of F-086
STARTS = 50 if IS_PROOF else 9  # of F-087
MEBIBYTE = 1024 * 1024
pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with running_world(tmp_path / "data") as made:
        for name in ("tiny-chat", "other"):
            await made.models.pull(msgspec.structs.replace(tiny_chat(), name=name), 1, silent)
        yield made


def zombies() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.is_running() and one.status() == psutil.STATUS_ZOMBIE]


async def test_a_crash_loop_leaves_no_zombie_no_descriptor_and_other_engines_alone(
    world: World, kind: EngineProtocol
) -> None:
    """F-086. The pauses and the bound are in test_restarts.py."""
    rules = RestartRules(limit=CRASHES, first_seconds=0.0, window_seconds=3600.0)
    world.supervisor._restarts = Restarts(rules, asyncio.get_running_loop().time)
    write_engine(world.place.backends / "steady", kind)
    write_engine(world.place.backends / "stub", kind, dies_seconds=0.3)
    steady = await world.supervisor.start(start_of("steady", model="other"))
    before = psutil.Process().num_fds()
    await world.supervisor.start(start_of())
    await until(lambda: world.supervisor.failed() != (), limit_seconds=5.0 * CRASHES)
    assert f"ended {CRASHES + 1} times" in world.supervisor.failed()[0].message
    assert zombies() == []
    await until(lambda: psutil.Process().num_fds() <= before)
    assert [one.nonce for one in world.supervisor.running()] == [steady.nonce]
    assert len(list(world.place.processes.iterdir())) == 1, "only the record of the one that runs"
    ports = world.supervisor._ports
    assert ports is not None
    assert list(ports._taken) == [int(steady.address.rpartition(":")[2])]


async def test_a_narrow_range_of_ports_skips_a_foreign_one_and_tells_when_it_is_used_up(
    world: World, kind: EngineProtocol
) -> None:
    """F-087."""
    now = 0.0
    write_engine(world.place.backends / "stub", kind)
    first = world.place.base_port
    ports = world.supervisor._ports = Ports(first, lambda: now, count=3)

    async def rests_are_over(engines: int) -> None:
        """The port of an engine that was replaced is released after the start of the new one: it rests from then on."""
        nonlocal now
        await until(lambda: len(ports._taken) == engines)
        now += 20.0

    with socket.create_server(("127.0.0.1", first + 1)):
        used = set()
        for number in range(STARTS):
            await rests_are_over(min(number, 1))
            started = await world.supervisor.start(start_of(key=f"key-{number}"))
            used.add(int(started.address.rpartition(":")[2]) - first)
        assert used <= {0, 2}
        await rests_are_over(1)
        await world.supervisor.start(start_of(model="other"))
        with pytest.raises(Unavailable) as caught:
            await world.supervisor.start(start_of(key="one more"))
        assert "of 3, engines use" in caught.value.message
        assert "--base-port" in caught.value.message
        await rests_are_over(1)
        await world.supervisor.start(start_of(key="one more"))


async def test_a_slow_start_succeeds_only_when_it_answers_and_a_death_is_told_at_once(
    world: World, kind: EngineProtocol
) -> None:
    """F-088."""
    write_engine(world.place.backends / "slow", kind, start_seconds=3.0)
    write_engine(world.place.backends / "dying", kind, start_seconds=0.5, ends="the driver is too old for this card")
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(world.supervisor.start(start_of("slow", model="other")))
        with pytest.raises(Hopeless, match="the driver is too old for this card") as caught:
            await world.supervisor.start(start_of("dying"))
        # While the other one is still starting, however loaded the machine is.
        assert not slow.done()
        assert world.supervisor.running() == ()
        await slow
    assert time.monotonic() - began >= 3.0
    assert caught.value.code == "backend_exited"


async def test_a_start_that_takes_too_long_ends_its_own_process_and_leaves_its_neighbours_alone(
    world: World, kind: EngineProtocol
) -> None:
    """F-071. The limit of a load over gRPC is in tests/engine/localai; it ends the same way."""
    write_engine(world.place.backends / "steady", kind)
    write_engine(world.place.backends / "stub", kind, start_seconds=60.0)
    steady = await world.supervisor.start(start_of("steady", model="other"))
    before = {one.pid for one in engines_of(world)}
    impatient = msgspec.structs.replace(world.place.installing, stall_seconds=1.0)
    world.supervisor._starter._options = msgspec.structs.replace(world.place, installing=impatient)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"cannot start tiny-chat: its engine has been idle for 1 s") as caught:
        await world.supervisor.start(start_of())
    assert caught.value.code == "stalled"
    assert time.monotonic() - began < 30.0, "it does not wait for the engine"
    assert [one.nonce for one in world.supervisor.running()] == [steady.nonce]
    assert {one.pid for one in engines_of(world)} == before
    assert {one.pid for one in psutil.Process().children(recursive=True)} >= before
    # Its watcher cleans up after it.
    await until(lambda: [one.stem for one in world.place.processes.iterdir()] == [steady.nonce])
    assert zombies() == []


async def test_the_key_of_an_engine_is_not_in_what_is_told_of_its_end(world: World, kind: EngineProtocol) -> None:
    """F-088: the last words are shown to people."""
    key = "a-key-that-nobody-may-read"
    write_engine(world.place.backends / "stub", kind, ends=f"cannot listen with {key}")
    with pytest.raises(EnginehouseError, match="cannot listen with …") as caught:
        await world.supervisor.start(start_of(key=key))
    assert key not in caught.value.message


@pytest.mark.parametrize("deaf", [False, True])
async def test_a_stop_ends_what_an_engine_started_and_let_go(world: World, kind: EngineProtocol, deaf: bool) -> None:
    """F-089, and F-025 where it does not listen."""
    write_engine(world.place.backends / "stub", kind, forks=True, ignores_sigterm=deaf)
    await world.supervisor.start(start_of())
    await until(lambda: len(engines_of(world)) >= 2)
    every = engines_of(world)
    await world.supervisor.stop("tiny-chat#0")
    await until(lambda: not any(_lives(one) for one in every), limit_seconds=10.0)


async def test_a_worker_ends_the_engines_of_its_former_life_before_it_starts_new_ones(
    tmp_path: Path, kind: EngineProtocol
) -> None:
    """F-090. The engine does not die with its parent: it is started here, with the nonce of a record."""
    directory = tmp_path / "data"
    made = World(directory)
    tree = write_engine(made.place.backends / "stub", kind)
    await made.models.pull(tiny_chat(), 1, silent)
    nonce, address = "of-a-former-life", f"127.0.0.1:{made.place.base_port}"
    (made.place.processes / f"{nonce}.json").write_text(
        f'{{"nonce":"{nonce}","process_key":"tiny-chat#0","directory":"stub"}}'
    )
    description = directory / "description"
    description.write_text('{"key": ""}')
    environment = {**os.environ, processes.NONCE: nonce, "ENGINEHOUSE_MODEL_FILE": str(description)}
    left = await asyncio.create_subprocess_exec(tree / "run.sh", "--addr", address, env=environment)
    try:
        await until(_listens(left.pid, made.place.base_port))
        async with running_world(directory) as world:
            async with asyncio.timeout(10):
                assert await left.wait() < 0
            await world.supervisor.start(start_of())
            assert len(engines_of(world)) == 1
            assert not list(processes.processes_with_nonce(nonce))
    finally:
        if left.returncode is None:
            left.kill()


async def test_an_engine_that_prints_one_endless_line_costs_little_memory_and_no_second(
    world: World, kind: EngineProtocol
) -> None:
    """F-091. The log is a file of the engine's own, so no reader of the worker can hold the engine up."""
    write_engine(world.place.backends / "stub", kind, prints_bytes=64 * MEBIBYTE)
    before, longest = psutil.Process().memory_info().rss, 0.0
    over = False

    async def watch_the_loop() -> None:
        nonlocal longest
        last = time.monotonic()
        while not over:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    async with asyncio.TaskGroup() as group:
        group.create_task(watch_the_loop())
        await world.supervisor.start(start_of())
        await until(lambda: _size_of_logs(world) <= LOG_BYTES)
        world.supervisor.logs.lines("tiny-chat")
        over = True
    assert longest < 1.0
    assert psutil.Process().memory_info().rss - before < 16 * MEBIBYTE


def _listens(pid: int, port: int) -> Callable[[], bool]:
    return lambda: processes.is_listening(pid, port)


def _size_of_logs(world: World) -> int:
    return sum(log.stat().st_size for log in world.place.engine_logs.glob("*.log"))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
