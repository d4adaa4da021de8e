"""Zip archives as entries for the unpacker.

The table of contents is at the end of a zip, so unpacking starts after the whole download, and therefore after the
check of the digest. Limits are enforced on the bytes read, never on the sizes in the table.
"""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import IO, cast

from enginehouse.artifact.blobs.partial import Following
from enginehouse.artifact.images.contents import CountedContents
from enginehouse.artifact.images.inflate import READ_BYTES, Hashed, check_digest
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.core.archive import (
    MAX_PATH,
    ArchiveLimits,
    EntryKind,
    TarEntry,
    check_path,
    kept_mode,
    not_allowed,
    too_large,
    unsafe,
)
from enginehouse.core.artifact import Layer
from enginehouse.core.name import shown

_SMALL_READ_BYTES = 1024 * 1024  # at most 22,795 entries, below the default limit, so not counted
_MAX_TABLE_BYTES = 32 * 1024 * 1024  # 100,000 entries with long names
_ENTRY_MARK = b"PK\x01\x02"
# The library decompresses these in chunks. It would decompress other methods in one piece, whatever their size.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def unzip(
    layer: Layer, source: Following, unpacker: Unpacker, limits: ArchiveLimits, is_stopped: Callable[[], bool]
) -> int:
    """Apply a zip to the tree. Returns the number of bytes in its files."""
    hashed = Hashed(source)
    while hashed.read(READ_BYTES):
        pass
    check_digest(layer, hashed.digest(), hashed.read_bytes)
    with source.path.open("rb") as opened:
        try:
            with zipfile.ZipFile(cast(IO[bytes], _Table(opened, limits.entries))) as archive:
                entries = _ZipEntries(archive, limits, layer.size_bytes)
                unpacker.apply(entries, is_stopped)
                return entries.plain_bytes
        except (
            zipfile.BadZipFile,
            zlib.error,
            struct.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
            ValueError,
        ) as error:
            raise unsafe(f"it is not a readable zip ({error})") from None


class _Table:
    """The file of a zip with limits on reads, because the library reads the whole table of contents at once."""

    def __init__(self, opened: IO[bytes], entries: int) -> None:
        self._opened = opened
        self._entries = entries
        self.tell, self.seekable, self.close = opened.tell, opened.seekable, opened.close

    def seek(self, offset: int, whence: int = 0, /) -> int:
        try:
            return self._opened.seek(offset, whence)
        except OSError as error:
            raise zipfile.BadZipFile(f"its table has an invalid offset ({error})") from None

    def read(self, size: int = -1, /) -> bytes:
        if size > _MAX_TABLE_BYTES:
            raise too_large(f"its table of contents has {size} bytes; the limit is {_MAX_TABLE_BYTES}")
        content = self._opened.read(size if size >= 0 else _MAX_TABLE_BYTES)
        if len(content) > _SMALL_READ_BYTES and content.count(_ENTRY_MARK) > self._entries:
            raise too_large(f"it has more than {self._entries} entries")
        return content


class _ZipEntries(CountedContents):
    def __init__(self, archive: zipfile.ZipFile, limits: ArchiveLimits, compressed_bytes: int) -> None:
        self._archive = archive
        self._limits = limits
        self._compressed_bytes = compressed_bytes
        self._file: IO[bytes] | None = None
        self.plain_bytes = 0

    def entries(self) -> Iterator[TarEntry]:
        for member in self._archive.infolist():
            kind, mode = _kind_of(member)
            path = check_path(member.orig_filename)
            target = ""
            if kind != "directory":
                with self._archive.open(member) as self._file:
                    self._left = member.file_size
                    if kind == "symlink":
                        target = self._target(path)
                    yield _entry(member, path, kind, mode, target)
                    for _ in self.contents():
                        pass
                    # The library compares the checksum at EOF, also for an empty file.
                    if self._file.read(1):
                        raise unsafe(f"{shown(path)} is larger than stated in its table of contents")
            else:
                yield _entry(member, path, kind, mode, target)

    def drain(self) -> None:
        """Does nothing: the digest is already checked."""

    def _target(self, path: str) -> str:
        if self._left > MAX_PATH:
            raise unsafe(f"the link {shown(path)} has no valid target")
        return self._take(self._left).decode("utf-8", "surrogateescape")

    def _take(self, size: int) -> bytes:
        assert self._file is not None
        content = self._file.read(size) if size else b""
        if len(content) < size:
            raise unsafe("it ends in the middle of a file")
        self._left -= size
        self.plain_bytes += size
        if self.plain_bytes > self._limits.total_bytes:
            raise too_large(f"it contains more than {self._limits.total_bytes / 2**30:.1f} GiB")
        if self.plain_bytes > max(self._limits.ratio_free_bytes, self._limits.ratio * self._compressed_bytes):
            raise too_large(f"it grows to more than {self._limits.ratio} times its compressed size")
        return content


def _entry(member: zipfile.ZipInfo, path: str, kind: EntryKind, mode: int, target: str) -> TarEntry:
    return TarEntry(
        path=path,
        kind=kind,
        size_bytes=member.file_size if kind == "file" else 0,
        mode=kept_mode(mode),
        mtime_ns=_time_of(member),
        target=target,
    )


def _kind_of(member: zipfile.ZipInfo) -> tuple[EntryKind, int]:
    mode = member.external_attr >> 16
    if not member.filename:
        raise unsafe("an entry has no name")
    if member.flag_bits & 1:
        raise not_allowed("it is encrypted")
    if member.compress_type not in _METHODS:
        raise not_allowed(f"{shown(member.filename)} uses an unsupported compression method")
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
            raise not_allowed(f"{shown(member.filename)} is a device or of an unknown type")


def _time_of(member: zipfile.ZipInfo) -> int:
    try:
        return int(datetime(*member.date_time, tzinfo=UTC).timestamp()) * 10**9
    except ValueError:
        return 0
