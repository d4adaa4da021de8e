"""Programs that go on without a terminal: started and waited for until they greet, found by their lock, and stopped.

The process that holds the lock of a data directory is the program, whatever wrote its number elsewhere; only such a
process is ever signalled. A detached program has a session of its own, so that no terminal can end it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from enginehouse.core.errors import Denied, Hopeless, Unavailable
from enginehouse.host.processes import last_lines

PATIENCE_SECONDS = 35.0  # the program itself reports what is missing after 30
_POLL_SECONDS = 0.05


def start(
    argv: Sequence[str], environment: Mapping[str, str], log: Path, *, remark: Callable[[str], None], limit: float
) -> bytes:
    """Start a program that prints one line when it is ready, and return the line. Its messages go to `log`.

    Raises what the program said if it ends before. A program that is not ready within `limit` seconds goes on. If the
    caller is interrupted, the program is stopped.
    """
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=descriptor,
            start_new_session=True,
        )
    finally:
        os.close(descriptor)
    assert process.stdout is not None
    try:
        with process.stdout as greeting:
            is_said = _is_said(greeting.fileno(), PATIENCE_SECONDS)
            if not is_said:
                remark("".join(last_lines(log)).removeprefix("enginehouse: ") or f"still starting (log: {log})")
                is_said = _is_said(greeting.fileno(), limit - PATIENCE_SECONDS)
            if is_said:
                line = greeting.readline()
                if line:
                    return line
                code = process.wait()
                said = "".join(last_lines(log)).removeprefix("enginehouse: ")
                raise Hopeless(f"cannot start: it ended with code {code}: {said} (log: {log})")
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise
    raise Unavailable(
        f"cannot wait any longer: it is not ready after {limit:.0f} s. It goes on starting (log: {log}); "
        "`enginehouse down` stops it"
    )


def _is_said(descriptor: int, seconds: float) -> bool:
    """Whether there is something to read, or the end, within so many seconds."""
    return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])


def holder(lock: Path) -> int | None:
    """The process that holds the lock, which `disk.Lock` made; None if nobody does."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise Denied(f"cannot read {lock}: {error.strerror}; run this as the user that started it") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        written = os.read(descriptor, 32).decode("ascii", "replace").strip()
        return int(written) if written.isdecimal() else None
    finally:
        os.close(descriptor)
    return None


def parts_of(pid: int) -> list[str]:
    """The names of the programs that `up` started, in the order in which it stops them."""
    names: set[str] = set()
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                names |= {"worker", "frontend", "nats-server"} & {
                    os.path.basename(word) for word in child.cmdline()[:4]
                }
    return [name for name in ("worker", "frontend", "nats-server") if name in names]


def ran_seconds(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return max(0.0, time.time() - psutil.Process(pid).create_time())
    return 0.0


def stop(pid: int, lock: Path, *, limit: float, is_forced: bool) -> bool:
    """Stop the holder of the lock, in order unless forced, and wait until it is gone. False if it still runs then."""
    try:
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGKILL if is_forced else signal.SIGTERM)
    except (ProcessLookupError, psutil.NoSuchProcess):
        return True
    except PermissionError as error:
        raise Denied(f"cannot stop process {pid}: it belongs to another user; run this as that user") from error
    deadline = time.monotonic() + limit
    while holder(lock) == pid or _is_running(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _is_running(process: psutil.Process) -> bool:
    """Whether it is there; one that has ended and was not waited for by its parent is not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
