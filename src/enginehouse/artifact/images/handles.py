"""Directories of a tree as open handles, each reached from its parent without following a link.

Nothing outside the root can be reached through here, whatever the tree contains. A handle is valid until the next few
are asked for: whoever keeps a path asks again instead of keeping the number, which may mean another directory by then.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from pathlib import Path

from enginehouse.core.archive import MAX_DEPTH, unsafe
from enginehouse.core.name import shown

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# The way to one directory must not push out the end of the way to another that is in use.
_OPEN_DIRECTORIES = 2 * MAX_DEPTH


class Handles:
    """Paths are canonical and relative to the root, which is ""."""

    def __init__(self, root: Path) -> None:
        self.root = os.open(root, DIRECTORY)
        self._open: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        for handle in (*self._open.values(), self.root):
            os.close(handle)
        self._open.clear()

    def get(self, path: str, *, make: bool = True) -> int:
        """FileNotFoundError where there is no such directory and none is to be made."""
        if not path:
            return self.root
        known = self._open.get(path)
        if known is not None:
            self._open.move_to_end(path)
            return known
        parent, _, name = path.rpartition("/")
        handle = self._below(self.get(parent, make=make), name, path, make)
        self._open[path] = handle
        if len(self._open) > _OPEN_DIRECTORIES:
            os.close(self._open.popitem(last=False)[1])
        return handle

    def is_open(self, path: str) -> bool:
        """Whether `path` is known to be a directory, reached without a link."""
        return path in self._open or not path

    def forget(self, path: str) -> None:
        """The directory is gone: its handle would keep pointing into nothing."""
        handle = self._open.pop(path, None)
        if handle is not None:
            os.close(handle)

    def _below(self, above: int, name: str, path: str, make: bool) -> int:
        try:
            return os.open(name, DIRECTORY, dir_fd=above)
        except FileNotFoundError:
            if not make:
                raise
        except OSError as error:
            # Systems differ in which of the two they say of a link.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if make or stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise unsafe(f"it puts something below {shown(path)}, which is no directory") from None
            raise FileNotFoundError(errno.ENOENT, "below a file there is nothing", path) from None
        os.mkdir(name, 0o755, dir_fd=above)
        handle = os.open(name, DIRECTORY, dir_fd=above)
        os.fchmod(handle, 0o755)
        return handle
