"""One lock per identity, shared or exclusive.

Install, upgrade and delete of a backend take its lock alone; starting a replica takes it together with other starts, so
that a tree is never replaced under a process that is coming up. First come, first served: a waiting exclusive one is
not overtaken by later shared ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class _Lock:
    def __init__(self) -> None:
        self.holders = 0
        self.is_exclusive = False
        self.waiting: deque[tuple[asyncio.Future[None], bool]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self.holders and not self.waiting

    def may_enter(self, exclusive: bool) -> bool:
        return self.holders == 0 or not (exclusive or self.is_exclusive)

    def enter(self, exclusive: bool) -> None:
        self.holders += 1
        self.is_exclusive = exclusive

    def let_in(self) -> None:
        while self.waiting and self.may_enter(self.waiting[0][1]):
            waiter, exclusive = self.waiting.popleft()
            self.enter(exclusive)
            if not waiter.done():
                waiter.set_result(None)


class Locks:
    """Locks by name, kept only while somebody holds or wants one."""

    def __init__(self) -> None:
        self._locks: dict[str, _Lock] = {}

    @contextlib.asynccontextmanager
    async def hold(self, name: str, *, exclusive: bool = True) -> AsyncIterator[None]:
        lock = self._locks.setdefault(name, _Lock())
        await self._enter(lock, exclusive)
        try:
            yield
        finally:
            self._leave(name, lock)

    async def _enter(self, lock: _Lock, exclusive: bool) -> None:
        if not lock.waiting and lock.may_enter(exclusive):
            lock.enter(exclusive)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (waiter, exclusive)
        lock.waiting.append(place)
        try:
            await waiter
        except asyncio.CancelledError:
            if place in lock.waiting:
                lock.waiting.remove(place)
            else:
                # Let in and cancelled at once: the place goes to the next.
                lock.holders -= 1
            lock.let_in()
            raise

    def _leave(self, name: str, lock: _Lock) -> None:
        lock.holders -= 1
        lock.let_in()
        if lock.is_idle and self._locks.get(name) is lock:
            del self._locks[name]
