"""Named locks, shared or exclusive.

Install, upgrade and delete of a backend hold its lock exclusively. Starts of replicas share it, so that a tree is never
replaced while a process starts from it. Locks are granted in order of arrival: a later shared request never overtakes
a waiting exclusive one.
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

    def admit_waiting(self) -> None:
        while self.waiting and self.may_enter(self.waiting[0][1]):
            waiter, exclusive = self.waiting.popleft()
            self.enter(exclusive)
            if not waiter.done():
                waiter.set_result(None)


class Locks:
    """Locks by name; an entry exists only while it has holders or waiters."""

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
        entry = (waiter, exclusive)
        lock.waiting.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if entry in lock.waiting:
                lock.waiting.remove(entry)
            else:
                # Granted and cancelled at the same time: the next waiter gets the lock.
                lock.holders -= 1
            lock.admit_waiting()
            raise

    def _leave(self, name: str, lock: _Lock) -> None:
        lock.holders -= 1
        lock.admit_waiting()
        if lock.is_idle and self._locks.get(name) is lock:
            del self._locks[name]
