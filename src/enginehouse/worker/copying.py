"""A directory on this disk as an archive: its entries in a fixed order, its contents hashed as they are read.

So a local directory goes through the same checks as an image, shares its files like one, and has a digest that changes
when anything in it does.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from enginehouse.core.archive import Kind, TarEntry, check_mode, check_path, too_large, unsafe
from enginehouse.core.errors import Hopeless

_PIECE_BYTES = 1024 * 1024


class DirectoryEntries:
    """One pass over a tree; links are taken as links, and whatever is neither file, directory nor link is refused."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        if not root.is_dir():
            raise Hopeless(f"cannot install from {root}: it is not a directory", code="not_found")
        self._root = root
        self._limit_bytes = limit_bytes
        self._sha256 = hashlib.sha256()
        self._file = -1
        self._left = 0
        self._total = 0

    def digest(self) -> str:
        return "sha256:" + self._sha256.hexdigest()

    def entries(self) -> Iterator[TarEntry]:
        yield from self._walk("")

    def contents(self) -> Iterator[memoryview]:
        while self._left:
            yield memoryview(self._take(min(_PIECE_BYTES, self._left)))

    def whole(self) -> bytes:
        return self._take(self._left)

    def drain(self) -> None:
        """Nothing follows."""

    def _walk(self, below: str) -> Iterator[TarEntry]:
        with os.scandir(self._root / below) as found:
            names = sorted(entry.name for entry in found)
        for name in names:
            path = check_path(f"{below}/{name}" if below else name)
            entry = self._entry(path)
            self._sha256.update(
                f"{entry.kind}\0{path}\0{entry.mode:o}\0{entry.size_bytes}\0{entry.target}\0".encode(
                    "utf-8", "surrogateescape"
                )
            )
            yield entry
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
            if entry.kind == "directory":
                yield from self._walk(path)

    def _entry(self, path: str) -> TarEntry:
        place = self._root / path
        status = place.lstat()
        kind: Kind
        match stat.S_IFMT(status.st_mode):
            case stat.S_IFREG:
                kind = "file"
                self._file = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._left = status.st_size
                self._total += status.st_size
                if self._total > self._limit_bytes:
                    raise too_large(f"it holds more than {self._limit_bytes / 2**30:.1f} GiB")
            case stat.S_IFDIR:
                kind = "directory"
            case stat.S_IFLNK:
                kind = "symlink"
            case _:
                raise unsafe(f"{path[:80]!r} is a device, a socket or a FIFO")
        return TarEntry(
            path=path,
            kind=kind,
            size_bytes=self._left if kind == "file" else 0,
            mode=check_mode(path, kind, stat.S_IMODE(status.st_mode)),
            mtime_ns=status.st_mtime_ns,
            target=os.readlink(place) if kind == "symlink" else "",
        )

    def _take(self, size: int) -> bytes:
        content = os.read(self._file, size) if size else b""
        while len(content) < size:
            more = os.read(self._file, size - len(content))
            if not more:
                raise unsafe("a file became shorter while it was read")
            content += more
        self._left -= size
        self._sha256.update(content)
        return content
