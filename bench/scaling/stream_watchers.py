"""Watchers of /api/events: connections that count what they get and know when an operation was shown as done.

A watcher that is cut off because it was too slow comes back with the id of its last event, as a browser does. Only
lines that show a success are looked into, because fifty watchers may get gigabytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time

import msgspec

_LINE_LIMIT = 64 * 1024 * 1024
_DONE = b'"status":"succeeded"'
_ID = re.compile(rb'"jobID":"([0-9a-f-]{36})"')
_NODE = b"event: node\n"
RETRY_SECONDS = 0.2


class StreamWatcher:
    def __init__(self, port: int, token: str) -> None:
        self._port = port
        self._token = token
        self._done_at: dict[str, float] = {}
        self._news = asyncio.Event()
        self._position = b""
        self.is_open = asyncio.Event()
        self.received_bytes = 0
        self.cuts = 0  # connections that ended

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            with contextlib.suppress(OSError):  # as any watcher: come back and look
                await self._read()
            self.cuts += 1
            await asyncio.sleep(RETRY_SECONDS)

    async def _read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=_LINE_LIMIT)
        position = b"Last-Event-ID: %s\r\n" % self._position if self._position else b""
        head = b"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n%s\r\n"
        writer.write(head % (self._token.encode(), position))
        rest = b""
        try:
            while content := await reader.read(1024 * 1024):
                self.received_bytes += len(content)
                self.is_open.set()
                whole, _, rest = (rest + content).rpartition(b"\n\n")
                self.take(whole)
        finally:
            writer.close()

    def take(self, events: bytes) -> None:
        """Whole events."""
        found = events.rfind(b"\nid: ")
        if found >= 0:
            self._position = events[found + 5 : events.find(b"\n", found + 5)]
        at = events.find(_DONE)
        while at >= 0:
            end = events.find(b"\n", at) % (len(events) + 1)
            for operation in _ID.findall(events[events.rfind(b"\n", 0, at) + 1 : end]):
                self._done_at.setdefault(operation.decode(), time.perf_counter())
            at = events.find(_DONE, end)
        self._news.set()

    async def saw(self, operation: str) -> float:
        """When the operation was shown as done."""
        while operation not in self._done_at:
            self._news.clear()
            await self._news.wait()
        return self._done_at[operation]


class _ShownNode(msgspec.Struct):
    id: str
    health: str = ""


class NodeWatcher(StreamWatcher):
    """Keeps which nodes were shown as healthy, and how often one was not healthy afterwards."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(port, token)
        self.health: dict[str, str] = {}
        self.flaps = 0

    def take(self, events: bytes) -> None:
        for event in events.split(b"\n\n"):
            at = event.find(_NODE)
            if at < 0:
                continue
            _, _, line = event.partition(b"\ndata: ")
            shown = msgspec.json.decode(line, type=_ShownNode)
            self.flaps += self.health.get(shown.id) == "healthy" != shown.health
            self.health[shown.id] = shown.health
        super().take(events)

    async def until_healthy(self, node_ids: set[str]) -> None:
        while not all(self.health.get(one) == "healthy" for one in node_ids):
            self._news.clear()
            await self._news.wait()
