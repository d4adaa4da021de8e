"""One connection to an engine: HTTP/1.1 over an asyncio transport, one response at a time, bytes as they arrive.

All pieces of one socket read are delivered together, which makes thousands of tokens per second cheap. Reading pauses
while the body is not consumed, so a slow client slows down its engine instead of filling our memory. A response is
complete only if its framing says so: an earlier end of the connection is an error.
"""

from __future__ import annotations

import asyncio
from typing import cast

import httptools

from enginehouse.core.errors import Upstream

HIGH_WATER_BYTES = 256 * 1024  # buffered for a client that does not read: 500 stalled streams stay below 128 MiB
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 * 1024


class Connection(asyncio.Protocol):
    """Owned by one caller from `send` until the response is complete or the connection is aborted."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.idle_since = 0.0
        self.is_lost = False
        self.takes_a_thread = False  # of the engine, as long as it is open
        self.loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_paused = False
        self._reset()

    def _reset(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.has_bytes = False  # of this response: decides whether a lost request may be sent again
        self.is_complete = False
        self._keeps_alive = False
        self._pieces: list[bytes] = []
        self._held_bytes = 0
        self._header_bytes = 0
        self._error: Upstream | None = None

    # Used by the owner ----------------------------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._reset()
        # One parser per response: after a truncated or unusual one it would carry state along.
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

    def expire(self, limit_seconds: float) -> None:
        """Give up waiting for the head."""
        if not self.has_head and self._error is None:
            self._error = Upstream(
                f"cannot get an answer from the engine at {self.address} within {limit_seconds:g} s",
                code="upstream_timeout",
            )
            self._wake()

    async def next_chunk(self) -> bytes:
        """The bytes that arrived since the last call; empty at the end of the response."""
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
        """The response was read to its end, both sides keep the connection alive and nothing is left to write."""
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
        """Abort the connection; waiting callers get an error."""
        if self._transport is not None:
            self._transport.abort()
        self._fail("the connection was closed on our side")
        self.is_lost = True

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, cause: str) -> None:
        if self._error is None and not self.is_complete:
            self._error = Upstream(f"cannot read the response of the engine at {self.address}: {cause}")
        self._wake()

    # Called by the transport ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but do not inherit from it.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.is_complete or self._parser is None:
            # Unsolicited bytes would be read as the next response.
            self.cut()
            return
        self.has_bytes = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("it is not valid HTTP, or its head is too large")
            self.cut()
            return
        if self._held_bytes > HIGH_WATER_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._parser = None  # breaks a reference cycle
        self._fail("the connection ended before the response was complete")

    # Called by the parser -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError("the head is too large")
        name = name.lower()
        if name == b"keep-alive":
            self.takes_a_thread = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        if not self._announces_its_end():
            self._fail("its length is unknown, so a lost connection would look like its end")
            raise ValueError("no framing")
        self.has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100 Continue and the like precede the response
            self.headers = []
            return
        assert self._parser is not None
        self.is_complete = True
        # Read here, because the parser forgets the flags of a response right after this callback.
        self._keeps_alive = bool(self._parser.should_keep_alive())

    def _announces_its_end(self) -> bool:
        if self.status in (204, 304):
            return True
        return any(
            name == b"content-length" or (name == b"transfer-encoding" and value.lower().endswith(b"chunked"))
            for name, value in self.headers
        )
