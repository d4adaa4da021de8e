"""Names that a file system cannot tell apart: "Lib" and "lib" where it folds case, two ways to write "ä" where it
compares characters. One of the two would replace the other in silence, so they are refused there.

Whether it does so is tried out in the directory itself: it may differ from one directory to the next.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata

from enginehouse.core.archive import not_allowed
from enginehouse.core.name import shown

_PROBE = ".Enginehouse-Probe"


def folds_case(directory: int) -> bool:
    """Of the open directory, in which nothing may be called as the probe is."""
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


class Twins:
    """The paths of a tree as they were written. Does nothing where the file system tells all names apart."""

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._written: dict[str, str] = {}

    def add(self, path: str) -> None:
        """A path that is about to be made, with everything above it."""
        while self._is_needed and path:
            known = self._written.setdefault(_folded(path), path)
            if known != path:
                raise not_allowed(
                    f"it has {shown(known)} and {shown(path)}, which the file system of the backends directory cannot "
                    "tell apart"
                )
            path = path.rpartition("/")[0]

    def discard(self, path: str) -> None:
        if self._is_needed:
            self._written.pop(_folded(path), None)

    def is_another(self, path: str) -> bool:
        """Whether what the file system finds at `path` is called otherwise."""
        return self._is_needed and self._written.get(_folded(path), path) != path


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
