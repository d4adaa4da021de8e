"""The monotonic clock and the random numbers of this machine."""

from __future__ import annotations

import random
import time


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return random.random()
