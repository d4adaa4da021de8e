"""Child processes of this machine: a group of their own that dies with us, known by a nonce that only they carry.

No signal goes to a process whose identity is not proven, and a stop ends the whole group. `spawn` must be called on
the thread that lives as long as the program (the event loop's): the kernel ends a child when the *thread* that made it
ends.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from enginehouse.host.confinement import UNCONFINED_EXIT, Confined

NONCE = "ENGINEHOUSE_NONCE"
_PR_SET_PDEATHSIG = 1
_IS_LINUX: bool = sys.platform == "linux"  # a value, so that the type checker reads both branches
_POLL_SECONDS = 0.02
# Loaded before any fork: between fork and exec nothing may be imported or looked up.
_libc = ctypes.CDLL(None) if _IS_LINUX else None
# What an engine may know of our environment: how to find programs and graphics cards, and no secret.
_ENGINE_VARIABLES = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH"}
_ENGINE_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "VK_", "OMP_")


def die_with_parent(then: Callable[[], None] | None = None) -> Callable[[], None] | None:
    """What a child of ours runs before exec, so that the kernel kills it when we die; None where the system cannot.

    `then` follows.
    """
    if _libc is None:
        return then
    prctl, parent = _libc.prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before we asked
        if then is not None:
            then()

    return ask_kernel


def _before_exec(confined: Confined | None) -> Callable[[], None] | None:
    """What a child runs before exec. Its user is changed here, not by options of `subprocess_exec`, which uvloop does
    not have; and first, because that undoes what the kernel was asked for.
    """
    if confined is None:
        return die_with_parent()
    rest = die_with_parent(confined.enter)
    user = confined.user
    if user is None:
        return rest
    setgroups, setgid, setuid, leave = os.setgroups, os.setgid, os.setuid, os._exit
    groups, gid, uid = list(user.groups), user.gid, user.uid

    def enter() -> None:
        try:
            setgroups(groups)
            setgid(gid)
            setuid(uid)
        except OSError:
            leave(UNCONFINED_EXIT)
        if rest is not None:
            rest()

    return enter


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name in _ENGINE_VARIABLES or name.startswith(_ENGINE_PREFIXES)
    }


async def spawn(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    log: Path,
    inherit: Sequence[int] = (),
    confined: Confined | None = None,
) -> asyncio.subprocess.Process:
    """A child in its own session and group; stdout and stderr go to the end of `log`, and of our descriptors it gets
    only those in `inherit`. Where `confined` is given, it is that from its first instruction on."""
    # Append mode, so that the file can be cut while the child writes to it.
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            cwd=directory,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            close_fds=True,
            pass_fds=tuple(inherit),
            start_new_session=True,
            preexec_fn=_before_exec(confined),
        )
    finally:
        os.close(descriptor)


async def run_briefly(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    limit_seconds: float,
    confined: Confined | None = None,
) -> tuple[int, str]:
    """Run a short program to its end: its code (negative for a signal) and its last line. `TimeoutError` kills it."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_before_exec(confined),
    )
    try:
        async with asyncio.timeout(limit_seconds):
            _, output = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return process.returncode or 0, lines[-1] if lines else ""


def start_time(pid: int) -> float | None:
    """When the process started; None when there is none."""
    if _IS_LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # The name in parentheses may hold anything, so fields are counted from the last one.
        return float(stat.rpartition(b")")[2].split()[19])
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def carriers(nonce: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Live processes that carry a nonce (or this very one), with their environment: engines and their descendants."""
    for process in psutil.process_iter():
        try:
            if not _may_carry(process.pid):
                continue
            # Engines of root may run as another user; their nonce is proof enough.
            if os.getuid() not in (0, process.uids().real) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        found = environment.get(NONCE)
        if found and (not nonce or found == nonce):
            yield process.pid, environment


def _may_carry(pid: int) -> bool:
    """A look at the bytes first, where there are any: the full look at every process of a machine takes 20 ms."""
    if not _IS_LINUX:
        return True
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        return NONCE.encode() in file.read()


def is_listening(pid: int, port: int) -> bool:
    """Whether the server on `port` is this process or a descendant, and not a stranger that took the port first."""
    try:
        process = psutil.Process(pid)
        # Finding its descendants means looking at every process of the machine; most engines have none.
        return _listens(process, port) or any(_listens(child, port) for child in process.children(recursive=True))
    except (psutil.Error, OSError):
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in process.net_connections(kind="tcp")
    )


def connections_to(pid: int, port: int) -> int:
    """How many others are connected to a port of this process or of one that it started."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(
            connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
            for one in family
            for connection in one.net_connections("tcp")
        )
    except (psutil.Error, OSError):
        return 0


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def stop_group(process: asyncio.subprocess.Process, grace_seconds: float) -> None:
    """End the whole group of a child: politely, then not, waiting until no member is left.

    The number of a group is not given to anyone else while a member lives, so the group is safe to signal after its
    leader has gone.
    """
    group = process.pid
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None or is_group_alive(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await process.wait()
                while is_group_alive(group):  # noqa: ASYNC110 - the kernel tells only of our own child
                    await asyncio.sleep(_POLL_SECONDS)
                return


def kill_group(process: asyncio.subprocess.Process) -> None:
    """At once, for whoever is in `stop_group` and does not want to wait: that goes on until no member is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """What asks a program to end in order; a terminal that closes too, unless whoever started it (nohup) said no."""
    is_deaf = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if is_deaf else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kill_leftovers(nonce: str, limit_seconds: float) -> int:
    """Kill every process that carries `nonce`: what an earlier worker left. How many there were. Blocks."""
    found = [psutil.Process(pid) for pid, _ in carriers(nonce)]
    for process in found:
        # psutil compares the start time again before it signals.
        with contextlib.suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + limit_seconds
    while any(_is_alive(process) for process in found) and time.monotonic() < end:
        # Only looked at: one that is a child of ours is the loop's to reap, or its end would never be noticed.
        time.sleep(_POLL_SECONDS)
    return len(found)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_lines(log: Path, count: int = 1, limit_bytes: int = 16 * 1024) -> list[str]:
    """The last non-empty lines of a log, from its last `limit_bytes`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]
