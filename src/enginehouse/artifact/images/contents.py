"""File contents of an archive: written to new files, or shared with identical files on disk.

Only files created here are written to; existing files are read, compared, cloned and linked. A large file is compared
while it streams. If it differs at some point, its head is copied from the compared file and checked against the
checksum of the streamed bytes, so the stream is never buffered.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Protocol

from enginehouse.artifact.images.sharing import (
    HELD_BYTES,
    NEW_FILE,
    SMALLEST_BYTES,
    FileRecord,
    Opened,
    Sharing,
    checksum,
    settle,
)
from enginehouse.core.archive import TarEntry
from enginehouse.core.errors import Unavailable

SPARE_BYTES = 64 * 1024 * 1024  # a completely full disk would stop the whole machine
_CHECK_EVERY_BYTES = 64 * 1024 * 1024


class Entries(Protocol):
    """An archive read in one pass. The contents of a file are read before the next entry."""

    def entries(self) -> Iterator[TarEntry]: ...

    def contents(self) -> Iterator[memoryview]: ...

    def whole(self) -> memoryview | bytes: ...

    def drain(self) -> None: ...


class CountedContents(ABC):
    """`contents` and `whole` for an archive that knows the number of unread bytes of the current file."""

    _left = 0

    def contents(self) -> Iterator[memoryview]:
        while self._left:
            yield memoryview(self._take(min(HELD_BYTES, self._left)))

    def whole(self) -> bytes:
        return self._take(self._left)

    @abstractmethod
    def _take(self, size: int) -> bytes:
        """Read exactly `size` bytes of the current file and reduce `_left`."""


class Contents:
    def __init__(self, sharing: Sharing, root: int) -> None:
        self._sharing = sharing
        self._root = root
        self._unchecked_bytes = _CHECK_EVERY_BYTES  # check before the first file
        self.written_bytes = 0

    def put(self, entry: TarEntry, archive: Entries, directory: int, name: str) -> FileRecord | None:
        """Create the file `name`, which must not exist. Returns its record if it is large enough to be shared later."""
        self._unchecked_bytes += entry.size_bytes
        if self._unchecked_bytes >= _CHECK_EVERY_BYTES:
            self._check_free_space(entry.size_bytes)
        if entry.size_bytes > HELD_BYTES:
            summed = self._put_large(entry, archive.contents(), directory, name)
        else:
            content = archive.whole()
            if entry.size_bytes < SMALLEST_BYTES:
                self._write_whole(entry, content, directory, name)
                return None
            summed = checksum(content)
            found = self._sharing.small(entry, content, summed)
            if found is None or not self._share(found, entry, directory, name):
                self._write_whole(entry, content, directory, name)
        return FileRecord(entry.path, entry.size_bytes, entry.mode, summed, entry.mtime_ns)

    def _share(self, found: Opened, entry: TarEntry, directory: int, name: str) -> bool:
        try:
            return self._sharing.place(found, entry, name, directory)
        finally:
            found.close()

    def _write_whole(self, entry: TarEntry, content: bytes | memoryview, directory: int, name: str) -> None:
        made = os.open(name, NEW_FILE, 0o600, dir_fd=directory)
        try:
            if content:
                write_all(made, content)
            settle(made, entry)
        finally:
            os.close(made)
        self.written_bytes += entry.size_bytes

    def _write(self, entry: TarEntry, pieces: Iterable[bytes | memoryview], directory: int, name: str) -> int:
        made = os.open(name, NEW_FILE, 0o600, dir_fd=directory)
        try:
            summed = 0
            for piece in pieces:
                summed = checksum(piece, summed)
                write_all(made, piece)
            settle(made, entry)
        finally:
            os.close(made)
        self.written_bytes += entry.size_bytes
        return summed

    def _put_large(self, entry: TarEntry, pieces: Iterator[memoryview], directory: int, name: str) -> int:
        """Compare candidates with the stream, and write from the point where the last candidate differs."""
        equal = self._sharing.large(entry)
        if not equal:
            return self._write(entry, pieces, directory, name)
        with contextlib.ExitStack() as opened:
            for one in equal:
                opened.callback(one.close)
            done, summed = 0, 0
            for piece in pieces:
                still = [one for one in equal if one.holds(piece, done)]
                if not still:
                    head = _copied(equal[0], done, summed)
                    return self._write(entry, _chain(head, piece, pieces), directory, name)
                equal = still
                done += len(piece)
                summed = checksum(piece, summed)
            if not self._sharing.place(equal[0], entry, name, directory):
                self._write(entry, _copied(equal[0], done, summed), directory, name)
            return summed

    def _check_free_space(self, coming_bytes: int) -> None:
        self._unchecked_bytes = 0
        status = os.fstatvfs(self._root)
        if status.f_bavail * status.f_frsize < coming_bytes + SPARE_BYTES:
            raise Unavailable(
                "cannot continue unpacking: no space left on the disk; free some space, it is retried automatically",
                code="insufficient_disk",
            )


def write_all(made: int, content: bytes | memoryview) -> None:
    written = os.write(made, content)
    while written < len(content):
        written += os.write(made, memoryview(content)[written:])


def _copied(source: Opened, size_bytes: int, expected: int) -> Iterator[bytes]:
    """Yield the head of a compared file, checked again: the file may have changed, and the stream has passed."""
    done, summed = 0, 0
    while done < size_bytes:
        piece = os.pread(source.descriptor, min(HELD_BYTES, size_bytes - done), done)
        if not piece:
            break
        done += len(piece)
        summed = checksum(piece, summed)
        yield piece
    if done < size_bytes or summed != expected:
        raise Unavailable(
            "cannot continue unpacking: a file of another version changed during the comparison; it is retried",
            code="resource_exhausted",
        )


def _chain(
    head: Iterable[bytes | memoryview], piece: memoryview, rest: Iterable[memoryview]
) -> Iterator[bytes | memoryview]:
    yield from head
    yield piece
    yield from rest
