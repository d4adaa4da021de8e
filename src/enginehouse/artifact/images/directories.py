"""A local directory read as an archive: entries in a fixed order, contents hashed while they are read.

A local directory thus passes the same checks as an image, shares its files in the same way, and has a digest of its
whole content. It is walked by directory handles without following links, because it may change during the walk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from enginehouse.artifact.images.contents import CountedContents
from enginehouse.artifact.images.handles import DIRECTORY
from enginehouse.core.archive import EntryKind, TarEntry, check_path, kept_mode, not_allowed, too_large, unsafe
from enginehouse.core.errors import Hopeless
from enginehouse.core.name import shown

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS: dict[int, EntryKind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


class DirectoryEntries(CountedContents):
    """One pass over a tree. Links are kept as links; anything but files, directories and links is refused."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        if not root.is_dir():
            raise Hopeless(f"cannot install from {root}: it is not a directory; check the path", code="not_found")
        self._root = root
        self._limit_bytes = limit_bytes
        self._sha256 = hashlib.sha256()
        self._file = -1
        self._total = 0
        self._linked: dict[tuple[int, int], str] = {}

    def digest(self) -> str:
        return "sha256:" + self._sha256.hexdigest()

    def entries(self) -> Iterator[TarEntry]:
        # The path of the root may contain links; entries below it are opened without following any.
        handle = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield from self._walk("", handle)
        finally:
            os.close(handle)

    def drain(self) -> None:
        """Does nothing: a directory has no trailing data."""

    def _walk(self, below: str, directory: int) -> Iterator[TarEntry]:
        for name in sorted(os.listdir(directory)):
            path = check_path(f"{below}/{name}" if below else name)
            try:
                entry = self._entry(path, directory, name)
                yield self._hashed(entry)
                for _ in self.contents():
                    pass  # content that the caller skipped is part of the digest as well
            finally:
                self._close()
            if entry.kind == "directory":
                inner = _open(name, DIRECTORY, directory, path)
                try:
                    yield from self._walk(path, inner)
                finally:
                    os.close(inner)

    def _entry(self, path: str, directory: int, name: str) -> TarEntry:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind is None:
            raise not_allowed(f"{shown(path)} is a device, a socket or a FIFO")
        target = ""
        if kind == "symlink":
            target = os.readlink(name, dir_fd=directory)
            if target.startswith("/"):
                # In an image it would be relative to the root of the tree. Here it points to a path of this machine, on
                # which a copy must not depend.
                raise not_allowed(f"the link {shown(path)} leads to the absolute path {shown(target)}")
        elif kind == "file" and status.st_nlink > 1:
            target = self._linked.setdefault((status.st_dev, status.st_ino), path)
            kind, target = ("hardlink", target) if target != path else ("file", "")
        if kind == "file":
            self._file = _open(name, _FILE, directory, path)
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise unsafe(f"{shown(path)} changed its type while it was read")
            self._left = status.st_size
            self._total += status.st_size
            if self._total > self._limit_bytes:
                raise too_large(f"it contains more than {self._limit_bytes / 2**30:.1f} GiB")
        return TarEntry(
            path=path,
            kind=kind,
            size_bytes=self._left if kind == "file" else 0,
            mode=kept_mode(stat.S_IMODE(status.st_mode)),
            mtime_ns=status.st_mtime_ns,
            target=target,
        )

    def _hashed(self, entry: TarEntry) -> TarEntry:
        described = (entry.kind, entry.path, f"{entry.mode:o}", str(entry.size_bytes), entry.target)
        self._sha256.update(b"".join(text.encode("utf-8", "surrogateescape") + b"\0" for text in described))
        return entry

    def _take(self, size: int) -> bytes:
        content = os.read(self._file, size) if size else b""
        while len(content) < size:
            more = os.read(self._file, size - len(content))
            if not more:
                raise unsafe("a file was truncated while it was read")
            content += more
        self._left -= size
        self._sha256.update(content)
        return content

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file, self._left = -1, 0


def digest_of(root: Path, limit_bytes: int) -> str:
    """Return the digest that a copy of `root` gets. Reads everything. Blocks."""
    found = DirectoryEntries(root, limit_bytes)
    for _ in found.entries():
        pass
    return found.digest()


def _open(name: str, flags: int, directory: int, path: str) -> int:
    try:
        return os.open(name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise unsafe(f"{shown(path)} changed its type while it was read") from None
        raise
