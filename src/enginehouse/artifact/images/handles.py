"""Open handles of the directories of a tree, each opened from its parent without following links.

Nothing outside the root can be reached through a handle, whatever the tree contains. The handles are a bounded cache:
callers keep the path and call `get` again. They must not keep the descriptor, which is closed and reused later.
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
# Opening one path must not evict the directory of another path that is still in use.
_OPEN_DIRECTORIES = 2 * MAX_DEPTH


class Handles:
    """A cache of directory handles. Paths are canonical and relative to the root, which is ""."""

    def __init__(self, root: Path) -> None:
        self.root = os.open(root, DIRECTORY)
        self._open: OrderedDict[str, int] = OrderedDict()

    def close(self) -> None:
        for handle in (*self._open.values(), self.root):
            os.close(handle)
        self._open.clear()

    def get(self, path: str, *, make: bool = True) -> int:
        """Return the handle of a directory. Raises `FileNotFoundError` if it is missing and `make` is False."""
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
        """Whether `path` is known to be a directory that is reached without a link."""
        return path in self._open or not path

    def forget(self, path: str) -> None:
        """Close the handle of a removed directory."""
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
            # Systems differ in which of the two errors they report for a link.
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            if make or stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
                raise unsafe(f"it has an entry below {shown(path)}, which is not a directory") from None
            raise FileNotFoundError(errno.ENOENT, "not below a directory", path) from None
        os.mkdir(name, 0o755, dir_fd=above)
        handle = os.open(name, DIRECTORY, dir_fd=above)
        os.fchmod(handle, 0o755)
        return handle
