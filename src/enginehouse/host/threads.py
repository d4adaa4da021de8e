"""Threads assigned to the engines of this machine, and a lock that lets one worker at a time assign them.

The lock is best effort. If there is no safe directory for it, or another process holds it too long, engines start
anyway, and two that start at the same time may be assigned the same cores. The lock file is only used in a directory
of our own user, never in one that another user could have created.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pwd
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from enginehouse.core.threads import AssignedThreads
from enginehouse.host import processes

log = logging.getLogger(__name__)

THREADS = "ENGINEHOUSE_THREADS"
_LOCK = "threads.lock"
_POLL_SECONDS = 0.02


def assigned() -> AssignedThreads:
    """Return the threads assigned to all live engines of this user, of any worker. Blocks."""
    found: dict[str, int] = {}
    for _, environment in processes.processes_with_nonce():
        threads = environment.get(THREADS, "")
        if threads.isdecimal() and len(threads) < 6:
            # Descendants inherit the environment of their engine, so each nonce counts once.
            found[environment[processes.NONCE]] = int(threads)
    return AssignedThreads(sum(found.values()), len(found))


@contextlib.asynccontextmanager
async def budget(limit_seconds: float) -> AsyncIterator[AssignedThreads]:
    """Yield the assigned threads under a lock of this user's workers; without it after the limit."""
    with contextlib.ExitStack() as stack:
        descriptor = await asyncio.to_thread(_open)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            if not await _locked(descriptor, limit_seconds):
                log.warning("threads.lock_timed_out seconds=%.1f", limit_seconds)
        yield await asyncio.to_thread(assigned)


async def _locked(descriptor: int, limit_seconds: float) -> bool:
    try:
        async with asyncio.timeout(limit_seconds):
            while not _try_lock(descriptor):  # noqa: ASYNC110 - a blocking flock has no timeout
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def _open() -> int | None:
    for directory in _places():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            # Another user could lock or replace a file in a directory of their own at any time.
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                continue
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(directory / _LOCK, flags, 0o600)
        except OSError as error:
            log.debug("threads.lock_failed directory=%s error=%s", directory, error)
    return None


def _places() -> Iterator[Path]:
    """Directories common to all workers of a user, so independent of environment variables."""
    yield Path(tempfile.gettempdir()) / f"enginehouse-{os.getuid()}"
    with contextlib.suppress(KeyError):
        yield Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "enginehouse"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
