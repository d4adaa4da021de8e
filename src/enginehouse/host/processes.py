"""Child processes: each in a process group that ends with its parent, identified by a nonce in its environment.

Signals are sent only to processes whose identity is proven, and a stop ends the whole group. `spawn` must be called on
a thread that lives as long as the program (that of the event loop), because the kernel kills a child when the *thread*
that created it ends. psutil is imported where processes are looked at: `up` only starts some, and nothing waits for it.
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
from typing import TYPE_CHECKING

from msgspec import Struct

from enginehouse.host.confinement import UNCONFINED_EXIT, Confined

if TYPE_CHECKING:
    import psutil

NONCE = "ENGINEHOUSE_NONCE"
_PR_SET_PDEATHSIG = 1
_IS_LINUX: bool = sys.platform == "linux"  # a value, so that the type checker reads both branches
_POLL_SECONDS = 0.02
_ESTABLISHED = "01"  # in the kernel's tables of connections
# A process that only answers health checks uses less than this share of a core, and no more memory.
BUSY_SHARE, BUSY_BYTES = 0.1, 1024 * 1024
# Loaded before any fork: no imports or lookups are allowed between fork and exec.
_libc = ctypes.CDLL(None) if _IS_LINUX else None
# Variables that engines inherit: for programs, locale and graphics cards. No secrets.
_ENGINE_VARIABLES = {"PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LD_LIBRARY_PATH"}
_ENGINE_PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "VK_", "OMP_")


def die_with_parent(then: Callable[[], None] | None = None) -> Callable[[], None] | None:
    """Return a function for a child to call before exec, so that the kernel kills it when its parent ends.

    It calls `then` last. Without support by the system, `then` itself is returned.
    """
    if _libc is None:
        return then
    prctl, parent = _libc.prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the request
        if then is not None:
            then()

    return ask_kernel


def _before_exec(confined: Confined | None) -> Callable[[], None] | None:
    """Return the function that a child calls before exec.

    It changes the user itself, because uvloop does not support the options of `subprocess_exec`, and does so first,
    because a change of user resets the parent-death signal.
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
    """Start a child in its own session and group, confined from its first instruction if `confined` is given.

    stdout and stderr are appended to `log`. Only the descriptors in `inherit` are passed on.
    """
    # Append mode, so that the file can be truncated while the child writes to it.
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
    """Run a short program, killed at its limit; its exit code (negative for a signal) and last line of stderr."""
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
    """The start time of a process, for comparison only. None if there is no such process."""
    import psutil

    if _IS_LINUX:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return None
        # The name in parentheses may contain anything, so fields are counted after the last parenthesis.
        return float(stat.rpartition(b")")[2].split()[19])
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return None


def processes_with_nonce(nonce: str = "") -> Iterator[tuple[int, dict[str, str]]]:
    """Yield live processes with any nonce, or with this one, and their environment: engines and descendants."""
    import psutil

    for process in psutil.process_iter():
        try:
            if not _may_carry(process.pid):
                continue
            # Engines of a root worker may run as another user; the nonce proves their identity.
            if os.getuid() not in (0, process.uids().real) or process.status() == psutil.STATUS_ZOMBIE:
                continue
            environment = process.environ()
        except (psutil.Error, OSError):
            continue
        found = environment.get(NONCE)
        if found and (not nonce or found == nonce):
            yield process.pid, environment


def _may_carry(pid: int) -> bool:
    """Cheap filter on the raw environment: reading every process with psutil takes 20 ms per machine."""
    if not _IS_LINUX:
        return True
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        return NONCE.encode() in file.read()


def is_listening(pid: int, port: int) -> bool:
    """Whether this process or a descendant listens on `port`, as opposed to a foreign process."""
    import psutil

    try:
        process = psutil.Process(pid)
        # The process first: finding descendants reads every process of the machine, and most engines have none.
        return _listens(process, port) or any(_listens(child, port) for child in process.children(recursive=True))
    except (psutil.Error, OSError):
        return False


def is_serving(pid: int, port: int) -> bool:
    """Whether the process listens and is not suspended: it may be too busy to answer."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_STOPPED and is_listening(pid, port)
    except psutil.Error:
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    import psutil

    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for connection in process.net_connections(kind="tcp")
    )


def connections_to(pid: int, port: int) -> int:
    """The number of established connections to a port of this process, also of those that it has not accepted yet."""
    import psutil

    if _IS_LINUX:
        return _connections_of(pid, port)
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


def _connections_of(pid: int, port: int) -> int:
    """The same by the kernel's table: psutil finds a connection by the process that has accepted it."""
    ending = f":{port:04X}"
    count = 0
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()
        except OSError:
            continue  # the process has ended, or this machine has no IPv6
        for line in lines[1:]:
            _, local, _, state = line.split(None, 4)[:4]
            count += state == _ESTABLISHED and local.endswith(ending)
    return count


class Activity(Struct, frozen=True):
    """What a process has used so far."""

    cpu_seconds: float = 0.0
    memory_bytes: int = 0

    def is_working_since(self, before: Activity, seconds: float) -> bool:
        """Whether the process did more within that time than answer health checks."""
        has_computed = self.cpu_seconds - before.cpu_seconds > BUSY_SHARE * seconds
        return has_computed or abs(self.memory_bytes - before.memory_bytes) > BUSY_BYTES


def activity(pid: int) -> Activity:
    """CPU time and resident memory of a process; nothing once it ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return Activity(times.user + times.system, process.memory_info().rss)
    except psutil.Error:
        return Activity()


def memory_of(pid: int) -> int:
    """The memory of a process and its children; 0 if it has ended."""
    import psutil

    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:
        return 0
    held = 0
    for one in family:
        with contextlib.suppress(psutil.Error):
            held += one.memory_info().rss
    return held


def is_group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


async def stop_group(process: asyncio.subprocess.Process, grace_seconds: float) -> None:
    """End the process group of a child with SIGTERM, then SIGKILL, and wait until no member is left.

    A group ID is not reused while a member lives, so the group can be signalled safely after its leader has ended.
    """
    group = process.pid
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None or is_group_alive(group):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await process.wait()
                while is_group_alive(group):  # noqa: ASYNC110 - only the end of our own child is notified
                    await asyncio.sleep(_POLL_SECONDS)
                return


def kill_group(process: asyncio.subprocess.Process) -> None:
    """Kill the group at once, to shorten a running `stop_group`, which still waits for the end of all members."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals for a graceful stop. SIGHUP is included unless it is ignored, as under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGINT, signal.SIGTERM) if is_ignored else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def kill_leftovers(nonce: str, limit_seconds: float) -> int:
    """Kill all processes with `nonce`, left by an earlier worker. Returns their number. Blocks."""
    import psutil

    found = [psutil.Process(pid) for pid, _ in processes_with_nonce(nonce)]
    for process in found:
        # psutil compares the start time before it sends the signal.
        with contextlib.suppress(psutil.Error):
            process.kill()
    end = time.monotonic() + limit_seconds
    while any(_is_alive(process) for process in found) and time.monotonic() < end:
        # Polled, not waited for: the event loop must reap our own children to notice their end.
        time.sleep(_POLL_SECONDS)
    return len(found)


def _is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def last_lines(log: Path, count: int = 1, limit_bytes: int = 16 * 1024) -> list[str]:
    """Return the last non-empty lines within the last `limit_bytes` of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - limit_bytes))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()][-count:]
