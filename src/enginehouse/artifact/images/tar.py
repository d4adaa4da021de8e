"""Streaming reader of tar archives: headers and contents in one pass, without a temporary file.

Supports ustar, GNU and pax. Names are only decoded here; `core.archive` decides whether they are safe. An archive that
common readers interpret differently is refused. The reader of the standard library is not used, because it takes twice
as long for small files and needs to seek.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator

from enginehouse.core.archive import (
    MAX_PATH,
    EntryKind,
    TarEntry,
    check_path,
    kept_mode,
    not_allowed,
    too_large,
    unsafe,
)
from enginehouse.core.name import shown

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_HEADER_BYTES = 1024 * 1024  # of one pax or long-name record; paths have at most 4 KiB
_MAX_RECORDS = 8  # before one entry; three are usual. Needed because they do not count as entries
_KINDS: dict[bytes, EntryKind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "directory",
}
_WORDS = {b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_ATTRIBUTES = {
    b"SCHILY.xattr.security.capability": "security.capability",
    b"LIBARCHIVE.xattr.security.capability": "security.capability",
    b"SCHILY.acl.access": "an access list",
    b"SCHILY.xattr.system.posix_acl_access": "an access list",
}
_MAX_SIZE = 2**62
_EARLIEST, _LATEST = -(2**31), 2**34  # times that every file system accepts or rounds
_RENAMING = {b"path", b"linkpath", b"size"}
_ENCODING = sys.getfilesystemencoding()  # keeps the bytes of a name unchanged on disk

Buffers = Callable[[], bytes | memoryview]  # the next buffer, empty at the end


class TarStream:
    """A tar archive. Contents of a file that are not read before the next entry are skipped."""

    def __init__(self, next_buffer: Buffers) -> None:
        self._next_buffer = next_buffer
        self._buffer = memoryview(b"")
        self._position = 0
        self._left = 0  # unread bytes of the current file
        self._padding = 0

    def entries(self) -> Iterator[TarEntry]:
        pax: dict[bytes, bytes] = {}
        long: dict[bytes, bytes] = {}
        records = 0
        while (header := self._header()) is not None:
            records += 1
            if records > _MAX_RECORDS:
                raise unsafe(f"an entry has more than {_MAX_RECORDS} headers")
            match header.type:
                case b"x":
                    pax = _pax_records(self._record(header.size_bytes))
                case b"g":
                    _check_global(_pax_records(self._record(header.size_bytes)))
                    records = 0
                case b"L":
                    long[b"path"] = self._record(header.size_bytes).split(b"\0")[0]
                case b"K":
                    long[b"linkpath"] = self._record(header.size_bytes).split(b"\0")[0]
                case _:
                    entry = header.entry(pax | long if long else pax)
                    pax, long, records = {}, {}, 0
                    self._left = entry.size_bytes
                    self._padding = -entry.size_bytes % BLOCK
                    yield entry
        if records:
            raise unsafe("it ends after an extended header, before its entry")

    def contents(self) -> Iterator[memoryview]:
        """Yield the bytes of the current file in chunks. A chunk is valid until the next one."""
        while self._left:
            yield self._piece()

    def whole(self) -> memoryview | bytes:
        """Return all bytes of the current file. For small files."""
        taken = self._take(self._left)
        assert taken is not None
        self._left = 0
        return taken

    def drain(self) -> None:
        """Read to the end of the stream, because bytes after the end mark are part of the digest."""
        while len(self._next_buffer()):
            pass

    def _header(self) -> _Header | None:
        """Return the next header, or None at the end: two zero blocks, one zero block and EOF, or EOF."""
        self._skip_rest()
        block = self._take(BLOCK, may_end=True)
        if block is None:
            return None
        if block != _ZEROS:
            return _Header(bytes(block))
        after = self._take(BLOCK, may_end=True)
        if after is not None and after != _ZEROS:
            raise unsafe("it continues after an incomplete end mark")
        return None

    def _piece(self) -> memoryview:
        if self._position == len(self._buffer) and not self._fill():
            raise unsafe("it ends in the middle of a file")
        start = self._position
        self._position = min(len(self._buffer), start + self._left)
        self._left -= self._position - start
        return self._buffer[start : self._position]

    def _skip_rest(self) -> None:
        left = self._left + self._padding
        if self._position + left <= len(self._buffer):
            self._left = self._padding = 0
            self._position += left
            return
        while self._left:
            self._piece()
        while self._padding and (self._position < len(self._buffer) or self._fill()):
            step = min(self._padding, len(self._buffer) - self._position)
            self._position += step
            self._padding -= step
        self._padding = 0  # some programs do not pad the last block

    def _fill(self) -> bool:
        self._buffer = memoryview(self._next_buffer())
        self._position = 0
        return len(self._buffer) > 0

    def _take(self, size: int, *, may_end: bool = False) -> memoryview | bytes | None:
        start = self._position
        if len(self._buffer) - start >= size:
            self._position = start + size
            return self._buffer[start : start + size]
        parts = bytearray(self._buffer[start:])
        self._position = len(self._buffer)
        while len(parts) < size:
            if not self._fill():
                if may_end and not parts:
                    return None
                raise unsafe("it ends in the middle of an entry")
            self._position = min(len(self._buffer), size - len(parts))
            parts += self._buffer[: self._position]
        return bytes(parts)

    def _record(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise unsafe(f"an extended header has {size} bytes; the limit is {_MAX_HEADER_BYTES}")
        taken = self._take(size + -size % BLOCK)
        assert taken is not None
        return bytes(taken[:size])


class _Header:
    def __init__(self, block: bytes) -> None:
        if _number(block[148:156]) != _checksum(block):
            raise unsafe("the checksum of a header is wrong")
        self._block = block
        self.type = block[156:157]
        self.size_bytes = _number(block[124:136])

    def entry(self, pax: dict[bytes, bytes]) -> TarEntry:
        block = self._block
        raw = _text(pax.get(b"path") or self._name())
        path = check_path(raw)
        if self.type == b"S" or (pax and any(key.startswith(b"GNU.sparse") for key in pax)):
            raise too_large(f"{shown(path)} is a sparse file, whose size is not limited by the archive")
        kind = _KINDS.get(self.type)
        if kind is None:
            raise not_allowed(f"{shown(path)} is {_WORDS.get(self.type, 'of an unknown type')}")
        if self.type == b"\0" and raw.endswith("/"):
            kind = "directory"  # the form of archives before ustar
        size = _decimal(pax[b"size"]) if b"size" in pax else self.size_bytes
        if not 0 <= size < _MAX_SIZE:
            raise unsafe(f"{shown(path)} has an invalid size of {size} bytes")
        return TarEntry(
            path=path,
            kind=kind,
            size_bytes=size if kind == "file" else 0,
            mode=kept_mode(_number(block[100:108])),
            mtime_ns=_nanoseconds(pax[b"mtime"]) if b"mtime" in pax else _time(_number(block[136:148])),
            attributes=_attributes(pax) if pax else (),
            target=_text(pax.get(b"linkpath") or block[157:257].split(b"\0")[0]) if kind.endswith("link") else "",
        )

    def _name(self) -> bytes:
        block = self._block
        name = block[:100].split(b"\0")[0]
        # Only POSIX has a prefix here, and that of star is shorter; the GNU format uses the field for times.
        if block[257:263] == b"ustar\0" and block[345]:
            end = 476 if block[508:512] == b"tar\0" else 500
            return block[345:end].split(b"\0")[0] + b"/" + name
        return name


def _attributes(pax: dict[bytes, bytes]) -> tuple[str, ...]:
    """The attributes that grant rights: capabilities and access lists."""
    return tuple(name for key, name in _ATTRIBUTES.items() if key in pax)


def _checksum(block: bytes) -> int:
    """The sum of all bytes, with the checksum field counted as spaces.

    The lower half of Adler-32 is a sum from 1 on that cannot wrap within 256 bytes; `sum` takes forty times as long.
    """
    halves = zlib.adler32(block[:148]), zlib.adler32(block[156:334]), zlib.adler32(block[334:])
    return sum(half & 0xFFFF for half in halves) - 3 + 8 * 32


def _text(raw: bytes) -> str:
    return raw.decode(_ENCODING, "surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's binary form, for numbers too large for octal digits
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    digits = field.rstrip(b"\0 ")
    if not digits.isdigit():  # `int` alone would accept signs, underscores and other whitespace
        digits = field.split(b"\0")[0].strip(b" ") or b"0"
    try:
        return int(digits if digits.isdigit() else b"", 8)
    except ValueError:
        raise unsafe("invalid number in a header") from None


def _decimal(raw: bytes) -> int:
    if not raw.isdigit() or len(raw) > 20:
        raise unsafe("invalid number in a header")
    return int(raw)


def _nanoseconds(raw: bytes) -> int:
    """Parse a pax time. An invalid one becomes 0, because it is no reason to refuse an archive."""
    whole, _, fraction = raw.removeprefix(b"-").partition(b".")
    if len(whole) > 20 or not whole.isdigit() or (fraction and not fraction.isdigit()):
        return 0
    seconds = -int(whole) if raw.startswith(b"-") else int(whole)
    return _time(seconds) + int(fraction[:9].ljust(9, b"0"))


def _time(seconds: int) -> int:
    return seconds * 10**9 if _EARLIEST <= seconds <= _LATEST else 0


def _check_global(records: dict[bytes, bytes]) -> None:
    """Refuse a global name or size: it would apply to all later entries and has no legitimate use."""
    if any(key in _RENAMING or key.startswith(b"GNU.sparse") for key in records):
        raise unsafe("a global header sets the name or size of all entries")


def _pax_records(content: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    position = 0
    while position < len(content):
        space = content.find(b" ", position, position + 10)
        length = content[position:space] if space > 0 else b""
        end = position + int(length) if length.isdigit() else 0
        if not space + 2 < end <= len(content) or content[end - 1] != 0x0A:
            raise unsafe("a pax header is malformed")
        key, equals, value = content[space + 1 : end - 1].partition(b"=")
        if not equals or not key:
            raise unsafe("a pax header is malformed")
        if key in (b"path", b"linkpath") and len(value) > MAX_PATH:
            raise not_allowed(f"a path has {len(value)} bytes; at most {MAX_PATH} are allowed")
        records.pop(key, None)
        if value:  # an empty value deletes an earlier one
            records[key] = value
        position = end
    return records
