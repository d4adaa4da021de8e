"""Identical files of different versions and backends share their disk space.

Images of engines usually have one layer, so whole layers are rarely the same while most of their files are. The trees
that are installed are the pool: each has a manifest of its files beside it, and a candidate is compared byte by byte
before it is used, so a file that was changed in place is never taken for what it was. Sharing must not be visible: a
clone (reflink) where the file system has them; else a hard link, where no engine can write to its tree, never two of
one tree, and not for files that people edit where they stand; else nothing is shared. A file that was there before is
only ever read.
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

SMALLEST_BYTES = 512  # each takes a whole block; what is smaller still is often a setting that somebody edits
HELD_BYTES = 1024 * 1024  # files up to this are compared in memory, larger ones as they stream by
MAX_RECORDS = 200_000  # of all trees together: what an index may take of our memory
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_IS_LINUX: bool = sys.platform == "linux"  # a value, so that the type checker reads both branches
_COMPARED = 4  # large files of one size that are read beside the new one; shards of a model may be many
_MOST_LINKS = 1000  # far from the 65,000 of ext4, so that an image can still link to the file itself
_FICLONE = 0x40049409
_EDITED_BYTES = 64 * 1024  # what is larger holds values, not settings
_REWRITTEN = (".cfg", ".sh", ".json", ".pth")  # LocalAI's engines edit such files at every start
_YOUNG_SECONDS = 3600.0  # an install may be at work on the tree of such a manifest


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
    """A file that is there, open for reading, and the path it was opened by."""

    descriptor: int
    path: Path

    def holds(self, content: bytes | memoryview, offset_bytes: int) -> bool:
        return os.pread(self.descriptor, len(content), offset_bytes) == bytes(content)

    def close(self) -> None:
        os.close(self.descriptor)


class Manifests:
    """One file per tree, named after the tree's inode, so that it stays right when the tree is renamed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, tree: Path, records: list[FileRecord]) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = [record for record in records if record.size_bytes >= SMALLEST_BYTES and _is_text(record.path)]
        # Not synced, journalled or moved into place: a lost one costs shared space, a torn one cannot be read, a wrong
        # one is found out by comparing.
        self._path_of(tree).write_bytes(msgspec.msgpack.encode(kept))

    def read(self, tree: Path) -> list[FileRecord]:
        try:
            return msgspec.msgpack.decode(self._path_of(tree).read_bytes(), type=list[FileRecord])
        except (OSError, msgspec.DecodeError):
            return []

    def forget(self, inodes: Iterable[int]) -> None:
        """Trees that were just removed."""
        for number in inodes:
            (self._directory / str(number)).unlink(missing_ok=True)

    def prune(self, trees: list[Path]) -> None:
        """Forget the trees that are gone, but not those that are about to be."""
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
    """Finds a file that is already on disk. Not shared between threads."""

    def __init__(self, *, may_link: bool = False) -> None:
        """`may_link` where no engine can write to a tree."""
        self._may_link = may_link
        self._linked: set[tuple[int, int]] = set()  # inodes that the new tree has by now
        self._small: dict[tuple[int, int, int], Candidate] = {}
        self._large: dict[tuple[int, int], list[Candidate]] = {}
        self._records = 0
        self._can_clone = _IS_LINUX
        self.shared_bytes = 0
        self.how: How = "copy"  # what became of the last file that could be shared

    def begin(self) -> None:
        """Another new tree, or the same from the beginning."""
        self._linked.clear()

    def add(self, tree: Path, records: list[FileRecord], inode: int = 0) -> None:
        """The nearest relatives first: of two candidates for one file the earlier one is kept.

        With `inode`, only that very tree counts: one that takes its place may not be on disk yet.
        """
        for record in records[: max(0, MAX_RECORDS - self._records)]:
            candidate = Candidate(tree, record.path, record.mtime_ns, inode)
            if record.size_bytes > HELD_BYTES:
                self._large.setdefault((record.size_bytes, record.mode), []).append(candidate)
            else:
                self._small.setdefault((record.size_bytes, record.mode, record.checksum), candidate)
        self._records += len(records)

    def small(self, entry: TarEntry, content: bytes | memoryview, checksum_of_it: int) -> Opened | None:
        """An open file with exactly this content, or None."""
        if not self._small or not self._is_fit(entry):
            return None
        candidate = self._small.get((len(content), entry.mode, checksum_of_it))
        opened = _open(candidate, entry) if candidate is not None else None
        if opened is None or opened.holds(content, 0):
            return opened
        opened.close()
        return None

    def large(self, entry: TarEntry) -> list[Opened]:
        """Open files that may turn out to be equal."""
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
        """Put a file that was found equal at `name`, where nothing is; False where the file system cannot."""
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
        """Not twice: two files of one tree that are equal are two files."""
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
                self._can_clone = False  # not here: making and removing a file for each would be a waste
            return False
        finally:
            os.close(made)

    def _is_fit(self, entry: TarEntry) -> bool:
        return entry.size_bytes >= SMALLEST_BYTES and (self._can_clone or (self._may_link and _is_linkable(entry)))


def checksum(content: bytes | memoryview, before: int = 0) -> int:
    return isal_zlib.crc32(content, before)


def settle(made: int, entry: TarEntry) -> None:
    """Mode and time of a file that was just made."""
    os.fchmod(made, entry.mode)
    os.utime(made, ns=(entry.mtime_ns, entry.mtime_ns))


def _is_linkable(entry: TarEntry) -> bool:
    """Two names of one file change together, so nothing that is likely to be edited in place."""
    return entry.size_bytes > _EDITED_BYTES or not entry.path.endswith(_REWRITTEN)


def _is_script(source: Opened) -> bool:
    """Scripts are rewritten where they stand too, to name another interpreter."""
    return os.pread(source.descriptor, 2, 0) == b"#!"


def _link(source: Opened, status: os.stat_result, name: str, directory: int) -> bool:
    if not 0 < status.st_nlink < _MOST_LINKS:
        return False
    try:
        if _IS_LINUX:
            # By the descriptor: exactly the file that was compared, whatever its name means by now.
            os.link(f"/proc/self/fd/{source.descriptor}", name, dst_dir_fd=directory, follow_symlinks=True)
            return True
        os.link(source.path, name, dst_dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False  # another file system, one without links, a file that is not ours, no /proc: it is written
    made = os.stat(name, dir_fd=directory, follow_symlinks=False)
    if (made.st_dev, made.st_ino) == (status.st_dev, status.st_ino):
        return True
    os.unlink(name, dir_fd=directory)
    return False


def _ficlone(made: int, source: int) -> None:
    import fcntl  # not on every system

    fcntl.ioctl(made, _FICLONE, source)


def _open(candidate: Candidate, entry: TarEntry) -> Opened | None:
    # Compiled Python beside a source records its time; under another one it would be compiled at every start.
    if entry.path.endswith(".py") and candidate.mtime_ns != entry.mtime_ns:
        return None
    path = candidate.tree / candidate.path
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if (
        _is_still(candidate)  # asked after the file was opened, so that it is an answer about that file
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
    """Names need not be text; those that are not cannot be written down, and share nothing."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True
