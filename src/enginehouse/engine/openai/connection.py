"""One connection to an engine: HTTP/1.1 over an asyncio transport, one answer at a time, bytes as they come.

All pieces of one socket read are handed on together, which is what makes thousands of tokens a second cheap. A body
that nobody takes stops the reading, so a slow client slows its engine and not our memory. An answer is complete only
when its own framing says so: an end of the connection before that is an error, never an end.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import httptools

from enginehouse.core.errors import Upstream

HIGH_WATER_BYTES = 256 * 1024  # held for a client that does not read: 500 stalled streams stay below 128 MiB
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 1024
# A machine that vanished (power, cable) sends no end. These notice it within about 25 s without any traffic of our own.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 10, 5, 3


class Connection(asyncio.Protocol):
    """Owned by whoever took it from the pool, from `send` until the answer is complete or the connection is cut."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.idle_since = 0.0
        self.is_lost = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.has_bytes = False  # of this answer: decides whether a lost request may be sent again
        self.is_complete = False
        self._keeps_alive = False
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._header_bytes = 0
        self._error: Upstream | None = None

    # What the owner does --------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._reset()
        # A parser per answer: one that has seen a truncated or an unusual answer carries its state along.
        self._parser = httptools.HttpResponseParser(self)
        if len(body) <= 65536:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    async def wait_for_head(self) -> None:
        while not self.has_head:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def next_chunk(self) -> bytes:
        """What has arrived since the last call; empty at the end of the answer."""
        while not self._pieces:
            if self.is_complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()
        chunk = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self._held_bytes = 0
        if self._is_paused and self._transport is not None and not self.is_lost:
            self._is_paused = False
            self._transport.resume_reading()
        return chunk

    @property
    def is_reusable(self) -> bool:
        """The answer was read to its end, both sides want to go on and nothing is left to write."""
        return (
            self.is_complete
            and not self.is_lost
            and not self._pieces
            and self._keeps_alive
            and self._transport is not None
            and not self._transport.is_closing()
            and self._transport.get_write_buffer_size() == 0
        )

    def cut(self) -> None:
        """End it now; whoever waits for it is told."""
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed on our side")
        self.is_lost = True

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, cause: str) -> None:
        if self._error is None and not self.is_complete:
            self._error = Upstream(f"cannot get the answer of the engine at {self.address}: {cause}")
        self._wake()

    # What the transport does ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio's without being one.
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if hasattr(socket, "TCP_KEEPIDLE"):
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)

    def data_received(self, data: bytes) -> None:
        if self.is_complete or self._parser is None:
            # Bytes that nobody asked for: whatever they are, they would be read as the next answer.
            self.cut()
            return
        self.has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("it is not HTTP, or its head is too large")
            self.cut()
            return
        if self._held_bytes > HIGH_WATER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._parser = None  # the two hold each other
        self._fail("the connection ended before the answer did")

    # What the parser does -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the head is too large")
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        if not self._announces_its_end():
            self._fail("it does not say where its body ends, so a cut would look like an end")
            raise ValueError("no framing")
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like come before the answer
            self.headers = []
            return
        assert self._parser is not None
        self.is_complete = True
        # Asked here, because the parser forgets the flags of an answer right after this callback.
        self._keeps_alive = bool(self._parser.should_keep_alive())

    def _announces_its_end(self) -> bool:
        if self.status in (204, 304):
            return True
        return any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in self.headers
        )
