"""Decides when a worker requests a new bus credential: at three quarters of its lifetime, and while the bus is away for
long, because it may have moved.

The lifetime is given in seconds and measured with this machine's monotonic clock, so clocks need not agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SHARE = 0.75  # of the lifetime: the last quarter bridges an outage of the frontends
AGAIN_SECONDS = 60.0  # between two requests while the bus is away


class Renewal:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = math.inf
        self._asked_at = -math.inf
        self.is_possible = False  # Enginehouse frontends renew; LocalAI's issue one only at registration

    def begin(self, life_seconds: float) -> None:
        """Start the lifetime of a new credential; 0 means that it does not expire or cannot be renewed."""
        self.is_possible = life_seconds > 0
        self._at = self._clock() + SHARE * life_seconds if self.is_possible else math.inf

    def is_due(self, is_away: bool) -> bool:
        """Whether the next heartbeat requests a renewal. `is_away`: so long that the bus may have moved."""
        now = self._clock()
        if now >= self._at:
            return True  # with every heartbeat until one is answered
        if not (self.is_possible and is_away and now - self._asked_at >= AGAIN_SECONDS):
            return False
        self._asked_at = now
        return True
