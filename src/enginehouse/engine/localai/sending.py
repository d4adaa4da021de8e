"""The sending half of a connection: the peer's windows, its frame size, and callers that wait for room.

Nothing is written beyond a window or while the transport is full, so a large request waits in its caller and not in a
buffer. After each burst the other senders get their turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from enginehouse.engine.localai import frames
from enginehouse.engine.localai.stream import GrpcStream

BURST_BYTES = 256 * 1024


class Sending:
    """Belongs to one connection."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.initial_window = frames.DEFAULT_WINDOW_BYTES
        self.max_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self.is_paused = False  # the transport is full
        self._write = write
        self._window = frames.DEFAULT_WINDOW_BYTES
        self._blocked: dict[int, GrpcStream] = {}  # the longest waiting first

    async def send(self, stream: GrpcStream, payload: bytes, *, ends: bool, lead: bytes = b"") -> None:
        """Send `lead` at once and the payload in frames; returns early if the call is over meanwhile."""
        assert stream.number not in self._blocked, "a stream has one sender at a time"
        left = memoryview(payload)
        pieces: list[bytes | memoryview] = [lead] if lead else []
        try:
            while not stream.is_over:
                room = max(0, min(self._window, stream.send_window, BURST_BYTES, len(left)))
                if self.is_paused or (left and not room):
                    if pieces:
                        self._write(b"".join(pieces))
                        pieces = []
                    await self._wait(stream)
                    continue
                is_last = room == len(left)
                stream.has_ended = ends and is_last
                stream.send_window -= room
                self._window -= room
                pieces += frames.data_frames(stream.number, left[:room], self.max_frame_bytes, ends=stream.has_ended)
                self._write(b"".join(pieces))
                if is_last:
                    return
                left, pieces = left[room:], []
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            stream.cancel()  # half a message was sent: nothing can follow it
            raise

    def adopt(self, values: dict[int, int], streams: Iterable[GrpcStream]) -> None:
        """Take over the peer's SETTINGS; a change of the initial window applies to open streams too."""
        window = values.get(frames.INITIAL_WINDOW_SIZE, self.initial_window)
        change = window - self.initial_window
        self.initial_window = window
        if change:
            for stream in streams:
                stream.send_window += change  # which may make it negative
                window = max(window, stream.send_window)
        if window > frames.LARGEST_WINDOW_BYTES:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "a window that is too large")
        self.max_frame_bytes = values.get(frames.MAX_FRAME_SIZE, self.max_frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= self.max_frame_bytes <= frames.LARGEST_FRAME_BYTES:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a frame size that is not allowed")
        self._wake()

    def take_credit(self, credit: int) -> None:
        """The peer's WINDOW_UPDATE of the connection."""
        if not credit:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a credit of nothing")
        self._window += credit
        if self._window > frames.LARGEST_WINDOW_BYTES:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "a window that is too large")
        self._wake()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        self._wake()

    def _wake(self) -> None:
        for stream in self._blocked.values():
            stream.wake_sender()

    async def _wait(self, stream: GrpcStream) -> None:
        self._blocked[stream.number] = stream
        stream.room = asyncio.get_running_loop().create_future()
        try:
            await stream.room
        finally:
            stream.room = None
            del self._blocked[stream.number]
