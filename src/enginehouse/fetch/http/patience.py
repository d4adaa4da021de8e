"""Asking again: how often, and with which pauses, when a server is busy or away.

For small things only. Bytes of blobs are asked for again by whoever counts them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from enginehouse.core.errors import Upstream

T = TypeVar("T")


class RetryPolicy(Struct, frozen=True):
    """`factor` shortens all pauses, for tests; a server's Retry-After counts up to `longest_seconds`."""

    tries: int = 4
    first_seconds: float = 0.5
    longest_seconds: float = 60.0
    total_seconds: float = 120.0  # for one try
    factor: float = 1.0

    async def retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """What `once` gives; the last `Upstream` where it never gives anything."""
        for attempt in range(self.tries - 1):
            try:
                return await once()
            except Upstream as error:
                # Silence has been waited for already: once more would make four of one limit.
                if error.code in ("stalled", "upstream_timeout"):
                    raise
                pause = self.pause_seconds(attempt, error)
            await asyncio.sleep(pause)
        return await once()

    def pause_seconds(self, attempt: int, error: Upstream) -> float:
        grown = self.first_seconds * 2.0**attempt
        return min(max(grown, error.retry_after_seconds or 0.0), self.longest_seconds) * self.factor
