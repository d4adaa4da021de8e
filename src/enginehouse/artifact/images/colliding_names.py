"""Names that are equal to a file system: "Lib" and "lib" if it folds case, two encodings of "ä" if it normalises.

One of the two files would silently replace the other, so such an archive is refused on such a file system. Case
folding is probed in the directory itself, because it can differ between directories of one file system.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata

from enginehouse.core.archive import not_allowed
from enginehouse.core.name import shown

_PROBE = ".Enginehouse-Probe"


def folds_case(directory: int) -> bool:
    """Whether names in the open directory are compared without case. Creates and removes a probe file."""
    made = os.open(_PROBE, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    os.close(made)
    try:
        os.stat(_PROBE.lower(), dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_PROBE, dir_fd=directory)
    return True


class CollidingNames:
    """The paths of a tree as written. Does nothing if the file system distinguishes all names."""

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._written: dict[str, str] = {}

    def add(self, path: str) -> None:
        """Register a path and its parents before creation. Raises if another spelling of one of them exists."""
        while self._is_needed and path:
            known = self._written.setdefault(_folded(path), path)
            if known != path:
                raise not_allowed(
                    f"it has {shown(known)} and {shown(path)}, which are equal to the file system of the backends "
                    "directory"
                )
            path = path.rpartition("/")[0]

    def discard(self, path: str) -> None:
        if self._is_needed:
            self._written.pop(_folded(path), None)

    def is_another(self, path: str) -> bool:
        """Whether the file system would find a file of another spelling at `path`."""
        return self._is_needed and self._written.get(_folded(path), path) != path


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
