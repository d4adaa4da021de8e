"""Header blocks of one connection: put together from HEADERS and CONTINUATION, then decoded.

The limits stand before the decoder, because a block that is never complete costs memory too. A block that exceeds them
ends the connection: what was left out of the decoder could not be made good.
"""

from __future__ import annotations

from enginehouse.engine.localai import frames
from enginehouse.engine.localai.hpack import Decoder, Header

# An engine may put the output of a failed load into its message, so this is generous; a frame takes 16 KiB of it.
MAX_HEADER_BYTES = 256 * 1024
MAX_CONTINUATIONS = 32
_PRIORITY_BYTES = 5


class HeaderBlocks:
    """`stream` is the one whose block is incomplete, 0 if none is: until then no other frame may arrive."""

    def __init__(self) -> None:
        self.stream = 0
        self.ends = False
        self._decoder = Decoder(MAX_HEADER_BYTES)
        self._block = bytearray()
        self._continuations = 0

    def begin(self, payload: bytes, flags: int, stream: int) -> bool:
        """Take HEADERS; whether the block is complete."""
        start, end = frames.content(payload, flags)
        if flags & frames.WITH_PRIORITY:
            start += _PRIORITY_BYTES
            if start > end:
                raise frames.Violation(frames.FRAME_SIZE_ERROR, "HEADERS without room for their priority")
        self.stream = stream
        self.ends = bool(flags & frames.END_STREAM)
        self._continuations = 0
        self._block += payload[start:end]
        return bool(flags & frames.END_HEADERS)

    def extend(self, payload: bytes, flags: int) -> bool:
        """Take CONTINUATION; whether the block is complete."""
        if not self.stream:
            raise frames.Violation(frames.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._continuations += 1
        if self._continuations > MAX_CONTINUATIONS or len(self._block) + len(payload) > MAX_HEADER_BYTES:
            raise frames.Violation(frames.ENHANCE_YOUR_CALM, "headers that are too large")
        self._block += payload
        return bool(flags & frames.END_HEADERS)

    def finish(self) -> list[Header]:
        """The headers of the complete block. Raises HeaderListTooLarge, after which the connection is still right."""
        block = bytes(self._block)
        self._block.clear()
        self.stream = 0
        try:
            return self._decoder.decode(block)
        except ValueError as error:
            raise frames.Violation(frames.COMPRESSION_ERROR, f"headers with {error}") from error
