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

FIRST, RANGES, LENGTH = 10_000, 5, 4_400  # the kernel begins at 32,768
SINGLE = 1_400  # of a range; the rest is for those who need several in a row
BELOW = 10  # the HTTP server of a worker takes the port before its first, or one below
_held: list[int] = []  # descriptors of locks, for as long as this process lives
_turns = itertools.count()
_places = [0]  # where the next row begins


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


def is_free(port: int, *, rests: bool = True) -> bool:
    """Whether nobody listens there; with `rests`, also no closed connection is remembered."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        if not rests:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
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
    """The first of so many ports that were not given for a long time and that nobody uses."""
    rows = LENGTH - SINGLE
    for _ in range(rows // count):
        place = _places[0] if _places[0] + BELOW + count <= rows else 0
        _places[0] = place + BELOW + count
        first = _first() + SINGLE + place
        if all(is_free(port, rests=False) for port in range(first, first + BELOW + count)):
            return first + BELOW
    raise AssertionError(f"no {count} ports in a row are free")


@cache
def ports_of(directory: Path) -> int:
    """The first port of a worker with this data directory: the same after a restart."""
    return ports_in_a_row()
