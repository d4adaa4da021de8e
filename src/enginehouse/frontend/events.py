"""Changes as they happen, to everyone who watches this frontend.

Fan-out in memory. A watcher that does not keep up is not waited for: its queue is bounded, and when it is full the
watcher is told to look again (`overflow`) instead of being given a gap it cannot see.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from msgspec import Struct

EventKind = Literal["operation", "node", "node-removed", "model", "bye"]
QUEUE_LENGTH = 1024  # a few seconds of a busy fleet


class Event(Struct, frozen=True):
    position: float  # the store's time before which everything has been told: where a watcher goes on, on any frontend
    kind: EventKind
    id: str  # of the operation, node or model
    body: bytes  # JSON, rendered once for all watchers


class Watcher:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[Event] = asyncio.Queue(QUEUE_LENGTH)
        self.overflowed = False


class Events:
    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self.position = 0.0  # moved on by the board when it has told everything up to there

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    def publish(self, kind: EventKind, id: str, body: bytes) -> None:
        event = Event(self.position, kind, id, body)
        for watcher in self._watchers:
            try:
                watcher.queue.put_nowait(event)
            except asyncio.QueueFull:
                watcher.overflowed = True

    def close(self) -> None:
        """Tell every watcher that this frontend stops, so that none keeps it from doing so."""
        self.publish("bye", "", b"{}")

    @contextmanager
    def watch(self) -> Iterator[Watcher]:
        watcher = Watcher()
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)
