"""Events for all watchers of this frontend.

All watchers share one log in memory, and each has its own place in it: publishing costs the same however many watch,
and a range that several watchers read is encoded once. The log is bounded. A watcher that does not keep up is told to
read the full state again (`overflowed`), so it never misses an event unnoticed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

EventKind = Literal["operation", "node", "node-removed", "model", "model-removed", "pulse", "bye"]
LOG_LENGTH = 8192  # events; a few seconds of a busy fleet
LOG_BYTES = 32 * 1024 * 1024  # an operation over a hundred nodes takes fifty thousand bytes
_KEPT_CHUNKS = 8  # encoded ranges of the log; most watchers read the same ones


class Event(Struct, frozen=True):
    position: float  # store time up to which everything was published; a watcher resumes from it on any frontend
    kind: EventKind
    id: str  # of the operation, node or model; "" for what is about all
    body: bytes  # JSON, rendered once for all watchers


class Watcher:
    """One reader's place in the log."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._place = events.end
        self.woken = asyncio.Event()

    @property
    def overflowed(self) -> bool:
        """Whether events were dropped before this watcher read them."""
        return self._place < self._events.beginning

    async def wait(self) -> None:
        """Wait until there is an event."""
        while self._place == self._events.end:
            self.woken.clear()
            await self.woken.wait()

    def skip(self) -> None:
        """Leave out the events so far."""
        self._place = self._events.end

    def take(self) -> list[Event]:
        """Return the events since the last call; incomplete if `overflowed`."""
        place, self._place = self._place, self._events.end
        return self._events.since(place)

    def take_chunk(self, render: Callable[[Event], bytes]) -> bytes:
        """Return the same as bytes, encoded once for all watchers that read the same range."""
        place, self._place = self._place, self._events.end
        return self._events.chunk(place, render)


class Events:
    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._log: deque[Event] = deque()
        self._bytes = 0
        self._chunks: dict[tuple[int, int], bytes] = {}
        self.beginning = 0  # number of the oldest event in the log
        self.end = 0  # number of the next event
        self.position = 0.0  # set by the board once everything up to it was published

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
        """Tell every watcher that this frontend stops, so that open streams do not delay the stop."""
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
