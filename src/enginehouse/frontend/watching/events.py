"""Changes as they happen, to everyone who watches this frontend.

One log in memory for all watchers, each with a place of its own in it: telling costs the same however many watch, and
what most of them read at the same moment is put together once. The log is bounded; a watcher that does not keep up
falls off its end and is told to look again (`overflowed`) instead of being given a gap it cannot see.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

EventKind = Literal["operation", "node", "node-removed", "model", "bye"]
LOG_LENGTH = 8192  # events; a few seconds of a busy fleet
LOG_BYTES = 32 * 1024 * 1024  # an operation over a hundred nodes takes fifty thousand
_KEPT_CHUNKS = 8  # ranges of the log that somebody has just read; the others ask for the same


class Event(Struct, frozen=True):
    position: float  # the store's time before which everything has been told: where a watcher goes on, on any frontend
    kind: EventKind
    id: str  # of the operation, node or model
    body: bytes  # JSON, rendered once for all watchers


class Watcher:
    """One reader's place in the log."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._place = events.end
        self.woken = asyncio.Event()

    @property
    def overflowed(self) -> bool:
        """Whether something was dropped before it was read."""
        return self._place < self._events.beginning

    async def wait(self) -> None:
        """Until there is something to take."""
        while self._place == self._events.end:
            self.woken.clear()
            await self.woken.wait()

    def take(self) -> list[Event]:
        """What has been told since the last time; incomplete where it `overflowed`."""
        place, self._place = self._place, self._events.end
        return self._events.since(place)

    def take_chunk(self, render: Callable[[Event], bytes]) -> bytes:
        """The same as bytes, made once for all who read the same."""
        place, self._place = self._place, self._events.end
        return self._events.chunk(place, render)


class Events:
    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._log: deque[Event] = deque()
        self._bytes = 0
        self._chunks: dict[tuple[int, int], bytes] = {}
        self.beginning = 0  # the number of the oldest event that is kept
        self.end = 0  # the number that the next one gets
        self.position = 0.0  # moved on by the board when it has told everything up to there

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def publish(self, kind: EventKind, id: str, body: bytes) -> None:
        if not self._watchers:
            return
        self._log.append(Event(self.position, kind, id, body))
        self._bytes += len(body)
        self.end += 1
        while len(self._log) > LOG_LENGTH or (self._bytes > LOG_BYTES and len(self._log) > 1):
            self._bytes -= len(self._log.popleft().body)
            self.beginning += 1
        for watcher in self._watchers:
            watcher.woken.set()

    def since(self, place: int) -> list[Event]:
        first = max(place - self.beginning, 0)
        return [self._log[number] for number in range(first, len(self._log))]

    def chunk(self, place: int, render: Callable[[Event], bytes]) -> bytes:
        span = (place, self.end)
        if span not in self._chunks:
            if len(self._chunks) >= _KEPT_CHUNKS:
                del self._chunks[next(iter(self._chunks))]
            self._chunks[span] = b"".join(map(render, self.since(place)))
        return self._chunks[span]

    def close(self) -> None:
        """Tell every watcher that this frontend stops, so that none keeps it from doing so."""
        self.publish("bye", "", b"{}")

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        watcher = Watcher(self)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
            if not self._watchers:
                self._forget()

    def _forget(self) -> None:
        self._log.clear()
        self._chunks.clear()
        self._bytes, self.beginning = 0, self.end
