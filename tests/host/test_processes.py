"""Child processes: a group of their own, known by more than a pid, ended whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from enginehouse.host import processes

# A child that starts a grandchild, tells both pids, and lets neither end at SIGTERM.
STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print(os.getpid(), child.pid, flush=True)
signal.pause()
"""
PARENT = """
import asyncio, sys
from pathlib import Path
from enginehouse.host import processes

async def main():
    environment = {processes.NONCE: "a-nonce", "PATH": "/usr/bin:/bin"}
    child = await processes.spawn(
        ["/bin/sh", "-c", "exec sleep 600"], directory=Path("/"), environment=environment, log=Path(sys.argv[1])
    )
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def until_gone(pid: int, limit_seconds: float = 5.0) -> None:
    end = time.monotonic() + limit_seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, f"process {pid} is still there"
        await asyncio.sleep(0.01)


async def spawned(tmp_path: Path, script: str, nonce: str = "n") -> asyncio.subprocess.Process:
    return await processes.spawn(
        [sys.executable, "-u", "-c", script],
        directory=tmp_path,
        environment={processes.NONCE: nonce, "PATH": os.environ["PATH"]},
        log=tmp_path / "log",
    )


async def lines_of(log: Path, count: int) -> list[str]:
    end = time.monotonic() + 10
    while len(lines := processes.last_lines(log, count)) < count:
        assert time.monotonic() < end, "nothing was written"
        await asyncio.sleep(0.01)
    return lines


async def test_a_stop_ends_the_whole_group_even_one_that_will_not(tmp_path: Path) -> None:
    process = await spawned(tmp_path, STUBBORN)
    ((child, grandchild),) = [line.split() for line in await lines_of(tmp_path / "log", 1)]
    started = time.monotonic()
    await processes.stop_group(process, 0.3)
    assert time.monotonic() - started < 3
    assert process.returncode == -signal.SIGKILL
    await until_gone(int(child))
    await until_gone(int(grandchild))


async def test_a_polite_one_is_not_killed(tmp_path: Path) -> None:
    process = await spawned(tmp_path, "import signal; print('up'); signal.pause()")
    await lines_of(tmp_path / "log", 1)
    await processes.stop_group(process, 10)
    assert process.returncode == -signal.SIGTERM
    await processes.stop_group(process, 10)


async def test_a_child_dies_with_a_killed_parent(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert psutil.pid_exists(pid)
    parent.kill()
    await parent.wait()
    await until_gone(pid)


async def test_a_process_is_known_by_the_nonce_it_carries(tmp_path: Path) -> None:
    process = await spawned(tmp_path, "import signal; print('up'); signal.pause()", nonce="right")
    await lines_of(tmp_path / "log", 1)
    assert processes.start_time(process.pid) is not None
    assert [pid for pid, _ in processes.processes_with_nonce("right")] == [process.pid]
    assert [pid for pid, _ in processes.processes_with_nonce("wrong")] == []
    await processes.stop_group(process, 5)
    assert [pid for pid, _ in processes.processes_with_nonce("right")] == []
    assert processes.start_time(process.pid) is None


async def test_a_brief_program_tells_its_end(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"]}

    async def run(script: str, limit_seconds: float = 10.0) -> tuple[int, str]:
        return await processes.run_briefly(
            ["/bin/sh", "-c", script], directory=tmp_path, environment=environment, limit_seconds=limit_seconds
        )

    assert await run("echo first >&2; echo last >&2; exit 3") == (3, "last")
    assert await run("kill -ILL $$") == (-signal.SIGILL, "")
    with pytest.raises(TimeoutError):
        await run("sleep 600", limit_seconds=0.2)


async def test_a_stranger_on_the_port_is_not_our_server() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    async with server:
        assert processes.is_listening(os.getpid(), port)
        assert not processes.is_listening(other.pid, port)
    other.kill()
    await other.communicate()


def test_an_engine_is_told_how_to_find_its_card_and_no_secret() -> None:
    environment = {"PATH": "p", "CUDA_VISIBLE_DEVICES": "0", "ENGINEHOUSE_TOKEN": "s", "AWS_SECRET_ACCESS_KEY": "s"}
    assert processes.engine_environment(environment) == {"PATH": "p", "CUDA_VISIBLE_DEVICES": "0"}


def test_the_last_lines_of_a_log_come_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.last_lines(log) == []
    log.write_bytes(b"x" * 100_000 + b"\none\n\n  two  \n\xff\n")
    assert processes.last_lines(log, 3) == ["one", "two", "\ufffd"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_connections_count_before_the_process_has_accepted_them(tmp_path: Path, host: str) -> None:
    family = "socket.AF_INET6" if ":" in host else "socket.AF_INET"
    script = f"""
import signal, socket
server = socket.create_server(("{host}", 0), family={family})
print(server.getsockname()[1], flush=True)
signal.pause()
"""
    child = await spawned(tmp_path, script)
    try:
        (line,) = await lines_of(tmp_path / "log", 1)
        port = int(line)
        assert processes.connections_to(child.pid, port) == 0
        _, writer = await asyncio.open_connection(host, port)
        assert processes.connections_to(child.pid, port) == 1
        writer.close()
        await writer.wait_closed()
        end = time.monotonic() + 5.0
        while processes.connections_to(child.pid, port):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
    finally:
        await processes.stop_group(child, 0.1)
    assert processes.connections_to(child.pid, port) == 0
