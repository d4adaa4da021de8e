"""Applies the layers of an image to an empty directory, as the image specification says and a reference tool would do.

Every path is walked from a handle of the root, component by component, and no link is ever followed; nothing outside
the root can be reached whatever the archive or an earlier layer says. Existing files are never opened for writing:
they are replaced, because a file may be shared with another version. Directory times and modes come last, so that
read-only directories can be filled. Everything blocks; callers are in a thread.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from enginehouse.core.archive import (
    ArchiveLimits,
    Kind,
    TarEntry,
    check_path,
    check_symlink,
    too_large,
    unsafe,
    whiteout_target,
)
from enginehouse.core.errors import Unavailable
from enginehouse.worker.sharing import HELD_BYTES, FileRecord, Sharing, checksum

SPARE_BYTES = 64 * 1024 * 1024  # a disk filled to the last byte stops the machine, not only us
_LOOK_EVERY_BYTES = 64 * 1024 * 1024
_OPEN_DIRECTORIES = 128
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class Entries(Protocol):
    """An archive in one pass: the contents of a file are taken before the next entry is asked for."""

    def entries(self) -> Iterator[TarEntry]: ...

    def contents(self) -> Iterator[memoryview]: ...

    def whole(self) -> memoryview | bytes: ...

    def drain(self) -> None: ...


class Unpacker:
    """Owns one tree while it is made. `apply` once per layer, then `finish`."""

    def __init__(self, root: Path, sharing: Sharing, limits: ArchiveLimits) -> None:
        self._root = root
        self._sharing = sharing
        self._limits = limits
        self._handles: OrderedDict[str, int] = OrderedDict()
        self._handles[""] = os.open(root, _DIRECTORY)
        self._directories: dict[str, tuple[int, int]] = {}
        self._in_layer: dict[str, Kind] = {}
        self._is_first = True
        self._entries = 0
        self._unlooked_bytes = 0
        self.records: dict[str, FileRecord] = {}
        self.written_bytes = 0

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def apply(self, tar: Entries, is_cancelled: Callable[[], bool]) -> None:
        """One layer, in the order of its entries."""
        self._in_layer = {}
        for entry in tar.entries():
            self._entries += 1
            if self._entries > self._limits.entries:
                raise too_large(f"it has more than {self._limits.entries} entries")
            if is_cancelled():
                raise Unavailable("cannot go on unpacking: it was cancelled", code="cancelled")
            self._place(entry, tar)
        tar.drain()
        self._is_first = False

    def finish(self) -> None:
        """Times and modes of directories, the deepest first: a parent's time changes when its children are made."""
        for path in sorted(self._directories, key=lambda one: one.count("/"), reverse=True):
            mode, mtime_ns = self._directories[path]
            try:
                handle = self._directory(path, make=False)
            except FileNotFoundError:
                continue  # a later layer removed it
            os.utime(handle, ns=(mtime_ns, mtime_ns))
            os.fchmod(handle, mode)

    def _place(self, entry: TarEntry, tar: Entries) -> None:
        parent, _, name = entry.path.rpartition("/")
        if not name:
            if entry.kind != "directory":
                raise unsafe("it replaces the root of the tree")
            return
        hidden = whiteout_target(name)
        if hidden is not None:
            self._white_out(parent, hidden)
            return
        directory = self._directory(parent)
        self._clear_the_way(entry, directory, name)
        match entry.kind:
            case "directory":
                self._make_directory(entry, directory, name)
            case "symlink":
                target = check_symlink(entry.path, entry.target, absolute_links=self._limits.absolute_links)
                os.symlink(target, name, dir_fd=directory)
                os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)
            case "hardlink":
                self._link(entry, directory, name)
            case "file":
                self._write(entry, tar, directory, name)
        self._note(entry.path, entry.kind)

    def _note(self, path: str, kind: Kind) -> None:
        self._in_layer[path] = kind
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in self._in_layer:
                return
            self._in_layer[path] = "directory"

    def _clear_the_way(self, entry: TarEntry, directory: int, name: str) -> None:
        before = self._in_layer.get(entry.path)
        if before is not None and before != entry.kind:
            raise unsafe(f"{entry.path[:80]!r} is in it twice, as {before} and as {entry.kind}")
        if self._is_first and before is None:
            return  # the tree was empty: nothing can be in the way
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not (stat.S_ISDIR(status.st_mode) and entry.kind == "directory"):
            self._remove(entry.path, directory, name, status)

    def _make_directory(self, entry: TarEntry, directory: int, name: str) -> None:
        # If something is there, `_clear_the_way` has seen to it that it is a directory.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        self._directories[entry.path] = (entry.mode, entry.mtime_ns)

    def _link(self, entry: TarEntry, directory: int, name: str) -> None:
        target = check_path(entry.target)
        parent, _, inner = target.rpartition("/")
        try:
            from_directory = self._directory(parent, make=False)
            status = os.stat(inner or ".", dir_fd=from_directory, follow_symlinks=False)
        except FileNotFoundError:
            raise unsafe(f"{entry.path[:80]!r} is a hard link to {target[:80]!r}, which is not there") from None
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise unsafe(f"{entry.path[:80]!r} is a hard link to something that is no file")
        os.link(inner, name, src_dir_fd=from_directory, dst_dir_fd=directory, follow_symlinks=False)

    def _write(self, entry: TarEntry, tar: Entries, directory: int, name: str) -> None:
        self._look_at_the_disk(entry.size_bytes)
        if entry.size_bytes > HELD_BYTES:
            sum_of_it = self._write_large(entry, tar, directory, name)
        else:
            content = tar.whole()
            sum_of_it = checksum(content)
            source = self._sharing.small(content, entry.path, entry.mode, entry.mtime_ns)
            if not self._share(source, entry, directory, name):
                made = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
                try:
                    _write_all(made, content)
                    _settle(made, entry)
                finally:
                    os.close(made)
                self.written_bytes += entry.size_bytes
        self.records[entry.path] = FileRecord(entry.path, entry.size_bytes, entry.mode, sum_of_it, entry.mtime_ns)

    def _share(self, source: int | None, entry: TarEntry, directory: int, name: str) -> bool:
        if source is None:
            return False
        try:
            made = self._sharing.place(source, name, directory)
        finally:
            os.close(source)
        if made:
            _settle(made, entry)
            os.close(made)
        return made is not None

    def _write_large(self, entry: TarEntry, tar: Entries, directory: int, name: str) -> int:
        """Compare with what may be the same as the bytes go by; write from where the last one turned out not to be."""
        equal = list(self._sharing.large(entry.path, entry.size_bytes, entry.mode, entry.mtime_ns))
        made, done, sum_of_it = -1, 0, 0
        try:
            for piece in tar.contents():
                sum_of_it = checksum(piece, sum_of_it)
                while equal and os.pread(equal[-1], len(piece), done) != bytes(piece):
                    last = equal.pop()
                    if not equal:
                        made = _copy_head(last, done, name, directory)
                    os.close(last)
                if not equal:
                    if made < 0:
                        made = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
                    _write_all(made, piece)
                done += len(piece)
            if equal and not self._share(equal.pop(), entry, directory, name):
                raise OSError(os.strerror(18))
            if made >= 0:
                _settle(made, entry)
                self.written_bytes += entry.size_bytes
        finally:
            for opened in (*equal, *([made] if made >= 0 else ())):
                os.close(opened)
        return sum_of_it

    def _look_at_the_disk(self, coming_bytes: int) -> None:
        self._unlooked_bytes += coming_bytes
        if self._unlooked_bytes < _LOOK_EVERY_BYTES and self.written_bytes:
            return
        self._unlooked_bytes = 0
        status = os.fstatvfs(self._handles[""])
        if status.f_bavail * status.f_frsize < coming_bytes + SPARE_BYTES:
            raise Unavailable(
                "cannot go on unpacking: no space left on the disk; free some, it goes on by itself",
                code="insufficient_disk",
            )

    def _directory(self, path: str, *, make: bool = True) -> int:
        """A handle of a directory, reached without following a link. Valid until the next few are asked for."""
        known = self._handles.get(path)
        if known is not None:
            self._handles.move_to_end(path)
            return known
        parent, _, name = path.rpartition("/")
        above = self._directory(parent, make=make)
        try:
            handle = self._open_below(above, name, make)
        except NotADirectoryError:
            raise unsafe(f"it puts something below {path[:80]!r}, which is no directory") from None
        self._handles[path] = handle
        if len(self._handles) > _OPEN_DIRECTORIES:
            oldest = next(one for one in self._handles if one)
            os.close(self._handles.pop(oldest))
        return handle

    def _open_below(self, above: int, name: str, make: bool) -> int:
        try:
            return os.open(name, _DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        os.mkdir(name, 0o755, dir_fd=above)
        handle = os.open(name, _DIRECTORY, dir_fd=above)
        os.fchmod(handle, 0o755)
        return handle

    def _white_out(self, parent: str, hidden: str) -> None:
        """Hide what lower layers have, and nothing of this layer."""
        if self._is_first:
            return
        try:
            directory = self._directory(parent, make=False)
        except FileNotFoundError:
            return
        if hidden:
            self._hide(f"{parent}/{hidden}" if parent else hidden, directory, hidden)
        else:
            for name in os.listdir(directory):
                self._hide(f"{parent}/{name}" if parent else name, directory, name)

    def _hide(self, path: str, directory: int, name: str) -> None:
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if path not in self._in_layer:
            self._remove(path, directory, name, status)
        elif stat.S_ISDIR(status.st_mode):
            inner = self._directory(path, make=False)
            for child in os.listdir(inner):
                self._hide(f"{path}/{child}", self._directory(path, make=False), child)

    def _remove(self, path: str, directory: int, name: str, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(name, dir_fd=directory)
            return
        # Handles below it would keep pointing into what is gone.
        for known in [one for one in self._handles if one == path or one.startswith(path + "/")]:
            os.close(self._handles.pop(known))
        for known in [one for one in self._directories if one == path or one.startswith(path + "/")]:
            del self._directories[known]
        _remove_directory(directory, name)


def _settle(made: int, entry: TarEntry) -> None:
    os.fchmod(made, entry.mode)
    os.utime(made, ns=(entry.mtime_ns, entry.mtime_ns))


def _write_all(made: int, content: bytes | memoryview) -> None:
    written = os.write(made, content)
    while written < len(content):
        written += os.write(made, memoryview(content)[written:])


def _copy_head(source: int, size: int, name: str, directory: int) -> int:
    made = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
    done = 0
    while done < size:
        _write_all(made, os.pread(source, min(HELD_BYTES, size - done), done))
        done = min(size, done + HELD_BYTES)
    return made


def _remove_directory(above: int, name: str) -> None:
    handle = os.open(name, _DIRECTORY, dir_fd=above)
    try:
        for entry in _scan(handle):
            if entry.is_dir(follow_symlinks=False):
                _remove_directory(handle, entry.name)
            else:
                os.unlink(entry.name, dir_fd=handle)
    finally:
        os.close(handle)
    os.rmdir(name, dir_fd=above)


def _scan(handle: int) -> Iterator[os.DirEntry[str]]:
    with os.scandir(handle) as found:
        yield from list(found)
