"""One gRPC call on a shared connection: messages as they arrive, in lists, until the trailers.

A caller that does not read stops its own stream only: the peer may send one window ahead and gets credit when messages
are taken. Bytes of a message that is not complete are credited while a reader waits, so a message may be far larger
than the window. The end is told once everything before it was taken: an empty list for OK, an error for anything else.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Protocol

from enginehouse.core.errors import EnginehouseError, TooLarge, Upstream
from enginehouse.engine.localai import frames, status
from enginehouse.engine.localai.hpack import Header

MAX_MESSAGE_BYTES = 52_428_800  # LocalAI's limit, in both directions
# Held for a caller that does not read, as in engine/openai: 500 stalled streams stay below 128 MiB.
WINDOW_BYTES = 256 * 1024
CREDIT_BYTES = WINDOW_BYTES // 2  # a smaller credit would be a frame per few tokens
PREFIX_BYTES = 5
EARLY_SECONDS = 0.01  # the resolution of timers, uvloop's and the engine's

_prefix_of = struct.Struct(">BI").unpack_from
_prefix = struct.Struct(">BI").pack


class StreamOwner(Protocol):
    """What a stream needs of its connection."""

    address: str

    async def send(self, stream: GrpcStream, payload: bytes, *, ends: bool, lead: bytes = b"") -> None: ...
    def credit(self, stream: GrpcStream, credit: int) -> None: ...
    def forget(self, stream: GrpcStream, reset_code: int | None) -> None: ...


class GrpcStream:
    """Has one reader and one sender at a time. Whoever leaves before the end calls `cancel`."""

    __slots__ = (
        "_deadline",
        "_error",
        "_late_at",
        "_limit_seconds",
        "_owner",
        "_partial",
        "_waiter",
        "_wanted_bytes",
        "has_answer",
        "has_ended",
        "is_over",
        "messages",
        "number",
        "room",
        "send_window",
        "window",
    )

    def __init__(self, owner: StreamOwner, number: int, send_window: int) -> None:
        self.number = number
        self.messages: list[bytes] = []
        self.window = WINDOW_BYTES
        self.send_window = send_window
        self.has_answer = False  # the head of the response has arrived
        self.has_ended = False  # our side: the last message was sent
        self.is_over = False
        self.room: asyncio.Future[None] | None = None  # of a sender that waits for a window
        self._owner = owner
        self._error: EnginehouseError | None = None
        self._partial = bytearray()
        self._wanted_bytes = 0  # of the incomplete message with its prefix; 0 while the prefix is incomplete
        self._waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._limit_seconds = 0.0
        self._late_at = 0.0

    # Used by the caller ---------------------------------------------------------------------------------------------

    async def next_messages(self) -> list[bytes]:
        """All messages that arrived since the last call, at least one; none at the end of a call that ended with OK."""
        while not self.messages:
            if self.is_over:
                if self._error is not None:
                    raise self._error
                return []
            if WINDOW_BYTES - self.window >= CREDIT_BYTES:
                self._credit()
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        messages = self.messages
        self.messages = []
        if WINDOW_BYTES - self.window >= CREDIT_BYTES and not self.is_over:
            self._credit()
        return messages

    async def send(self, message: bytes) -> None:
        """Send one more message of a call that was started with `ends=False`; waits for the peer's windows."""
        if self.has_ended:
            raise Upstream(f"cannot send to the engine at {self._owner.address}: the request was already ended")
        await self._owner.send(self, framed(message), ends=False)
        if self.is_over:
            raise self._error or Upstream(
                f"cannot send to the engine at {self._owner.address}: the engine has ended the call"
            )

    async def end(self) -> None:
        """Tell the engine that there are no more messages."""
        if not self.has_ended and not self.is_over:
            await self._owner.send(self, b"", ends=True)

    def cancel(self) -> None:
        """Tell the engine to stop, and drop what was not read."""
        self.messages = []
        self.fail("the call was cancelled", frames.CANCEL)

    # Used by the connection -----------------------------------------------------------------------------------------

    def expire_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._limit_seconds = seconds
        self._late_at = loop.time() + seconds - EARLY_SECONDS
        self._deadline = loop.call_later(seconds, self._expire)

    def take_headers(self, headers: list[Header], *, ends: bool) -> None:
        address = self._owner.address
        if self.has_answer:
            if not ends:
                self.fail("headers in the middle of the messages", frames.PROTOCOL_ERROR)
                return
            error = status.ended(headers, address)
            if error is None and self._partial:
                error = Upstream(f"cannot read the answer of the engine at {address}: it ended inside a message")
            self.finish(error)
        elif ends:
            error = None if status.has_status(headers) else status.refused_head(headers, address)
            self.finish(error or status.ended(headers, address))
        elif not status.is_interim(headers):
            error = status.refused_head(headers, address)
            if error is None:
                self.has_answer = True
            else:
                self.finish(error, frames.CANCEL)

    def take(self, data: bytes, start: int, end: int) -> None:
        """Bytes of messages, cut anywhere. Afterwards `is_whole` tells whether a message is incomplete."""
        if self._partial:
            start = self._complete(data, start, end)
        while end - start >= PREFIX_BYTES and not self.is_over:
            flag, length = _prefix_of(data, start)
            stop = start + PREFIX_BYTES + length
            if flag or length > MAX_MESSAGE_BYTES:
                self._refuse(flag, length)
                return
            if stop > end:
                self._wanted_bytes = PREFIX_BYTES + length
                break
            self.messages.append(data[start + PREFIX_BYTES : stop])
            start = stop
        if start < end and not self.is_over:
            self._partial += data[start:end]
        if self._waiter is not None and WINDOW_BYTES - self.window >= CREDIT_BYTES and not self.is_over:
            self._credit()

    @property
    def is_whole(self) -> bool:
        return not self._partial

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def wake_sender(self) -> None:
        if self.room is not None and not self.room.done():
            self.room.set_result(None)

    def fail(self, cause: str, reset_code: int | None = None) -> None:
        self.finish(Upstream(f"cannot complete the call to the engine at {self._owner.address}: {cause}"), reset_code)

    def finish(self, error: EnginehouseError | None, reset_code: int | None = None) -> None:
        """Nothing more will arrive. Idempotent; `reset_code` tells the peer, if the end is not its own."""
        if self.is_over:
            return
        self.is_over = True
        self._error = self._too_late() if error is not None and self._is_late(error) else error
        self._partial = bytearray()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if reset_code is None and not self.has_ended:
            reset_code = frames.CANCEL  # the peer has answered early and needs no more of the request
        self._owner.forget(self, reset_code)
        self.wake()
        self.wake_sender()

    def _complete(self, data: bytes, start: int, end: int) -> int:
        """Add to the incomplete message; returns where the bytes after it begin."""
        partial = self._partial
        if not self._wanted_bytes:
            stop = min(end, start + PREFIX_BYTES - len(partial))
            partial += data[start:stop]
            start = stop
            if len(partial) < PREFIX_BYTES:
                return start
            flag, length = _prefix_of(partial)
            if flag or length > MAX_MESSAGE_BYTES:
                self._refuse(flag, length)
                return end
            self._wanted_bytes = PREFIX_BYTES + length
        stop = min(end, start + self._wanted_bytes - len(partial))
        partial += data[start:stop]
        if len(partial) == self._wanted_bytes:
            self.messages.append(bytes(memoryview(partial)[PREFIX_BYTES:]))
            self._partial = bytearray()
            self._wanted_bytes = 0
        return stop

    def _refuse(self, flag: int, length: int) -> None:
        address = self._owner.address
        if flag:
            error = Upstream(
                f"cannot read a message of the engine at {address}: it is compressed, which was not offered"
            )
        else:
            error = status.GrpcError(
                address, status.RESOURCE_EXHAUSTED, f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} are read"
            )
        self.finish(error, frames.CANCEL)

    def _credit(self) -> None:
        self._owner.credit(self, WINDOW_BYTES - self.window)
        self.window = WINDOW_BYTES

    def _expire(self) -> None:
        self.finish(self._too_late(), frames.CANCEL)

    def _is_late(self, error: EnginehouseError) -> bool:
        """An engine that observes the deadline may end the call just before our timer does."""
        is_plain = not isinstance(error, status.GrpcError) or error.status == status.CANCELLED
        return is_plain and self._deadline is not None and asyncio.get_running_loop().time() >= self._late_at

    def _too_late(self) -> Upstream:
        return Upstream(
            f"cannot get an answer from the engine at {self._owner.address} within {self._limit_seconds:g} s",
            code="upstream_timeout",
        )


def framed(message: bytes) -> bytes:
    """The message with its prefix, not compressed."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise TooLarge(
            f"cannot send a message of {len(message)} bytes to an engine: at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return _prefix(0, len(message)) + message
