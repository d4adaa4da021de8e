"""When a worker asks for a new credential of the bus: at three quarters of its life, and while the bus is away for
long, because it may have moved. Judged by this machine's own steady clock: the life is told in seconds, not as a date.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SHARE = 0.75  # of a life: a quarter is left for frontends that are away
AGAIN_SECONDS = 60.0  # between two questions while the bus is away


class Renewal:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = math.inf
        self._asked_at = -math.inf
        self.is_possible = False  # a frontend of ours renews; LocalAI's hand out a credential only to who registers

    def begin(self, life_seconds: float) -> None:
        """A new credential; 0 seconds is one that does not end, or that this frontend does not renew."""
        self.is_possible = life_seconds > 0
        self._at = self._clock() + SHARE * life_seconds if self.is_possible else math.inf

    def is_due(self, is_away: bool) -> bool:
        """Whether the next heartbeat is to ask. `is_away`: for so long that the bus may be somewhere else."""
        now = self._clock()
        if now >= self._at:
            return True  # until it is answered: every heartbeat may be the one that gets through
        if not (self.is_possible and is_away and now - self._asked_at >= AGAIN_SECONDS):
            return False
        self._asked_at = now
        return True
