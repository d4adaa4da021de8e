"""The rate of a transfer, from what was done at which time. Pure: the caller gives the time."""

from __future__ import annotations

from collections import deque

RATE_SECONDS = 3.0  # the window of the rate: long enough to be steady, short enough to be current


class Meter:
    """Bytes per second over the last few seconds."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, now: float, done_bytes: int) -> None:
        if self._samples and done_bytes < self._samples[-1][1]:
            self._samples.clear()  # another attempt, or another file
        self._samples.append((now, done_bytes))
        while now - self._samples[0][0] > RATE_SECONDS and len(self._samples) > 2:
            self._samples.popleft()

    def rate(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0
