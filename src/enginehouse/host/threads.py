"""The threads that engines of this machine were promised, and a lock so that workers count and promise in turn.

The lock is a help, not a condition: where nobody else can be kept out of its place, or somebody keeps it, engines start
all the same, and two that start at once may be promised the same cores. It is never a file that another user made: its
directory is ours, or it is not used.
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

from enginehouse.core.threads import Promised
from enginehouse.host import processes

log = logging.getLogger(__name__)

THREADS = "ENGINEHOUSE_THREADS"
_LOCK = "threads.lock"
_POLL_SECONDS = 0.02


def promised() -> Promised:
    """To live engines of this user on this machine, whichever worker started them. Blocks."""
    found: dict[str, int] = {}
    for _, environment in processes.carriers():
        threads = environment.get(THREADS, "")
        if threads.isdecimal() and len(threads) < 6:
            # Descendants inherit the environment of their engine: one nonce is one promise.
            found[environment[processes.NONCE]] = int(threads)
    return Promised(sum(found.values()), len(found))


@contextlib.asynccontextmanager
async def budget(limit_seconds: float) -> AsyncIterator[Promised]:
    """What was promised, with every other worker of this user kept from promising meanwhile, where that can be had
    within the limit.
    """
    with contextlib.ExitStack() as stack:
        descriptor = await asyncio.to_thread(_open)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            if not await _locked(descriptor, limit_seconds):
                log.warning("threads.lock_is_kept seconds=%.1f", limit_seconds)
        yield await asyncio.to_thread(promised)


async def _locked(descriptor: int, limit_seconds: float) -> bool:
    try:
        async with asyncio.timeout(limit_seconds):
            while not _try_lock(descriptor):  # noqa: ASYNC110 - a blocking flock could not be given up
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        return False
    return True


def _open() -> int | None:
    for directory in _places():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = directory.lstat()
            # What another user made could be locked or replaced by that user at any time.
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                continue
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return os.open(directory / _LOCK, flags, 0o600)
        except OSError as error:
            log.debug("threads.no_lock directory=%s error=%s", directory, error)
    return None


def _places() -> Iterator[Path]:
    """The same for all workers of a user, so not from variables that may differ between them."""
    yield Path(tempfile.gettempdir()) / f"enginehouse-{os.getuid()}"
    with contextlib.suppress(KeyError):
        yield Path(pwd.getpwuid(os.getuid()).pw_dir) / ".cache" / "enginehouse"


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
