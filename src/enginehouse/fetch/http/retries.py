"""Retries of small requests: how often, and with which pauses, while a server is busy or unreachable.

Not for blobs: their downloader resumes at the byte it has reached instead of starting again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from msgspec import Struct

from enginehouse.core.errors import Upstream

T = TypeVar("T")


class RetryPolicy(Struct, frozen=True):
    """Exponential backoff. Retry-After is respected up to `longest_seconds`; `factor` shortens all pauses for tests."""

    tries: int = 4
    first_seconds: float = 0.5
    longest_seconds: float = 60.0
    total_seconds: float = 120.0  # of one attempt
    factor: float = 1.0

    async def retried(self, once: Callable[[], Awaitable[T]]) -> T:
        """Call `once` until it succeeds. Raises the `Upstream` of the last attempt."""
        for attempt in range(self.tries - 1):
            try:
                return await once()
            except Upstream as error:
                # A timeout has used its whole limit already; retries would multiply that limit by `tries`.
                if error.code in ("stalled", "upstream_timeout"):
                    raise
                pause = self.pause_seconds(attempt, error)
            await asyncio.sleep(pause)
        return await once()

    def pause_seconds(self, attempt: int, error: Upstream) -> float:
        grown = self.first_seconds * 2.0**attempt
        return min(max(grown, error.retry_after_seconds or 0.0), self.longest_seconds) * self.factor
