"""Identical files of different versions and backends share their disk space.

Images of engines usually have one layer, so whole layers are rarely the same while most of their files are. The trees
that are installed are the pool: each has a manifest of its files beside it, and a candidate is compared byte by byte
before it is used, so a file that was changed in place is never taken for what it was. A clone (reflink) where the file
system has them; else a hard link, but not for files that engines are known to rewrite where they stand.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from isal import isal_zlib
from msgspec import Struct

SMALLEST_BYTES = 4096  # below a block nothing is saved
HELD_BYTES = 1024 * 1024  # files up to this are compared in memory, larger ones as they stream by
MAX_RECORDS = 200_000  # of all trees together: what an index may take of our memory
_SCRIPT_BYTES = 64 * 1024
_FICLONE = 0x40049409
_REWRITTEN = (".cfg", ".sh", ".json", ".pth")  # LocalAI's engines edit such files at every start


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


class Manifests:
    """One file per tree, named after the tree's inode, so that it stays right when the tree is renamed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, tree: Path, records: list[FileRecord]) -> None:
        self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        kept = [record for record in records if record.size_bytes >= SMALLEST_BYTES]
        path = self._directory / str(tree.stat().st_ino)
        # Not synced and not journalled: a lost one costs shared space, a wrong one is found out by comparing.
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.msgpack.encode(kept))
        temporary.replace(path)

    def read(self, tree: Path) -> list[FileRecord]:
        try:
            return msgspec.msgpack.decode(
                (self._directory / str(tree.stat().st_ino)).read_bytes(), type=list[FileRecord]
            )
        except (OSError, msgspec.DecodeError):
            return []

    def prune(self, trees: list[Path]) -> None:
        """Forget the trees that are gone."""
        if not self._directory.is_dir():
            return
        known = {str(tree.stat().st_ino) for tree in trees if tree.is_dir()}
        for path in self._directory.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)


class Sharing:
    """Finds a file that is already on disk. Not shared between threads."""

    def __init__(self) -> None:
        self._small: dict[tuple[int, int, int], Candidate] = {}
        self._large: dict[tuple[int, int], list[Candidate]] = {}
        self._records = 0
        self._can_clone = True
        self._can_link = True
        self.shared_bytes = 0

    def add(self, tree: Path, records: list[FileRecord]) -> None:
        """The nearest relatives first: of two candidates for one file the earlier one is kept."""
        for record in records[: MAX_RECORDS - self._records]:
            candidate = Candidate(tree, record.path, record.mtime_ns)
            if record.size_bytes > HELD_BYTES:
                self._large.setdefault((record.size_bytes, record.mode), []).append(candidate)
            else:
                self._small.setdefault((record.size_bytes, record.mode, record.checksum), candidate)
        self._records += len(records)

    def small(self, content: bytes | memoryview, path: str, mode: int, mtime_ns: int) -> int | None:
        """An open file with exactly this content, or None."""
        if not self._small or not self._is_fit(path, len(content), mode):
            return None
        candidate = self._small.get((len(content), mode, isal_zlib.crc32(content)))
        if candidate is None or not _same_time(path, candidate, mtime_ns):
            return None
        opened = _open(candidate, len(content), mode)
        if opened is None:
            return None
        if os.read(opened, len(content) + 1) == bytes(content):
            return opened
        os.close(opened)
        return None

    def large(self, path: str, size_bytes: int, mode: int, mtime_ns: int) -> Iterator[int]:
        """Open files that may turn out to be equal."""
        if self._is_fit(path, size_bytes, mode):
            for candidate in self._large.get((size_bytes, mode), ()):
                if _same_time(path, candidate, mtime_ns):
                    opened = _open(candidate, size_bytes, mode)
                    if opened is not None:
                        yield opened

    def place(self, source: int, name: str, directory: int) -> int | None:
        """Put the open file `source` at `name`: 0 for a hard link, the new file's descriptor for a clone, None where
        the file system does neither."""
        size = os.fstat(source).st_size
        if self._can_clone:
            made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
            try:
                fcntl.ioctl(made, _FICLONE, source)
                self.shared_bytes += size
                return made
            except OSError:
                self._can_clone = False
                os.close(made)
                os.unlink(name, dir_fd=directory)
        if self._can_link and self._is_linkable(name, size, os.fstat(source).st_mode):
            try:
                # By the descriptor: exactly the file that was compared, whatever its name means by now.
                os.link(f"/proc/self/fd/{source}", name, dst_dir_fd=directory, follow_symlinks=True)
                self.shared_bytes += size
                return 0
            except OSError as error:
                if error.errno != errno.EMLINK:
                    self._can_link = False
        return None

    def _is_fit(self, path: str, size_bytes: int, mode: int) -> bool:
        if size_bytes < SMALLEST_BYTES or not (self._can_clone or self._can_link):
            return False
        return self._can_clone or self._is_linkable(path, size_bytes, mode)

    def _is_linkable(self, path: str, size_bytes: int, mode: int) -> bool:
        """Two names of one file change together, so nothing that is likely to be edited in place."""
        return not path.endswith(_REWRITTEN) and not (mode & 0o111 and size_bytes < _SCRIPT_BYTES)


def checksum(content: bytes | memoryview, before: int = 0) -> int:
    return isal_zlib.crc32(content, before)


def _same_time(path: str, candidate: Candidate, mtime_ns: int) -> bool:
    # Compiled Python beside a source records its time; under another one it would be compiled at every start.
    return not path.endswith(".py") or candidate.mtime_ns == mtime_ns


def _open(candidate: Candidate, size_bytes: int, mode: int) -> int | None:
    try:
        opened = os.open(candidate.tree / candidate.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(opened)
    if status.st_size == size_bytes and status.st_mode & 0o7777 == mode and status.st_mode & 0o170000 == 0o100000:
        return opened
    os.close(opened)
    return None
