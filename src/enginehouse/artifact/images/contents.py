"""The contents of files, from an archive to new files on disk, or shared with files that are already there.

Only files that were made here are ever written to; what is there is read, compared, cloned and linked. What was
compared and then turned out to differ is copied from the file it was compared with, checked against the archive's
bytes, so nothing of a stream has to be held.
"""

from __future__ import annotations

import contextlib
import os
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

SPARE_BYTES = 64 * 1024 * 1024  # a disk filled to the last byte stops the machine, not only us
_LOOK_EVERY_BYTES = 64 * 1024 * 1024


class Entries(Protocol):
    """An archive in one pass: the contents of a file are taken before the next entry is asked for."""

    def entries(self) -> Iterator[TarEntry]: ...

    def contents(self) -> Iterator[memoryview]: ...

    def whole(self) -> memoryview | bytes: ...

    def drain(self) -> None: ...


class Contents:
    def __init__(self, sharing: Sharing, root: int) -> None:
        self._sharing = sharing
        self._root = root
        self._unlooked_bytes = _LOOK_EVERY_BYTES  # look before the first
        self.written_bytes = 0

    def put(self, entry: TarEntry, archive: Entries, directory: int, name: str) -> FileRecord | None:
        """Make the file `name`, where nothing is; what to remember of it, if another version may want to share it."""
        self._unlooked_bytes += entry.size_bytes
        if self._unlooked_bytes >= _LOOK_EVERY_BYTES:
            self._look_at_the_disk(entry.size_bytes)
        if entry.size_bytes > HELD_BYTES:
            sum_of_it = self._put_large(entry, archive.contents(), directory, name)
        else:
            content = archive.whole()
            if entry.size_bytes < SMALLEST_BYTES:
                self._write_whole(entry, content, directory, name)
                return None
            sum_of_it = checksum(content)
            found = self._sharing.small(entry, content, sum_of_it)
            if found is None or not self._share(found, entry, directory, name):
                self._write_whole(entry, content, directory, name)
        return FileRecord(entry.path, entry.size_bytes, entry.mode, sum_of_it, entry.mtime_ns)

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
            sum_of_it = 0
            for piece in pieces:
                sum_of_it = checksum(piece, sum_of_it)
                write_all(made, piece)
            settle(made, entry)
        finally:
            os.close(made)
        self.written_bytes += entry.size_bytes
        return sum_of_it

    def _put_large(self, entry: TarEntry, pieces: Iterator[memoryview], directory: int, name: str) -> int:
        """Compare with what may be the same as the bytes go by; write from where the last one turned out not to be."""
        equal = self._sharing.large(entry)
        if not equal:
            return self._write(entry, pieces, directory, name)
        with contextlib.ExitStack() as opened:
            for one in equal:
                opened.callback(one.close)
            done, sum_of_it = 0, 0
            for piece in pieces:
                still = [one for one in equal if one.holds(piece, done)]
                if not still:
                    head = _copied(equal[0], done, sum_of_it)
                    return self._write(entry, _chain(head, piece, pieces), directory, name)
                equal = still
                done += len(piece)
                sum_of_it = checksum(piece, sum_of_it)
            if not self._sharing.place(equal[0], entry, name, directory):
                self._write(entry, _copied(equal[0], done, sum_of_it), directory, name)
            return sum_of_it

    def _look_at_the_disk(self, coming_bytes: int) -> None:
        self._unlooked_bytes = 0
        status = os.fstatvfs(self._root)
        if status.f_bavail * status.f_frsize < coming_bytes + SPARE_BYTES:
            raise Unavailable(
                "cannot go on unpacking: no space left on the disk; free some, it goes on by itself",
                code="insufficient_disk",
            )


def write_all(made: int, content: bytes | memoryview) -> None:
    written = os.write(made, content)
    while written < len(content):
        written += os.write(made, memoryview(content)[written:])


def _copied(source: Opened, size_bytes: int, expected: int) -> Iterator[bytes]:
    """The head of a file that was compared. It may have been changed since, and the archive's bytes are gone."""
    done, sum_of_it = 0, 0
    while done < size_bytes:
        piece = os.pread(source.descriptor, min(HELD_BYTES, size_bytes - done), done)
        if not piece:
            break
        done += len(piece)
        sum_of_it = checksum(piece, sum_of_it)
        yield piece
    if done < size_bytes or sum_of_it != expected:
        raise Unavailable(
            "cannot go on unpacking: a file of another version was changed while it was compared; it is tried again",
            code="resource_exhausted",
        )


def _chain(
    head: Iterable[bytes | memoryview], piece: memoryview, rest: Iterable[memoryview]
) -> Iterator[bytes | memoryview]:
    yield from head
    yield piece
    yield from rest
