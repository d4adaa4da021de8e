"""Replaces hard links between trees by copies, for a worker whose engines can write to their trees.

Links between trees are made only while confinement keeps engines from writing to them. If confinement is switched off
later, a write to one file must not change another version. A marker file records that no such links exist, so that a
worker without confinement scans once and not at every start. Hard links within an image are kept.
All methods block. Callers hold the lock of the backends directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from enginehouse.artifact.images.sharing import Manifests
from enginehouse.host import disk
from enginehouse.worker.backends.trees import Trees

_Inode = tuple[int, int]


class Separation:
    def __init__(self, trees: Trees, manifests: Manifests) -> None:
        self._trees = trees
        self._manifests = manifests
        self._marker = trees.private / "separate"

    def expect_links(self) -> None:
        """Remove the marker. Called before the first link is made."""
        self._marker.unlink(missing_ok=True)

    def separate(self) -> int:
        """Copy files that two trees share, or one has twice without a link in its image; the number of copies."""
        if self._marker.exists():
            return 0
        copied = 0
        seen: set[_Inode] = set()
        work = self._trees.staging_of("separating.tmp")  # a kill leaves it; the next start removes it
        work.mkdir(mode=0o700)
        try:
            for tree in self._trees.every_tree():
                files = {record.path for record in self._manifests.read(tree)}
                groups = _linked(tree)
                for inode, names in groups.items():
                    for group in _apart(names, files):
                        if inode in seen:
                            _replace(tree, group, work / "copy")
                            copied += 1
                        seen.add(inode)
        finally:
            disk.remove_tree(work)
        self._marker.touch(mode=0o640)
        return copied


def _linked(tree: Path) -> dict[_Inode, list[str]]:
    """The paths in this tree of every file with several hard links, by inode."""
    found: dict[_Inode, list[str]] = {}
    for directory, _, names in os.walk(tree):
        for name in names:
            with contextlib.suppress(OSError):
                path = os.path.join(directory, name)
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_nlink > 1:
                    found.setdefault((status.st_dev, status.st_ino), []).append(os.path.relpath(path, tree))
    return found


def _apart(names: list[str], files: set[str]) -> list[list[str]]:
    """Group the names that must stay one file.

    An image has a file once, and hard links to it: names that are both files there were linked by the installer.
    """
    own = [name for name in names if name in files]
    if len(own) < 2:
        return [names]
    return [[own[0], *(name for name in names if name not in files)], *([name] for name in own[1:])]


def _replace(tree: Path, names: list[str], spare: Path) -> None:
    """Replace the file of these names by a copy; they stay hard links of one file."""
    first = tree / names[0]
    status = first.lstat()
    with _readable(first, status):
        shutil.copyfile(first, spare, follow_symlinks=False)
    os.chmod(spare, stat.S_IMODE(status.st_mode))
    os.utime(spare, ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in names[1:]:
        with _writable((tree / name).parent):
            (tree / name).unlink()
            os.link(spare, tree / name)
    with _writable(first.parent):
        spare.rename(first)


@contextlib.contextmanager
def _readable(path: Path, status: os.stat_result) -> Iterator[None]:
    mode = stat.S_IMODE(status.st_mode)
    if mode & stat.S_IRUSR:
        yield
        return
    os.chmod(path, mode | stat.S_IRUSR)
    try:
        yield
    finally:
        os.chmod(path, mode)


@contextlib.contextmanager
def _writable(directory: Path) -> Iterator[None]:
    """Make a directory writable; its mode and times are restored afterwards."""
    status = directory.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o700 != 0o700:
        directory.chmod(mode | 0o700)
    try:
        yield
    finally:
        directory.chmod(mode)
        os.utime(directory, ns=(status.st_atime_ns, status.st_mtime_ns))
