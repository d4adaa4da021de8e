"""Sharing of disk space between identical files of different versions and backends.

Images of engines usually have one layer, so layers rarely match while most files do. The candidates are the files of
installed trees, listed in a manifest per tree. A candidate is compared byte by byte before use, so a file that was
changed in place is never mistaken for its former content. Sharing must not be visible. A clone (reflink) is used if
the file system supports it. Otherwise a hard link is used, if no engine can write to its tree, at most once per inode
and tree, and never for files that are likely to be edited in place. Otherwise the file is copied. Existing files are
only read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
from isal import isal_zlib
from msgspec import Struct

from enginehouse.core.archive import TarEntry

SMALLEST_BYTES = 512  # every file takes a whole block, and smaller files are often settings that get edited
HELD_BYTES = 1024 * 1024  # files up to this size are compared in memory, larger ones while they stream
MAX_RECORDS = 200_000  # of all trees together; limits the memory of the index
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_LINUX: bool = sys.platform == "linux"  # a value, so that the type checker reads both branches
_COMPARED = 4  # candidates read in parallel for a large file; a model may have many shards of one size
_MOST_LINKS = 1000  # far below the 65,000 of ext4, so that an image can still link to the file
_FICLONE = 0x40049409
_EDITED_BYTES = 64 * 1024  # larger files contain data, not settings
_REWRITTEN = (".cfg", ".sh", ".json", ".pth")  # LocalAI's engines edit such files at each start
_YOUNG_SECONDS = 3600.0  # younger manifests may belong to an installation in progress


How = Literal["reflink", "hard link", "copy"]


class FileRecord(Struct, frozen=True, array_like=True):
    path: str
    size_bytes: int
    mode: int
    checksum: int
    mtime_ns: int


class Candidate(Struct, frozen=True):
    tree: Path
    path: str
    mtime_ns: int
    inode: int = 0


class Opened(Struct, frozen=True):
    """An existing file, open for reading, and its path."""

    descriptor: int
    path: Path

    def holds(self, content: bytes | memoryview, offset_bytes: int) -> bool:
        return os.pread(self.descriptor, len(content), offset_bytes) == bytes(content)

    def close(self) -> None:
        os.close(self.descriptor)


class Manifests:
    """The manifests: one file per tree, named by the tree's inode, so that it stays valid when the tree is renamed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, tree: Path, records: list[FileRecord]) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = [record for record in records if record.size_bytes >= SMALLEST_BYTES and _is_text(record.path)]
        # Written without sync or rename: a lost manifest costs shared space only, a torn one cannot be decoded, and a
        # wrong one is detected by the comparison.
        self._path_of(tree).write_bytes(msgspec.msgpack.encode(kept))

    def read(self, tree: Path) -> list[FileRecord]:
        try:
            return msgspec.msgpack.decode(self._path_of(tree).read_bytes(), type=list[FileRecord])
        except (OSError, msgspec.DecodeError):
            return []

    def forget(self, inodes: Iterable[int]) -> None:
        """Remove the manifests of removed trees."""
        for number in inodes:
            (self._directory / str(number)).unlink(missing_ok=True)

    def prune(self, trees: list[Path]) -> None:
        """Remove the manifests of missing trees, except young ones, whose tree may not be in place yet."""
        if not self._directory.is_dir():
            return
        known = {str(tree.stat().st_ino) for tree in trees if tree.is_dir()}
        with contextlib.suppress(FileNotFoundError):
            for path in self._directory.iterdir():
                if path.name not in known and path.stat().st_mtime < time.time() - _YOUNG_SECONDS:
                    path.unlink(missing_ok=True)

    def _path_of(self, tree: Path) -> Path:
        return self._directory / str(tree.stat().st_ino)


class Sharing:
    """Finds and places identical files. Not thread-safe."""

    def __init__(self, *, may_link: bool = False) -> None:
        """`may_link` allows hard links; True only if no engine can write to a tree."""
        self._may_link = may_link
        self._linked: set[tuple[int, int]] = set()  # inodes linked into the new tree so far
        self._small: dict[tuple[int, int, int], Candidate] = {}
        self._large: dict[tuple[int, int], list[Candidate]] = {}
        self._records = 0
        self._can_clone = _IS_LINUX
        self.shared_bytes = 0
        self.how: How = "copy"  # the method used for the last shared file

    def begin(self) -> None:
        """Start a new tree, or the same one again."""
        self._linked.clear()

    def add(self, tree: Path, records: list[FileRecord], inode: int = 0) -> None:
        """Add the files of a tree as candidates. Call with the closest trees first: the first candidate wins.

        With `inode`, only the tree with that inode is used: a tree that replaced it may not be synced to disk yet.
        """
        for record in records[: max(0, MAX_RECORDS - self._records)]:
            candidate = Candidate(tree, record.path, record.mtime_ns, inode)
            if record.size_bytes > HELD_BYTES:
                self._large.setdefault((record.size_bytes, record.mode), []).append(candidate)
            else:
                self._small.setdefault((record.size_bytes, record.mode, record.checksum), candidate)
        self._records += len(records)

    def small(self, entry: TarEntry, content: bytes | memoryview, checksum_of_it: int) -> Opened | None:
        """Return an open file with exactly this content, or None."""
        if not self._small or not self._is_fit(entry):
            return None
        candidate = self._small.get((len(content), entry.mode, checksum_of_it))
        opened = _open(candidate, entry) if candidate is not None else None
        if opened is None or opened.holds(content, 0):
            return opened
        opened.close()
        return None

    def large(self, entry: TarEntry) -> list[Opened]:
        """Return open files of the same size and mode; the caller compares their content."""
        if not self._large or not self._is_fit(entry):
            return []
        found: list[Opened] = []
        for candidate in self._large.get((entry.size_bytes, entry.mode), ()):
            opened = _open(candidate, entry)
            if opened is not None:
                found.append(opened)
            if len(found) == _COMPARED:
                break
        return found

    def place(self, source: Opened, entry: TarEntry, name: str, directory: int) -> bool:
        """Place an equal file at `name`, which must not exist. False if it cannot be shared."""
        if self._can_clone and self._clone(source, entry, name, directory):
            self.shared_bytes += entry.size_bytes
            self.how = "reflink"
            return True
        if self._may_link and _is_linkable(entry) and not _is_script(source) and self._link(source, name, directory):
            self.shared_bytes += entry.size_bytes
            self.how = "hard link"
            return True
        return False

    def _link(self, source: Opened, name: str, directory: int) -> bool:
        """Link at most once per inode: two equal files of one tree must stay independent."""
        status = os.fstat(source.descriptor)
        inode = (status.st_dev, status.st_ino)
        if inode in self._linked or not _link(source, status, name, directory):
            return False
        self._linked.add(inode)
        return True

    def _clone(self, source: Opened, entry: TarEntry, name: str, directory: int) -> bool:
        made = os.open(name, NEW_FILE, 0o600, dir_fd=directory)
        try:
            _ficlone(made, source.descriptor)
            settle(made, entry)
            return True
        except OSError as error:
            os.unlink(name, dir_fd=directory)
            if error.errno not in (errno.EXDEV, errno.ENOSPC, errno.EDQUOT):
                self._can_clone = False  # unsupported here; do not try again for each file
            return False
        finally:
            os.close(made)

    def _is_fit(self, entry: TarEntry) -> bool:
        return entry.size_bytes >= SMALLEST_BYTES and (self._can_clone or (self._may_link and _is_linkable(entry)))


def checksum(content: bytes | memoryview, before: int = 0) -> int:
    return isal_zlib.crc32(content, before)


def settle(made: int, entry: TarEntry) -> None:
    """Set mode and time of a new file."""
    os.fchmod(made, entry.mode)
    os.utime(made, ns=(entry.mtime_ns, entry.mtime_ns))


def _is_linkable(entry: TarEntry) -> bool:
    """Whether the file is unlikely to be edited in place. An edit would change all hard links of it."""
    return entry.size_bytes > _EDITED_BYTES or not entry.path.endswith(_REWRITTEN)


def _is_script(source: Opened) -> bool:
    """Whether the file is a script. Scripts are edited in place too, to change their interpreter."""
    return os.pread(source.descriptor, 2, 0) == b"#!"


def _link(source: Opened, status: os.stat_result, name: str, directory: int) -> bool:
    if not 0 < status.st_nlink < _MOST_LINKS:
        return False
    try:
        if _IS_LINUX:
            # Linked by descriptor, so that it is the compared file even if its path was replaced.
            os.link(f"/proc/self/fd/{source.descriptor}", name, dst_dir_fd=directory, follow_symlinks=True)
            return True
        os.link(source.path, name, dst_dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False  # other file system, no link support, foreign owner, no /proc: the caller copies
    made = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (made.st_dev, made.st_ino) == (status.st_dev, status.st_ino):
        return True
    os.unlink(name, dir_fd=directory)
    return False


def _ficlone(made: int, source: int) -> None:
    import fcntl  # not available on every system

    fcntl.ioctl(made, _FICLONE, source)


def _open(candidate: Candidate, entry: TarEntry) -> Opened | None:
    # Compiled Python records the time of its source. With another time it would be compiled at each start.
    if entry.path.endswith(".py") and candidate.mtime_ns != entry.mtime_ns:
        return None
    path = candidate.tree / candidate.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if (
        _is_still(candidate)  # checked after opening, so that the result is about the opened file
        and stat.S_ISREG(status.st_mode)
        and status.st_size == entry.size_bytes
        and stat.S_IMODE(status.st_mode) == entry.mode
    ):
        return Opened(descriptor, path)
    os.close(descriptor)
    return None


def _is_still(candidate: Candidate) -> bool:
    try:
        return candidate.inode in (0, candidate.tree.stat(follow_symlinks=False).st_ino)
    except OSError:
        return False


def _is_text(path: str) -> bool:
    """Whether the path is valid text. Other paths cannot be stored in a manifest and are not shared."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
