"""The supervisor with the real engine: it answers, is proven, noticed, replaced and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.worker.world import (
    KEY,
    World,
    ask,
    is_reachable,
    link_tree,
    nothing,
    running_world,
    silent,
    tiny_chat,
    until,
    xllamacpp,
)

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.model import ModelOptions
from enginehouse.host import processes, threads
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.engines.ports import Ports
from enginehouse.worker.engines.process_table import StartRequest, Stopped
from enginehouse.worker.engines.supervisor import LOG_BYTES


def request(generation: int = 1, key: str = KEY, context_size: int = 512) -> StartRequest:
    model = msgspec.structs.replace(tiny_chat(), options=ModelOptions(context_size=context_size))
    return StartRequest(model=model, slot=0, directory="xllamacpp", key=key, generation=generation)


def wait_for_input(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process that does nothing until its input ends."""
    return subprocess.Popen([sys.executable, "-c", "input()"], env=dict(environment), stdin=subprocess.PIPE)


def pid_of(world: World) -> int:
    (nonce,) = {replica.nonce for replica in world.supervisor.running()}
    pids = [pid for pid, _ in processes.processes_with_nonce(nonce)]
    assert len(pids) == 1
    return pids[0]


async def test_the_engine_answers_with_its_key_and_with_no_other(world: World) -> None:
    started = await world.supervisor.start(request())
    assert await asyncio.to_thread(ask, started.address, "What is the capital of France?") == (
        "The capital of France is Paris."
    )
    with pytest.raises(OSError, match="401"):
        await asyncio.to_thread(ask, started.address, "hello", "another key")


async def test_a_second_start_of_the_same_gives_the_same_process_and_a_new_generation(world: World) -> None:
    first = await world.supervisor.start(request(generation=1))
    assert await world.supervisor.start(request(generation=2)) == first
    (replica,) = world.supervisor.running()
    assert (replica.generation, replica.nonce, replica.address) == (2, first.nonce, first.address)


async def test_another_key_or_revision_replaces_the_process(world: World) -> None:
    first = await world.supervisor.start(request())
    second = await world.supervisor.start(request(key="another"))
    assert second.nonce != first.nonce
    assert not await asyncio.to_thread(is_reachable, first.address)
    third = await world.supervisor.start(request(key="another", context_size=256))
    assert third.nonce != second.nonce
    assert len(world.supervisor.running()) == 1


async def test_a_replaced_tree_replaces_the_process(world: World, installed_tree: Path) -> None:
    first = await world.supervisor.start(request())
    directory = world.place.backends / "xllamacpp"
    directory.rename(world.place.backends / "old")
    link_tree(installed_tree, directory)
    second = await world.supervisor.start(request())
    assert second.nonce != first.nonce


async def test_a_process_that_dies_is_noticed_within_a_second_and_can_be_started_again(world: World) -> None:
    first = await world.supervisor.start(request())
    before = world.changes
    os.kill(pid_of(world), signal.SIGKILL)
    await until(lambda: world.supervisor.running() == () and world.changes > before, limit_seconds=1.0)
    second = await world.supervisor.start(request())
    assert second.nonce != first.nonce
    assert await asyncio.to_thread(is_reachable, second.address)


async def test_a_process_that_does_not_answer_is_not_taken_for_running(world: World) -> None:
    first = await world.supervisor.start(request())
    stopped = psutil.Process(pid_of(world))
    stopped.suspend()
    await until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    second = await world.supervisor.start(request())
    assert second.nonce != first.nonce


async def test_stopping_leaves_no_process_and_no_file(world: World) -> None:
    started = await world.supervisor.start(request())
    pid = pid_of(world)
    assert await world.supervisor.stop("tiny-chat#0")
    assert not psutil.pid_exists(pid)
    assert not await asyncio.to_thread(is_reachable, started.address)
    assert not await world.supervisor.stop("tiny-chat#0")
    await until(lambda: not any(world.place.processes.iterdir()))


async def test_the_key_is_in_no_command_line_and_its_file_is_gone_when_the_engine_is_ready(world: World) -> None:
    await world.supervisor.start(request())
    process = psutil.Process(pid_of(world))
    assert KEY not in " ".join(process.cmdline())
    assert KEY not in " ".join(process.environ().values())
    assert [path.suffix for path in world.place.processes.iterdir()] == [".json"]
    assert all(KEY.encode() not in path.read_bytes() for path in world.place.processes.iterdir())


async def test_the_engine_knows_no_secret_of_the_worker_and_inherits_no_descriptor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEHOUSE_TOKEN", "secret")
    readable, writable = os.pipe()
    os.set_inheritable(writable, True)
    try:
        await world.supervisor.start(request())
        process = psutil.Process(pid_of(world))
        assert "ENGINEHOUSE_TOKEN" not in process.environ()
        descriptors = [os.readlink(link.path) for link in os.scandir(f"/proc/{process.pid}/fd")]
        assert os.readlink(f"/proc/self/fd/{writable}") not in descriptors
    finally:
        os.close(readable)
        os.close(writable)


async def test_a_cut_off_model_file_is_refused_with_its_sizes_before_anything_starts(world: World) -> None:
    file = world.models.path_of(tiny_chat()) / "tiny-chat-2m-q8_0.gguf"
    os.truncate(file, 1000)
    with pytest.raises(Hopeless, match="1000 bytes instead of 2159040") as caught:
        await world.supervisor.start(request())
    assert caught.value.code == "digest_mismatch"


async def test_an_engine_that_ends_before_it_is_ready_tells_its_last_line(world: World) -> None:
    file = world.models.path_of(tiny_chat()) / "tiny-chat-2m-q8_0.gguf"
    with file.open("r+b") as damaged:
        damaged.write(b"JUNK")
    with pytest.raises(Hopeless, match="it is not a GGUF file") as caught:
        await world.supervisor.start(request())
    assert caught.value.code == "backend_exited"
    assert world.supervisor.running() == ()


async def test_a_missing_backend_or_file_is_told_plainly(world: World) -> None:
    with pytest.raises(EnginehouseError, match="the backend other is not installed"):
        await world.supervisor.start(msgspec.structs.replace(request(), directory="other"))
    (world.models.path_of(tiny_chat()) / "tiny-chat-2m-q8_0.gguf").unlink()
    with pytest.raises(Hopeless, match=r"tiny-chat-2m-q8_0\.gguf is not on this node"):
        await world.supervisor.start(request())


async def test_a_port_that_is_taken_in_the_last_moment_is_left_for_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    stranger = await asyncio.start_server(serve, "127.0.0.1", 0)
    taken = stranger.sockets[0].getsockname()[1]
    async with stranger:
        async with running_world(world.place.directory / "second") as second:
            place = msgspec.structs.replace(second.place, base_port=taken)
            link_tree(world.place.backends / "xllamacpp", second.place.backends / "xllamacpp")
            await second.models.pull(tiny_chat(), 1, silent)
            monkeypatch.setattr("enginehouse.host.hardware.is_port_free", lambda host, port: True)
            second.supervisor._ports = Ports(place.base_port, asyncio.get_running_loop().time)
            started = await second.supervisor.start(request())
            # The next one, or a later one where somebody else's connection has that.
            assert taken < int(started.address.rpartition(":")[2]) < taken + 10


async def test_an_engine_without_a_connection_for_a_moment_is_still_used(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend that has not heard of the stop opens a connection for its next request."""
    await world.supervisor.start(request())
    still_used = [1, 0, 0, 1, 0, 0, 0, 1]
    looks: list[int] = []

    def connections_to(pid: int, port: int) -> int:
        looks.append(still_used[len(looks)] if len(looks) < len(still_used) else 0)
        return looks[-1]

    monkeypatch.setattr(processes, "connections_to", connections_to)
    assert await world.supervisor.until_idle(request().process_key, 30.0)
    assert looks[: len(still_used)] == still_used


def threads_of(nonce: str) -> str:
    return next(environment[threads.THREADS] for _, environment in processes.processes_with_nonce(nonce))


async def test_an_engine_starts_with_a_smaller_share_where_all_cores_are_promised(
    tmp_path: Path, installed_tree: Path
) -> None:
    environment = {**os.environ, processes.NONCE: "somebody-else", threads.THREADS: "5000"}
    other = wait_for_input(environment)
    try:
        await until(lambda: any(pid == other.pid for pid, _ in processes.processes_with_nonce("somebody-else")))
        async with running_world(tmp_path, thread_budget=2) as world:
            link_tree(installed_tree, world.place.backends / "xllamacpp")
            await world.models.pull(tiny_chat(), 1, silent)
            for slot in range(3):
                started = await world.supervisor.start(msgspec.structs.replace(request(), slot=slot))
                assert threads_of(started.nonce) == "1"
                assert await asyncio.to_thread(ask, started.address, "What is the capital of France?") == (
                    "The capital of France is Paris."
                )
    finally:
        other.communicate(b"\n")


async def test_a_model_that_does_not_fit_into_memory_is_refused_with_both_figures(world: World) -> None:
    file = msgspec.structs.replace(tiny_chat().files[0], name="large.gguf", size_bytes=2**50)
    model = msgspec.structs.replace(tiny_chat(), files=(file,))
    path = world.models.path_of(model) / "large.gguf"
    path.touch()
    try:
        os.truncate(path, 2**40)  # as sparse as it gets
    except OSError as error:
        pytest.skip(f"no such file can be made here: {error}")
    model = msgspec.structs.replace(model, files=(msgspec.structs.replace(file, size_bytes=2**40),))
    with pytest.raises(Unavailable, match=r"its files are 1\.\d TiB and .* of memory are free") as caught:
        await world.supervisor.start(msgspec.structs.replace(request(), model=model))
    assert caught.value.code == "insufficient_capacity"
    assert not any(world.place.processes.iterdir())


async def test_an_upgrade_stops_only_the_processes_of_the_old_tree(world: World) -> None:
    await world.supervisor.start(request())
    inode = world.trees.inode_of("xllamacpp")
    assert await world.supervisor.stop_from("xllamacpp", newest=inode) == Stopped()
    await world.installer.install(InstallRequest(resolved=xllamacpp("2"), generation=2), silent, nothing)
    after = world.trees.inode_of("xllamacpp")
    assert await world.supervisor.stop_from("xllamacpp", newest=after) == Stopped(("tiny-chat#0",))


def start_other_worker(script: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=dict(environment),
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )


WORKER = """
    import asyncio, sys
    from pathlib import Path
    from tests.worker.engines.test_supervisor import request
    from tests.worker.world import running_world

    async def main() -> None:
        async with running_world(Path(sys.argv[1] if len(sys.argv) > 1 else {directory!r})) as world:
            started = await world.supervisor.start(request())
            print(started.address, started.nonce, flush=True)
            await asyncio.Event().wait()

    asyncio.run(main())
"""


async def test_killing_the_worker_kills_its_engine(world: World) -> None:
    other = start_other_worker(WORKER.format(directory=str(world.place.directory)), os.environ)
    try:
        assert other.stdout is not None
        address, nonce = (await asyncio.to_thread(other.stdout.readline)).split()
        assert await asyncio.to_thread(is_reachable, address)
    finally:
        other.kill()
        other.communicate()
    await until(lambda: not list(processes.processes_with_nonce(nonce)), limit_seconds=5.0)


async def test_what_a_killed_worker_left_is_killed_by_its_nonce_at_the_next_start(tmp_path: Path) -> None:
    environment = {**os.environ, processes.NONCE: "left-by-a-worker"}
    left, stranger = wait_for_input(environment), wait_for_input(os.environ)
    try:
        await until(lambda: any(True for _ in processes.processes_with_nonce("left-by-a-worker")))
        (tmp_path / "processes").mkdir()
        # The record names the pid of a stranger, as after a reboot: the nonce decides.
        record = f'{{"nonce":"left-by-a-worker","process_key":"m#0","directory":"d","pid":{stranger.pid},"started":1}}'
        (tmp_path / "processes" / "left-by-a-worker.json").write_text(record)
        async with running_world(tmp_path) as world:
            # A child of this test, and not of that worker: only its parent can make it vanish.
            assert left.wait(10) < 0
            assert stranger.poll() is None
            assert not any(world.place.processes.iterdir())
    finally:
        for process in (left, stranger):
            process.kill()
            process.communicate()


async def test_an_engine_that_prints_without_an_end_fills_no_disk_although_nobody_hears_the_worker(
    world: World,
) -> None:
    await world.supervisor.start(request())
    (log,) = (world.place.directory / "logs" / "engines").iterdir()
    with log.open("ab") as printed:  # as the engine has it open
        printed.write(b"x" * (LOG_BYTES + 1))
    await until(lambda: log.stat().st_size < LOG_BYTES)
