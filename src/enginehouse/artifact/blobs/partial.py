"""A partially downloaded blob: parts in any order, a journal of their progress, and a reader that follows.

The journal has, per part, the number of bytes written and their checksum, and is written after the bytes. A kill at
any instruction loses only bytes that the journal does not list; bytes torn by a power failure fail their checksum and
are downloaded again. The content must not be used as the blob before its digest is checked.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from isal import isal_zlib

from enginehouse.core.errors import EnginehouseError

PART_BYTES = 8 * 1024 * 1024  # one request: long enough for high latency, short enough to share among connections
_BODY, _CHECK = struct.Struct("<II"), struct.Struct("<I")  # bytes written and their checksum; checksum of both
_RECORD_BYTES = _BODY.size + _CHECK.size
_MOST_PIECES = 512  # the system accepts 1024 in one call
_READ_BYTES = 1024 * 1024


class Partial:
    """The file and its journal. `write` may be called from several threads."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.count = _count(size_bytes)
        self.written = [0] * self.count
        self._checksums = [0] * self.count
        self._locks = [threading.Lock() for _ in range(self.count)]
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._journal = os.open(journal_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._resume()
        self.resumed_bytes = self.done_bytes

    def start_of(self, part: int) -> int:
        return part * PART_BYTES

    def end_of(self, part: int) -> int:
        return min(self.size_bytes, (part + 1) * PART_BYTES)

    def missing(self) -> list[int]:
        return [part for part in range(self.count) if self.is_missing(part)]

    def is_missing(self, part: int) -> bool:
        return self.start_of(part) + self.written[part] < self.end_of(part)

    @property
    def done_bytes(self) -> int:
        return sum(self.written)

    def write(self, position: int, pieces: Sequence[bytes]) -> None:
        """Write the bytes from `position` on into their parts. Blocks.

        Bytes that are already written are skipped: two connections may deliver the same bytes, e.g. a range and a
        stream from byte 0 of a server without ranges. A part is only ever extended at its end, under its lock.
        """
        size = sum(map(len, pieces))
        part = position // PART_BYTES
        if size and position + size <= self.end_of(part) and len(pieces) <= _MOST_PIECES:
            self._append(part, position, pieces)
            return
        joined = memoryview(b"".join(pieces))
        while joined:
            part = position // PART_BYTES
            here = joined[: self.end_of(part) - position]
            self._append(part, position, [here])
            position, joined = position + len(here), joined[len(here) :]

    def close(self) -> None:
        os.close(self._file)
        os.close(self._journal)

    def _append(self, part: int, position: int, pieces: Sequence[bytes | memoryview]) -> None:
        with self._locks[part]:
            at = self.start_of(part) + self.written[part]
            if at != position:
                pieces = [memoryview(b"".join(pieces))[max(0, at - position) :]]
            size = sum(map(len, pieces))
            if not size or position > at:
                return
            summed = self._checksums[part]
            for piece in pieces:
                summed = isal_zlib.crc32(piece, summed)
            written = os.pwritev(self._file, pieces, at)
            while written < size:
                written += os.pwrite(self._file, memoryview(b"".join(pieces))[written:], at + written)
            self._checksums[part] = summed
            self._write_record(part, self.written[part] + size)
            self.written[part] += size

    def _write_record(self, part: int, written: int) -> None:
        record = _BODY.pack(written, self._checksums[part])
        os.pwrite(self._journal, record + _CHECK.pack(isal_zlib.crc32(record, part)), part * _RECORD_BYTES)

    def _resume(self) -> None:
        """Restore the parts of an earlier run whose checksums match."""
        if os.fstat(self._file).st_size > self.size_bytes:
            os.ftruncate(self._file, self.size_bytes)
        for part, (written, summed) in enumerate(_records(self._journal, self.size_bytes)):
            if written and self._sum(self.start_of(part), written) == summed:
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


def journalled_bytes(path: Path, size_bytes: int) -> int:
    """Bytes of a partial blob according to its journal. An estimate for plans: the content is not checked."""
    try:
        journal = os.open(journal_of(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return sum(written for written, _ in _records(journal, size_bytes)) if path.exists() else 0
    finally:
        os.close(journal)


def _records(journal: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield bytes written and checksum per part; zeros for a torn or impossible record."""
    content = os.pread(journal, _count(size_bytes) * _RECORD_BYTES, 0)
    for part in range(len(content) // _RECORD_BYTES):
        record = content[part * _RECORD_BYTES : (part + 1) * _RECORD_BYTES]
        written, summed = _BODY.unpack_from(record)
        (check,) = _CHECK.unpack_from(record, _BODY.size)
        room = min(PART_BYTES, size_bytes - part * PART_BYTES)
        is_sound = check == isal_zlib.crc32(record[: _BODY.size], part) and written <= room
        yield (written, summed) if is_sound else (0, 0)


def _count(size_bytes: int) -> int:
    return max(1, -(-size_bytes // PART_BYTES))


def journal_of(path: Path) -> Path:
    return path.with_name(path.name + ".journal")


class Following:
    """Reads a blob from its start during the download: `read` blocks until the next bytes are on disk.

    One thread reads; `moved`, `fail` and `complete` may be called from any other.
    """

    def __init__(self, path: Path, offset_bytes: int, size_bytes: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset_bytes = offset_bytes
        self._size_bytes = size_bytes
        self._position = 0
        self._ready_bytes = 0
        self._error: EnginehouseError | OSError | None = None
        self._changed = threading.Condition()

    def complete(self) -> None:
        self.moved(self._size_bytes)

    def moved(self, ready_bytes: int) -> None:
        """Record that the first `ready_bytes` are on disk."""
        with self._changed:
            self._ready_bytes = max(self._ready_bytes, ready_bytes)
            self._changed.notify_all()

    def follow(self, partial: Partial) -> None:
        """Call `moved` with the position of the first gap."""
        ready = self._ready_bytes
        index = min(ready // PART_BYTES, partial.count - 1)
        while index < partial.count:
            ready = partial.start_of(index) + partial.written[index]
            if ready < partial.end_of(index):
                break
            index += 1
        self.moved(ready)

    def fail(self, error: EnginehouseError | OSError) -> None:
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
