"""How many cores are in use: those of this machine, or those of its container if a quota limits it.

Between two looks, from counters of the system, so a look costs a read and never waits. The first look knows nothing
yet, and says so: unknown is never 0.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

SHORTEST_SECONDS = 1.0  # the system counts in hundredths of a second, so a shorter time would show noise
_GROUP = Path("/sys/fs/cgroup")
_IDLE = ("idle", "iowait", "guest", "guest_nice")  # the time of guests is in that of users too

Counters = Callable[[], float]


class ProcessorWatch:
    """`busy_seconds` gives the processor time used since some moment; it never decreases."""

    def __init__(self, busy_seconds: Counters | None = None, monotonic: Counters = time.monotonic) -> None:
        self._busy_seconds = busy_seconds or busy_seconds_here
        self._monotonic = monotonic
        self._before: tuple[float, float] | None = None
        self._used: float | None = None
        self._lock = threading.Lock()

    def look(self, cores: int) -> float | None:
        """The cores in use since the last look, of so many; None if unknown."""
        with self._lock:
            try:
                now, busy = self._monotonic(), self._busy_seconds()
            except (OSError, ValueError, psutil.Error):
                self._before = self._used = None
                return None
            before = self._before
            if before is None or busy < before[1]:
                self._before, self._used = (now, busy), None  # a core was taken away, or the counters began anew
            elif now - before[0] >= SHORTEST_SECONDS:
                used = (busy - before[1]) / (now - before[0])
                self._before, self._used = (now, busy), round(min(used, float(cores)), 3)
            return self._used


def busy_seconds_here(group: Path = _GROUP) -> float:
    """The time that the processors have worked: of the container if its quota is less than the machine, otherwise of
    the processors that this process may use.
    """
    if _has_quota(group / "cpu.max"):
        for line in (group / "cpu.stat").read_text().splitlines():
            if line.startswith("usage_usec "):
                return int(line.split()[1]) / 1e6
        raise ValueError(f"cannot find the processor time of {group}")
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    times = psutil.cpu_times(percpu=True)
    # Processors are numbered by their place; where one is switched off, the places are not the numbers.
    counted = times if usable is None or max(usable) >= len(times) else [times[number] for number in sorted(usable)]
    return sum(sum(one) - sum(getattr(one, kind, 0.0) for kind in _IDLE) for one in counted)


def _has_quota(file: Path) -> bool:
    try:
        return not file.read_text().startswith("max")
    except OSError:
        return False
