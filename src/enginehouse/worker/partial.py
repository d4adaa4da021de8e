"""A blob on its way to disk: parts that arrive in any order, a journal of how far each is, a reader that follows.

The journal holds, per part, how many bytes were written and their checksum, and is written after the bytes: a kill at
any instruction loses at most what was not yet in it, and what a power cut tore is found by its checksum and fetched
again. Nothing here is trusted as the blob itself before its digest was checked.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from isal import isal_zlib

from enginehouse.core.errors import EnginehouseError

PART_BYTES = 8 * 1024 * 1024  # one request: long enough for a far server, short enough to share among connections
_RECORD = struct.Struct("<III")  # bytes written, checksum of them, checksum of the record
_READ_BYTES = 1024 * 1024


class Partial:
    """The file and its journal. `write` is called from threads, one at a time per part."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.count = max(1, -(-size_bytes // PART_BYTES))
        self.written = [0] * self.count
        self._checksums = [0] * self.count
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._journal = os.open(journal_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._resume()

    def start_of(self, part: int) -> int:
        return part * PART_BYTES

    def end_of(self, part: int) -> int:
        return min(self.size_bytes, (part + 1) * PART_BYTES)

    def missing(self) -> list[int]:
        return [part for part in range(self.count) if self.start_of(part) + self.written[part] < self.end_of(part)]

    @property
    def done_bytes(self) -> int:
        return sum(self.written)

    def write(self, part: int, pieces: Sequence[bytes]) -> None:
        """Append to a part. Blocks."""
        at = self.start_of(part) + self.written[part]
        size, summed = 0, self._checksums[part]
        for piece in pieces:
            size += len(piece)
            summed = isal_zlib.crc32(piece, summed)
        if at + size > self.end_of(part):
            raise ValueError("more bytes than the part has")
        written = os.pwritev(self._file, pieces, at)
        while written < size:
            written += os.pwrite(self._file, b"".join(pieces)[written:], at + written)
        self._checksums[part] = summed
        self._note(part, self.written[part] + size)
        self.written[part] += size

    def close(self) -> None:
        os.close(self._file)
        os.close(self._journal)

    def _note(self, part: int, written: int) -> None:
        record = struct.pack("<II", written, self._checksums[part])
        os.pwrite(self._journal, _RECORD.pack(written, self._checksums[part], isal_zlib.crc32(record, part)), part * 12)

    def _resume(self) -> None:
        """Take over what an earlier run left, as far as its checksums hold."""
        journal = os.pread(self._journal, self.count * _RECORD.size, 0)
        for part in range(len(journal) // _RECORD.size):
            written, summed, check = _RECORD.unpack_from(journal, part * _RECORD.size)
            if check != isal_zlib.crc32(struct.pack("<II", written, summed), part):
                continue
            start = self.start_of(part)
            if 0 < written <= self.end_of(part) - start and self._sum(start, written) == summed:
                self.written[part], self._checksums[part] = written, summed

    def _sum(self, start: int, size: int) -> int | None:
        summed, done = 0, 0
        while done < size:
            content = os.pread(self._file, min(_READ_BYTES, size - done), start + done)
            if not content:
                return None
            summed = isal_zlib.crc32(content, summed)
            done += len(content)
        return summed


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


class Following:
    """Reads a blob from its beginning while its parts are still arriving: `read` waits for the bytes that are next.

    For a thread; `moved`, `fail` and `complete` are called from any other.
    """

    def __init__(self, path: Path, offset_bytes: int, size_bytes: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset_bytes = offset_bytes
        self._size_bytes = size_bytes
        self._position = 0
        self._ready_bytes = 0
        self._error: EnginehouseError | None = None
        self._changed = threading.Condition()

    def complete(self) -> None:
        self.moved(self._size_bytes)

    def moved(self, ready_bytes: int) -> None:
        """The first `ready_bytes` are on disk."""
        with self._changed:
            self._ready_bytes = max(self._ready_bytes, ready_bytes)
            self._changed.notify_all()

    def follow(self, partial: Partial, part: int) -> None:
        """`moved` up to the first hole, as seen from a part that has grown."""
        if partial.start_of(part) > self._ready_bytes:
            return
        ready = self._ready_bytes
        index = min(ready // PART_BYTES, partial.count - 1)
        while index < partial.count:
            ready = partial.start_of(index) + partial.written[index]
            if ready < partial.end_of(index):
                break
            index += 1
        self.moved(ready)

    def fail(self, error: EnginehouseError) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def read(self, size: int = -1, /) -> bytes:
        with self._changed:
            while self._position >= self._ready_bytes and self._ready_bytes < self._size_bytes:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            if self._error is not None:
                raise self._error
            left = self._ready_bytes - self._position
        content = os.pread(self._file, min(size, left) if size >= 0 else left, self._offset_bytes + self._position)
        self._position += len(content)
        return content

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._file)
