"""Applies the layers of an image to an empty directory, as the image specification defines.

Links on a path are resolved in memory, from the links of this tree only and inside the root (`images.links`). The
resolved path is walked by directory handles that follow no link, so no archive can reach anything outside the root.
Existing files are replaced and never opened for writing, because they may be shared with another version. Directory
times and modes are set last, so that read-only directories can be filled. All calls block and belong in a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from enginehouse.artifact.images.colliding_names import CollidingNames, folds_case
from enginehouse.artifact.images.contents import Contents, Entries
from enginehouse.artifact.images.handles import DIRECTORY, Handles
from enginehouse.artifact.images.links import Links
from enginehouse.artifact.images.sharing import FileRecord, Sharing
from enginehouse.core.archive import (
    ArchiveLimits,
    EntryKind,
    TarEntry,
    check_path,
    not_allowed,
    too_large,
    unsafe,
    whiteout_target,
)
from enginehouse.core.errors import Unavailable
from enginehouse.core.name import shown

_LISTED = 5  # at most this many files are listed with dropped attributes


class Dropped:
    """Attributes with an effect on programs that are not preserved: the number of files, and the first few."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[str] = []

    def add(self, entry: TarEntry) -> None:
        if entry.attributes:
            self.count += 1
            if len(self._first) < _LISTED:
                self._first.append(f"{', '.join(entry.attributes)} of {shown(entry.path)}")

    def __str__(self) -> str:
        """Empty if no attribute was dropped."""
        more = self.count - len(self._first)
        return ", ".join(self._first) + (f" and {more} more" if more else "")


def cancelled() -> Unavailable:
    return Unavailable("cannot continue unpacking: the operation was cancelled", code="cancelled")


class Unpacker:
    """Owns one tree while it is built. Call `apply` once per layer, then `finish`."""

    def __init__(self, root: Path, sharing: Sharing, limits: ArchiveLimits) -> None:
        self._limits = limits
        sharing.begin()
        self._handles = Handles(root)
        self._contents = Contents(sharing, self._handles.root)
        self._directories: dict[str, tuple[int, int]] = {}
        self._links = Links()
        self._colliding_names = CollidingNames(is_needed=folds_case(self._handles.root))
        self._in_layer: dict[str, EntryKind] = {}
        self._hidden: set[str] = set()
        self._is_first = True
        self._entries = 0
        self.dropped = Dropped()
        self.records: dict[str, FileRecord] = {}

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *exc: object) -> None:
        self._handles.close()

    @property
    def written_bytes(self) -> int:
        return self._contents.written_bytes

    def apply(self, archive: Entries, is_cancelled: Callable[[], bool]) -> None:
        """Apply one layer, in the order of its entries."""
        self._in_layer, self._hidden = {}, set()
        try:
            for entry in archive.entries():
                self._entries += 1
                if self._entries > self._limits.entries:
                    raise too_large(f"it has more than {self._limits.entries} entries")
                if is_cancelled():
                    raise cancelled()
                self._place(entry, archive)
        except FileExistsError:
            raise not_allowed("it has two names that are equal to this file system") from None
        archive.drain()
        self._is_first = False

    def finish(self) -> None:
        """Set times and modes of directories, deepest first: creating a child changes the time of its parent."""
        self._links.check()
        for path in sorted(self._directories, key=lambda one: one.count("/"), reverse=True):
            mode, mtime_ns = self._directories[path]
            handle = self._handles.get(path, make=False)
            os.utime(handle, ns=(mtime_ns, mtime_ns))
            os.fchmod(handle, mode)

    def _place(self, entry: TarEntry, archive: Entries) -> None:
        parent, _, name = entry.path.rpartition("/")
        if not name:
            if entry.kind != "directory":
                raise unsafe("it replaces the root of the tree")
            return
        hidden = whiteout_target(name)
        if hidden is not None:
            self._white_out(self._links.resolve(parent), hidden)
            return
        if not self._handles.is_open(parent):
            real = self._links.resolve(parent)
            if real != parent:
                entry = replace(entry, path=check_path(f"{real}/{name}" if real else name))
                parent = real
        self._colliding_names.add(entry.path)
        directory = self._handles.get(parent)
        self._make_way(entry, directory, name)
        self.dropped.add(entry)
        match entry.kind:
            case "directory":
                self._make_directory(entry, directory, name)
            case "symlink":
                self._make_symlink(entry, directory, name)
            case "hardlink":
                self._link(entry, directory, name)
            case "file":
                record = self._contents.put(entry, archive, directory, name)
                if record is not None:
                    self.records[entry.path] = record
        self._note(entry.path, entry.kind)

    def _note(self, path: str, kind: EntryKind) -> None:
        self._in_layer[path] = kind
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in self._in_layer:
                return
            self._in_layer[path] = "directory"

    def _make_way(self, entry: TarEntry, directory: int, name: str) -> None:
        before = self._in_layer.get(entry.path)
        if before is not None and before != entry.kind:
            raise not_allowed(f"it contains {shown(entry.path)} twice, as {before} and as {entry.kind}")
        if self._is_first and before is None:
            return  # the tree was empty, so nothing exists at this path
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not (stat.S_ISDIR(status.st_mode) and entry.kind == "directory"):
            self._remove(entry.path, directory, name, is_directory=stat.S_ISDIR(status.st_mode))

    def _make_directory(self, entry: TarEntry, directory: int, name: str) -> None:
        # After `_make_way`, anything that exists at this path is a directory.
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
        self._directories[entry.path] = (entry.mode, entry.mtime_ns)

    def _make_symlink(self, entry: TarEntry, directory: int, name: str) -> None:
        os.symlink(self._links.add(entry.path, entry.target), name, dir_fd=directory)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)

    def _link(self, entry: TarEntry, directory: int, name: str) -> None:
        target = check_path(entry.target)
        parent, _, inner = target.rpartition("/")
        parent = self._links.resolve(parent)
        source = f"{parent}/{inner}" if parent else inner
        try:
            above = self._handles.get(parent, make=False)
            status = os.stat(inner or ".", dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            raise unsafe(f"{shown(entry.path)} is a hard link to {shown(target)}, which does not exist") from None
        if stat.S_ISLNK(status.st_mode):
            # A relative link may have another target when it is read from this directory.
            said = self._links.target_of_link(source)
            if self._links.add(entry.path, said) != os.readlink(inner, dir_fd=above):
                self._make_symlink(replace(entry, target=said), directory, name)
                return
        elif not stat.S_ISREG(status.st_mode):
            raise unsafe(f"{shown(entry.path)} is a hard link to something other than a file")
        try:
            os.link(inner, name, src_dir_fd=above, dst_dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            raise too_large(f"{shown(target)} has more hard links than the file system allows") from None

    def _white_out(self, parent: str, hidden: str) -> None:
        """Remove entries of lower layers; entries of this layer stay."""
        if self._is_first:
            return
        try:
            names = [hidden] if hidden else os.listdir(self._handles.get(parent, make=False))
        except FileNotFoundError:
            return
        for name in names:
            self._hide(parent, name)

    def _hide(self, parent: str, name: str) -> None:
        path = f"{parent}/{name}" if parent else name
        if path in self._hidden:
            return  # anything here now is of this layer, and repeated scans would take quadratic time
        self._hidden.add(path)
        if self._colliding_names.is_another(path):
            return
        try:
            directory = self._handles.get(parent, make=False)
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        is_directory = stat.S_ISDIR(status.st_mode)
        if path not in self._in_layer:
            self._remove(path, directory, name, is_directory=is_directory)
        elif is_directory:
            for child in os.listdir(self._handles.get(path, make=False)):
                self._hide(path, child)

    def _remove(self, path: str, directory: int, name: str, *, is_directory: bool) -> None:
        self._colliding_names.discard(path)
        if not is_directory:
            os.unlink(name, dir_fd=directory)
            self.records.pop(path, None)
            self._links.discard(path)
            return
        handle = os.open(name, DIRECTORY, dir_fd=directory)
        try:
            with os.scandir(handle) as found:
                inside = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
            for inner, is_one in inside:
                self._remove(f"{path}/{inner}", handle, inner, is_directory=is_one)
        finally:
            os.close(handle)
        os.rmdir(name, dir_fd=directory)
        self._handles.forget(path)
        self._directories.pop(path, None)
