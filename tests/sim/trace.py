"""What happened in a run, in order: the last steps for people, a hash of all of them for comparing runs.

Only facts of the simulated world go in, never an address or a real time, so that one seed gives one hash.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

KEPT_LINES = 200  # as many as one reads before looking at the code


class Violation(Exception):
    """A guarantee that did not hold: its name, and what was seen."""

    def __init__(self, guarantee: str, message: str) -> None:
        super().__init__(f"{guarantee}: {message}")
        self.guarantee = guarantee


class Trace:
    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._hash = 0
        self.count = 0
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)

    def note(self, who: str, what: str) -> None:
        line = f"{self._now():10.4f} {who:<12} {what}"
        self._hash = zlib.crc32(line.encode(), self._hash)
        self.count += 1
        self.lines.append(line)

    @property
    def digest(self) -> str:
        return f"{self.count}:{self._hash:08x}"
