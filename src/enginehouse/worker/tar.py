"""Tar archives as a stream: headers and contents in one pass, over buffers that are never joined into a file.

Understands ustar, GNU and pax. Names are only decoded here; whether they are safe is `core.archive`'s. The standard
library's reader is not used: it takes twice as long on small files and seeks where a stream cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from enginehouse.core.archive import (
    MAX_PATH,
    Kind,
    TarEntry,
    check_mode,
    check_path,
    too_large,
    unsafe,
)

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_HEADER_BYTES = 1024 * 1024  # of one pax or long-name record; the longest path is 4 KiB
_KINDS: dict[bytes, Kind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"5": "directory",
}
_WORDS = {b"3": "a device", b"4": "a device", b"6": "a FIFO"}
_MAX_SIZE = 2**62

Buffers = Callable[[], bytes | memoryview]  # the next buffer, empty at the end


class TarStream:
    """`entries()` gives one entry after the other; the contents of a file must be taken, or are skipped, before the
    next."""

    def __init__(self, next_buffer: Buffers) -> None:
        self._next_buffer = next_buffer
        self._buffer = memoryview(b"")
        self._position = 0
        self._left = 0  # of the current file's contents
        self._padding = 0

    def entries(self) -> Iterator[TarEntry]:
        pax: dict[str, str] = {}
        while True:
            self._skip_rest()
            block = self._take(BLOCK, may_end=True)
            if block is None or block == _ZEROS:
                return
            header = _Header(block)
            match header.type:
                case b"x":
                    pax |= _pax_records(self._long(header.size_bytes))
                case b"g":
                    self._long(header.size_bytes)  # comments; nothing in it may rename or resize entries
                case b"L":
                    pax["path"] = _text(self._long(header.size_bytes).split(b"\0")[0])
                case b"K":
                    pax["linkpath"] = _text(self._long(header.size_bytes).split(b"\0")[0])
                case _:
                    entry = header.entry(pax)
                    pax = {}
                    self._left = entry.size_bytes
                    self._padding = -entry.size_bytes % BLOCK
                    yield entry

    def contents(self) -> Iterator[memoryview]:
        """The current file's bytes, in pieces that are valid until the next one is asked for."""
        while self._left:
            yield self._piece()

    def whole(self) -> memoryview | bytes:
        """The current file's bytes at once: for files that are small enough to be held."""
        taken = self._take(self._left)
        assert taken is not None
        self._left = 0
        return taken

    def drain(self) -> None:
        """Read to the end of the archive: what follows the end mark counts for the digest too."""
        while len(self._next_buffer()):
            pass

    def _piece(self) -> memoryview:
        if self._position == len(self._buffer) and not self._fill():
            raise unsafe("it ends in the middle of a file")
        start = self._position
        self._position = min(len(self._buffer), start + self._left)
        self._left -= self._position - start
        return self._buffer[start : self._position]

    def _skip_rest(self) -> None:
        self._left += self._padding
        self._padding = 0
        while self._left:
            self._piece()

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

    def _long(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise unsafe(f"a header has {size} bytes")
        taken = self._take(size + -size % BLOCK)
        assert taken is not None
        return bytes(taken[:size])


class _Header:
    def __init__(self, view: memoryview | bytes) -> None:
        block = bytes(view)
        total = sum(block[:148]) + sum(block[156:]) + 8 * 32
        if _number(block[148:156]) != total:
            raise unsafe("a header's checksum is wrong")
        self._block = block
        self.type = block[156:157]
        self.size_bytes = _number(block[124:136])

    def entry(self, pax: dict[str, str]) -> TarEntry:
        block = self._block
        raw = pax.get("path") or self._name()
        path = check_path(raw)
        if self.type == b"S" or any(key.startswith("GNU.sparse") for key in pax):
            raise too_large(f"{path[:80]!r} is a sparse file, which may stand for any size")
        kind = _KINDS.get(self.type)
        if kind is None:
            raise unsafe(f"{path[:80]!r} is {_WORDS.get(self.type, 'of an unknown type')}")
        if kind == "file" and raw.endswith("/"):
            kind = "directory"  # how archives older than ustar say it
        size = _decimal(pax["size"]) if "size" in pax else self.size_bytes
        if not 0 <= size < _MAX_SIZE:
            raise unsafe(f"{path[:80]!r} claims {size} bytes")
        target = pax.get("linkpath") or _text(block[157:257].split(b"\0")[0])
        return TarEntry(
            path=path,
            kind=kind,
            size_bytes=size if kind == "file" else 0,
            mode=check_mode(path, kind, _number(block[100:108])),
            mtime_ns=_seconds(pax["mtime"]) if "mtime" in pax else _number(block[136:148]) * 10**9,
            target=target,
        )

    def _name(self) -> str:
        block = self._block
        name = _text(block[:100].split(b"\0")[0])
        # Only POSIX has a prefix there; GNU's own format uses the field for times.
        if block[257:263] == b"ustar\0" and block[345]:
            return _text(block[345:500].split(b"\0")[0]) + "/" + name
        return name


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's form for what octal digits cannot hold
        value = int.from_bytes(field, "big", signed=False) & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 2)) * 2 if field[0] & 0x40 else value
    digits = field.split(b"\0")[0].strip()
    if not digits:
        return 0
    try:
        return int(digits, 8)
    except ValueError:
        raise unsafe("a header has a number that is none") from None


def _decimal(text: str) -> int:
    if not text.isdecimal() or len(text) > 20:
        raise unsafe("a header has a number that is none")
    return int(text)


def _seconds(text: str) -> int:
    try:
        return int(float(text) * 10**9) if len(text) < 40 else 0
    except (ValueError, OverflowError):
        return 0


def _pax_records(content: bytes) -> dict[str, str]:
    records: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        if not length.isdigit() or len(length) > 9 or not len(length) + 2 < int(length) <= len(content):
            raise unsafe("a pax header is malformed")
        record, content = content[len(length) + 1 : int(length)], content[int(length) :]
        key, equals, value = record.partition(b"=")
        if not record.endswith(b"\n") or not equals:
            raise unsafe("a pax header is malformed")
        if key in (b"path", b"linkpath") and len(value) > MAX_PATH + 1:
            raise unsafe(f"a path has {len(value)} bytes, at most {MAX_PATH} are allowed")
        records[_text(key)] = _text(value[:-1])
    return records
