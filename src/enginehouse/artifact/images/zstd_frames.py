"""Detects a truncated zstd stream by following its frame and block headers.

The library's reader with bounded memory does not report a stream that ends inside a frame, and its other readers are
unbounded. Nothing is decoded here; the library reports a stream that is not zstd.
"""

from __future__ import annotations

_MAGIC = b"\x28\xb5\x2f\xfd"
_DICTIONARY_BYTES = (0, 1, 2, 4)
_SIZE_BYTES = (0, 2, 4, 8)


class Frames:
    """Pass the whole stream to `feed`, then read `is_whole`."""

    def __init__(self) -> None:
        self._skip = 0  # bytes to skip before the next header
        self._held = b""  # an incomplete header
        self._next = self._frame
        self._has_checksum = False
        self._is_foreign = False

    @property
    def is_whole(self) -> bool:
        return self._is_foreign or (self._next == self._frame and not self._skip and not self._held)

    def feed(self, content: bytes) -> None:
        position = 0
        while not self._is_foreign:
            if self._skip:
                passed = min(self._skip, len(content) - position)
                self._skip -= passed
                position += passed
                if self._skip:
                    return
            head = self._held + content[position : position + 8 - len(self._held)]
            used = self._next(head)
            if not used:
                self._held = head
                return
            position += used - len(self._held)
            self._held = b""

    def _frame(self, head: bytes) -> int:
        """Parse a frame header. Returns the number of bytes consumed, 0 if more are needed."""
        if len(head) < 5:
            return 0
        if head[:4] == _MAGIC:
            describing = head[4]
            is_single = bool(describing & 0x20)
            sizes = _SIZE_BYTES[describing >> 6] or (1 if is_single else 0)
            self._has_checksum = bool(describing & 0x04)
            self._skip = (0 if is_single else 1) + _DICTIONARY_BYTES[describing & 3] + sizes
            self._next = self._block
            return 5
        if head[1:4] == b"\x2a\x4d\x18" and head[0] >> 4 == 5:
            if len(head) < 8:
                return 0
            self._skip = int.from_bytes(head[4:8], "little")
            return 8
        self._is_foreign = True
        return 0

    def _block(self, head: bytes) -> int:
        if len(head) < 3:
            return 0
        header = int.from_bytes(head[:3], "little")
        self._skip = 1 if header >> 1 & 3 == 1 else header >> 3
        if header & 1:
            self._skip += 4 if self._has_checksum else 0
            self._next = self._frame
        return 3
