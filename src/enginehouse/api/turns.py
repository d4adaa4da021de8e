"""Turns: at most so many requests begin in one round of the event loop, in their order; the others begin in the next.

After a power cut a thousand machines ask at the same moment, and they report together what an operation has done. If
all their requests were ready at once, those of people that come after them would wait for all of them; between two
rounds the loop looks for what has arrived.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    def __init__(self, at_once: int) -> None:
        self._at_once = self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def take(self) -> None:
        """Return when it is the caller's turn: at once, unless many came just before."""
        running = asyncio.get_running_loop()
        if not self._is_scheduled:
            self._is_scheduled = True
            running.call_soon(self._begin_round)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        place: asyncio.Future[None] = running.create_future()
        self._waiting.append(place)
        await place

    def _begin_round(self) -> None:
        self._left = self._at_once
        while self._waiting and self._left > 0:
            place = self._waiting.popleft()
            if not place.done():  # its caller was cancelled
                place.set_result(None)
                self._left -= 1
        self._is_scheduled = self._left < self._at_once
        if self._is_scheduled:
            asyncio.get_running_loop().call_soon(self._begin_round)
