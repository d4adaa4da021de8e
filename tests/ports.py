"""Ports for the servers of tests. Every run of pytest has a range of its own, below the ports of clients.

A server listens some time after its port was chosen. Runs that stand side by side must therefore not choose from the
same ports, and the kernel must not give them to a client meanwhile. A range belongs to whoever holds its lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import socket
import tempfile
from functools import cache
from pathlib import Path

FIRST, RANGES, LENGTH = 10_000, 10, 2_200  # the kernel begins at 32,768
SINGLE = 1_200  # of a range; the rest is for those who need several in a row
_held: list[int] = []  # descriptors of locks, for as long as this process lives
_turns = itertools.count()
_rows_used = itertools.count()


@cache
def _first() -> int:
    for number in range(RANGES):
        path = Path(tempfile.gettempdir()) / f"enginehouse-test-ports-{number}"
        with contextlib.suppress(OSError):  # another user's, or held
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            _held.append(lock)
            return FIRST + number * LENGTH
    raise AssertionError("every range of ports is in use by other runs of the tests")


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


def free_port() -> int:
    """A port that was not given for a long time."""
    for _ in range(SINGLE):
        port = _first() + next(_turns) % SINGLE
        if is_free(port):
            return port
    raise AssertionError("no port is free")


def ports_in_a_row(count: int = 50) -> int:
    """The first of so many ports that were not given for a long time. Some of them may be in use."""
    rows = (LENGTH - SINGLE) // count
    return _first() + SINGLE + next(_rows_used) % rows * count
