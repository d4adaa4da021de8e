"""One HTTP/2 connection to an engine, plaintext, client side, for gRPC and nothing else.

All frames of one socket read are handled in one loop; a reader is woken once per read. The window of the connection is
credited as bytes arrive, so that one caller that does not read cannot stop the others: memory is bounded by the windows
of the streams. There are no PINGs of our own: gRPC servers close a connection that sends more than one in five minutes,
and TCP keepalive notices a lost machine without them. A frozen engine is noticed by the deadline of its calls. Whatever
breaks the protocol ends the connection with GOAWAY; nothing is guessed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable
from typing import cast

from enginehouse.engine.dialing import unreachable
from enginehouse.engine.localai import frames
from enginehouse.engine.localai.blocks import MAX_HEADER_BYTES, HeaderBlocks
from enginehouse.engine.localai.hpack import NO_TABLE, HeaderListTooLarge
from enginehouse.engine.localai.sending import Sending
from enginehouse.engine.localai.stream import PREFIX_BYTES, WINDOW_BYTES, GrpcStream

log = logging.getLogger(__name__)

CONNECTION_WINDOW_BYTES = 2**30
CONNECTION_CREDIT_BYTES = 2**28
UNREAD_REPLY_BYTES = 64 * 1024  # to PINGs and SETTINGS, for a peer that sends them and does not read
CLOSE_SECONDS = 1.0  # for a last GOAWAY to leave

_SETTINGS = {
    frames.ENABLE_PUSH: 0,
    frames.INITIAL_WINDOW_SIZE: WINDOW_BYTES,
    frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
}
_GREETING = (
    frames.PREFACE
    + frames.settings(_SETTINGS)
    + frames.window_update(0, CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW_BYTES)
)
_LARGEST_WORD = frames.DEFAULT_FRAME_BYTES << 8
_LEAD_BYTES = frames.HEADER_BYTES + PREFIX_BYTES

# `length << 8 | type`, flags, stream; with the prefix of a message behind it.
_head_of = struct.Struct(">IBI").unpack_from
_lead_of = struct.Struct(">IBIBI").unpack_from
_number_of = struct.Struct(">I").unpack_from
_settings_of = struct.Struct(">HI").iter_unpack
_OVERRUN = frames.Violation(frames.FLOW_CONTROL_ERROR, "more bytes than the window of a stream")


class Http2Connection(asyncio.Protocol):
    """Owned by a pool; `on_lost` is called once, when no new stream can ever be opened here."""

    def __init__(self, address: str, on_lost: Callable[[Http2Connection], None]) -> None:
        self.address = address
        self.is_lost = False
        self.is_leaving = False  # open streams continue, new ones need another connection
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._streams: dict[int, GrpcStream] = {}
        # The streams of which the next byte begins a message: a frame that is one message needs no more than this.
        self._whole: dict[int, GrpcStream] = {}
        self._next_stream = 1
        self._max_streams = frames.LARGEST_WINDOW_BYTES
        self._blocks = HeaderBlocks()
        self._rest = b""
        self._window = CONNECTION_WINDOW_BYTES
        self._sending = Sending(self._write)
        self._unread_reply_bytes = 0
        self._replies = bytearray()
        self._outgoing: list[bytes] = []
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._is_greeted = False

    # Used by the pool -----------------------------------------------------------------------------------------------

    async def wait_for_greeting(self) -> None:
        """The first SETTINGS of the peer: before them it could be anything that accepts connections."""
        await self._greeted

    @property
    def has_room(self) -> bool:
        return (
            self._is_greeted
            and not self.is_lost
            and not self.is_leaving
            and len(self._streams) < self._max_streams
            and self._next_stream <= frames.LAST_STREAM
        )

    async def start(self, block: bytes, payload: bytes, *, deadline_seconds: float, ends: bool) -> GrpcStream:
        """Open a stream where `has_room` was seen in the same step, and send its first message."""
        number = self._next_stream
        self._next_stream += 2
        stream = GrpcStream(self, number, self._sending.initial_window)
        self._streams[number] = stream
        stream.expire_after(deadline_seconds)
        if number == 1:
            block = NO_TABLE + block
        lead = frames.header_frames(number, block, self._sending.max_frame_bytes)
        await self.send(stream, payload, ends=ends, lead=lead)
        return stream

    def retire(self) -> None:
        """Take no new streams, and close when the last one has ended."""
        self.is_leaving = True
        self._on_lost(self)
        if not self._streams:
            self.close()

    def close(self) -> None:
        """End all streams and close."""
        self._leave(frames.NO_ERROR, "the connection was closed on our side")

    async def wait_until_closed(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * CLOSE_SECONDS):
                await asyncio.shield(self._gone)

    # Used by streams ------------------------------------------------------------------------------------------------

    async def send(self, stream: GrpcStream, payload: bytes, *, ends: bool, lead: bytes = b"") -> None:
        await self._sending.send(stream, payload, ends=ends, lead=lead)

    def credit(self, stream: GrpcStream, credit: int) -> None:
        self._write(frames.window_update(stream.number, credit))

    def forget(self, stream: GrpcStream, reset_code: int | None) -> None:
        self._streams.pop(stream.number, None)
        self._whole.pop(stream.number, None)
        if reset_code is not None:
            self._write(frames.reset(stream.number, reset_code))
        if not self._streams and (self.is_leaving or self._next_stream > frames.LAST_STREAM):
            self.close()

    # Called by the transport ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have asyncio's methods but do not inherit from it.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(_GREETING)

    def pause_writing(self) -> None:
        self._sending.pause()

    def resume_writing(self) -> None:
        self._unread_reply_bytes = 0
        self._sending.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection ended before the answer was complete")
        if not self._gone.done():
            self._gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self.is_lost:
            return
        if self._rest:
            data = self._rest + data
        woken: list[GrpcStream] = []
        try:
            position = self._read_frames(data, woken)
            self._rest = data[position:]
            self._check_replies()
        except frames.Violation as violation:
            self._leave(violation.code, f"the engine broke the protocol: {violation}")
        for stream in woken:
            stream.wake()
        if self._replies:
            # After the streams: a client waits for them, and nobody for these.
            self._write(bytes(self._replies))
            self._replies.clear()

    # Reading --------------------------------------------------------------------------------------------------------

    def _read_frames(self, data: bytes, woken: list[GrpcStream]) -> int:
        """Handle all complete frames; returns where the incomplete one begins. Streams with news are put in `woken`."""
        size, position, received = len(data), 0, 0
        whole = self._whole
        last_lead = size - _LEAD_BYTES
        try:  # for `finally`: bytes count, however reading ends
            while True:
                if position <= last_lead:
                    word, flags, number, is_compressed, length = _lead_of(data, position)
                    # DATA without flags that is exactly one message: what a stream of tokens consists of.
                    if word == (length + PREFIX_BYTES) << 8 and not flags and not is_compressed:
                        stream = whole.get(number)
                        if stream is not None and word <= _LARGEST_WORD and not self._blocks.stream:
                            stop = position + _LEAD_BYTES + length
                            if stop > size:
                                return position
                            received += length + PREFIX_BYTES
                            stream.window -= length + PREFIX_BYTES
                            if stream.window < 0:
                                raise _OVERRUN
                            messages = stream.messages
                            if not messages:
                                woken.append(stream)
                            messages.append(data[position + _LEAD_BYTES : stop])
                            position = stop
                            continue
                elif position + frames.HEADER_BYTES <= size:
                    word, flags, number = _head_of(data, position)
                else:
                    return position
                if word >> 8 > frames.DEFAULT_FRAME_BYTES:
                    raise frames.Violation(frames.FRAME_SIZE_ERROR, "a frame larger than allowed")
                start = position + frames.HEADER_BYTES
                stop = start + (word >> 8)
                if stop > size:
                    return position
                self._take_frame(data[start:stop], word & 0xFF, flags, number & 0x7FFFFFFF, woken)
                position = stop
        finally:
            self._window -= received

    def _take_frame(self, payload: bytes, kind: int, flags: int, number: int, woken: list[GrpcStream]) -> None:
        if self._blocks.stream and (kind != frames.CONTINUATION or number != self._blocks.stream):
            raise frames.Violation(frames.PROTOCOL_ERROR, "another frame inside a header block")
        if not self._is_greeted and kind != frames.SETTINGS:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a first frame that is not SETTINGS")
        if kind == frames.DATA:
            self._take_data(payload, flags, number, woken)
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._take_headers(payload, kind, flags, number)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window_update(payload, number)
        elif kind == frames.PING:
            self._take_ping(payload, flags, number)
        elif kind == frames.SETTINGS:
            self._take_settings(payload, flags, number)
        elif kind == frames.RST_STREAM:
            self._take_reset(payload, number)
        elif kind == frames.GOAWAY:
            self._take_goaway(payload, number)
        elif kind == frames.PUSH_PROMISE:
            raise frames.Violation(frames.PROTOCOL_ERROR, "a push, which was refused from the start")
        # PRIORITY means nothing to a client, and unknown kinds are ignored by everybody.

    def _find(self, number: int) -> GrpcStream | None:
        """The open stream; None if it was closed, because frames may still be on their way then."""
        stream = self._streams.get(number)
        if stream is None and (number % 2 == 0 or number >= self._next_stream):
            raise frames.Violation(frames.PROTOCOL_ERROR, f"a frame for stream {number}, which was never opened")
        return stream

    def _take_data(self, payload: bytes, flags: int, number: int, woken: list[GrpcStream]) -> None:
        self._window -= len(payload)
        start, end = frames.content(payload, flags)
        stream = self._find(number)
        if stream is None:
            return
        if not stream.has_answer:
            stream.fail("messages before the head of the answer", frames.PROTOCOL_ERROR)
            return
        stream.window -= len(payload)
        if stream.window < 0:
            raise _OVERRUN
        had_messages = bool(stream.messages)
        stream.take(payload, start, end)
        if stream.messages and not had_messages:
            woken.append(stream)
        if flags & frames.END_STREAM:
            stream.fail("it ended without a gRPC status")
        elif stream.is_over or not stream.is_whole:
            self._whole.pop(number, None)
        else:
            self._whole[number] = stream

    def _take_headers(self, payload: bytes, kind: int, flags: int, number: int) -> None:
        """One frame of a header block; the last one completes it. The block of a closed stream is decoded as well."""
        self._find(number)
        blocks = self._blocks
        if not (blocks.begin(payload, flags, number) if kind == frames.HEADERS else blocks.extend(payload, flags)):
            return
        stream = self._streams.get(number)
        try:
            headers = blocks.finish()
        except HeaderListTooLarge:
            if stream is not None:
                stream.fail(f"headers of more than {MAX_HEADER_BYTES} bytes", frames.CANCEL)
            return
        if stream is not None:
            stream.take_headers(headers, ends=blocks.ends)
            if stream.has_answer and not stream.is_over:
                self._whole[number] = stream

    def _take_settings(self, payload: bytes, flags: int, number: int) -> None:
        frames.check(payload, 0 if flags & frames.ACK else len(payload) // 6 * 6, is_placed=number == 0)
        if flags & frames.ACK:
            return
        values = dict(_settings_of(payload))  # of a value that is named twice the last counts
        self._sending.adopt(values, self._streams.values())
        if values.get(frames.ENABLE_PUSH):
            raise frames.Violation(frames.PROTOCOL_ERROR, "a server that enables push")
        self._max_streams = values.get(frames.MAX_CONCURRENT_STREAMS, self._max_streams)
        self._replies += frames.SETTINGS_ACK
        self._is_greeted = True
        if not self._greeted.done():
            self._greeted.set_result(None)

    def _take_window_update(self, payload: bytes, number: int) -> None:
        frames.check(payload, 4)
        credit = _number_of(payload)[0] & 0x7FFFFFFF
        if number == 0:
            self._sending.take_credit(credit)
            return
        stream = self._find(number)
        if stream is not None:
            stream.send_window += credit
            if not credit or stream.send_window > frames.LARGEST_WINDOW_BYTES:
                code = frames.FLOW_CONTROL_ERROR if credit else frames.PROTOCOL_ERROR
                stream.fail("the engine gave a credit that is wrong", code)
            stream.wake_sender()

    def _take_ping(self, payload: bytes, flags: int, number: int) -> None:
        frames.check(payload, 8, is_placed=number == 0)
        if not flags & frames.ACK:
            self._replies += frames.ping_ack(payload)

    def _take_reset(self, payload: bytes, number: int) -> None:
        frames.check(payload, 4)
        stream = self._find(number)
        if stream is None:
            return
        code = _number_of(payload)[0]
        stream.has_ended = True  # a reset is not answered by another
        if code == frames.REFUSED_STREAM and not stream.has_answer:
            stream.finish(unreachable(self.address, "it refused the call"))
        else:
            stream.fail(f"the engine reset it ({frames.error_name(code)})")

    def _take_goaway(self, payload: bytes, number: int) -> None:
        frames.check(payload, max(len(payload), 8), is_placed=number == 0)
        last, code = _number_of(payload)[0] & 0x7FFFFFFF, _number_of(payload, 4)[0]
        if code != frames.NO_ERROR:
            log.warning("connection.refused address=%s code=%s", self.address, frames.error_name(code))
        self.is_leaving = True
        for stream in [stream for stream in self._streams.values() if stream.number > last]:
            stream.has_ended = True
            stream.finish(unreachable(self.address, "it is going away and has not begun the call"))
        self.retire()

    # Writing and ending ---------------------------------------------------------------------------------------------

    def _check_replies(self) -> None:
        """What the frames of one read ask for, completed with the credit for their bytes."""
        if self._window < 0:
            raise frames.Violation(frames.FLOW_CONTROL_ERROR, "more bytes than the window of the connection")
        if CONNECTION_WINDOW_BYTES - self._window >= CONNECTION_CREDIT_BYTES:
            self._replies += frames.window_update(0, CONNECTION_WINDOW_BYTES - self._window)
            self._window = CONNECTION_WINDOW_BYTES
        if self._replies and self._sending.is_paused:
            self._unread_reply_bytes += len(self._replies)
            if self._unread_reply_bytes > UNREAD_REPLY_BYTES:
                raise frames.Violation(frames.ENHANCE_YOUR_CALM, "questions without reading the replies")

    def _write(self, piece: bytes) -> None:
        """Everything of one turn of the event loop is one write: a write costs more than all else about a call."""
        if not self.is_lost and self._transport is not None:
            if not self._outgoing:
                self._loop.call_soon(self._flush)
            self._outgoing.append(piece)

    def _flush(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
            self._outgoing.clear()

    def _leave(self, code: int, cause: str) -> None:
        """Say GOAWAY, close, and end all streams."""
        if self.is_lost:
            return
        if self._transport is not None:
            self._write(frames.goaway(code, cause))
            self._flush()
            self._transport.close()
            # For a peer that does not read; on a closed transport this does nothing.
            self._loop.call_later(CLOSE_SECONDS, self._transport.abort)
        self._end(cause)

    def _end(self, cause: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        if not self._greeted.done():
            self._greeted.set_exception(unreachable(self.address, cause))
            self._greeted.exception()  # nobody waits if opening the connection was cancelled
        self._on_lost(self)
        for stream in list(self._streams.values()):
            stream.fail(cause)
