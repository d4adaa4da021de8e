"""Zip archives as entries for the unpacker.

A zip's table of contents is at its end, so nothing can be unpacked before the last byte has come; in return nothing
has to be unpacked before the digest was checked. Limits are counted while reading, never taken from the table.
"""

from __future__ import annotations

import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import IO

from enginehouse.core.archive import (
    MAX_PATH,
    ArchiveLimits,
    Kind,
    TarEntry,
    check_mode,
    check_path,
    too_large,
    unsafe,
)
from enginehouse.core.artifact import Layer
from enginehouse.worker.inflate import READ_BYTES, Hashed, check_digest
from enginehouse.worker.partial import Following
from enginehouse.worker.unpack import Unpacker

_PIECE_BYTES = 1024 * 1024


def unzip(
    layer: Layer, source: Following, unpacker: Unpacker, limits: ArchiveLimits, is_stopped: Callable[[], bool]
) -> int:
    """Apply a zip to the tree; the number of bytes in its files."""
    hashed = Hashed(source)
    while hashed.read(READ_BYTES):
        pass
    check_digest(layer, hashed.digest(), hashed.read_bytes)
    try:
        with zipfile.ZipFile(source.path) as archive:
            entries = _ZipEntries(archive, limits, layer.size_bytes)
            unpacker.apply(entries, is_stopped)
            return entries.plain_bytes
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise unsafe(f"it is no zip that can be read ({error})") from None


class _ZipEntries:
    def __init__(self, archive: zipfile.ZipFile, limits: ArchiveLimits, compressed_bytes: int) -> None:
        self._archive = archive
        self._limits = limits
        self._compressed_bytes = compressed_bytes
        self._file: IO[bytes] | None = None
        self._left = 0
        self.plain_bytes = 0

    def entries(self) -> Iterator[TarEntry]:
        for member in self._archive.infolist():
            kind, mode = _kind_of(member)
            path = check_path(member.filename)
            target = ""
            if kind == "symlink":
                if member.file_size > MAX_PATH:
                    raise unsafe(f"the link {path[:80]!r} has no usable target")
                target = self._archive.read(member).decode("utf-8", "surrogateescape")
            elif kind == "file":
                self._file, self._left = self._archive.open(member), member.file_size
            yield TarEntry(
                path=path,
                kind=kind,
                size_bytes=member.file_size if kind == "file" else 0,
                mode=check_mode(path, kind, mode),
                mtime_ns=_time_of(member),
                target=target,
            )
            if self._file is not None:
                self._file.close()
                self._file = None

    def contents(self) -> Iterator[memoryview]:
        while self._left:
            yield memoryview(self._take(min(_PIECE_BYTES, self._left)))

    def whole(self) -> bytes:
        return self._take(self._left)

    def drain(self) -> None:
        """Nothing follows: the digest was checked before."""

    def _take(self, size: int) -> bytes:
        assert self._file is not None
        content = self._file.read(size) if size else b""
        if len(content) < size:
            raise unsafe("it ends in the middle of a file")
        self._left -= size
        self.plain_bytes += size
        if self.plain_bytes > self._limits.total_bytes:
            raise too_large(f"it holds more than {self._limits.total_bytes / 2**30:.1f} GiB")
        if self.plain_bytes > max(self._limits.ratio_free_bytes, self._limits.ratio * self._compressed_bytes):
            raise too_large(f"it grows to more than {self._limits.ratio} times its compressed size")
        return content


def _kind_of(member: zipfile.ZipInfo) -> tuple[Kind, int]:
    mode = member.external_attr >> 16
    if member.flag_bits & 1:
        raise unsafe("it is encrypted")
    if member.is_dir():
        return "directory", mode & 0o7777 or 0o755
    match stat.S_IFMT(mode):
        case 0 | stat.S_IFREG:
            return "file", mode & 0o7777 or 0o644
        case stat.S_IFLNK:
            return "symlink", 0o777
        case stat.S_IFDIR:
            return "directory", mode & 0o7777
        case _:
            raise unsafe(f"{member.filename[:80]!r} is a device or of an unknown type")


def _time_of(member: zipfile.ZipInfo) -> int:
    try:
        return int(datetime(*member.date_time, tzinfo=UTC).timestamp()) * 10**9
    except ValueError:
        return 0
