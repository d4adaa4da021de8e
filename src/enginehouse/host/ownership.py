"""Files for another user: a way to them through directories that stay closed to everybody else, and no more rights
than needed.

Directories of ours on the way get the user's group and the right to pass through; what is to be read keeps its owner
and becomes readable for the group where it is not for everybody. Directories that are not ours are never changed.
Everything blocks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from enginehouse.core.errors import Invalid
from enginehouse.host.confinement import User


def check_way(directory: Path, user: User) -> None:
    """`Invalid` where a directory above `directory` does not let `user` through."""
    for above in reversed(directory.resolve().parents):
        status = above.stat()
        is_open = status.st_mode & stat.S_IXOTH
        is_open = is_open or (status.st_mode & stat.S_IXGRP and status.st_gid in user.groups)
        if not is_open and status.st_uid != user.uid:
            raise Invalid(
                f"cannot run engines as {user.name}: {above} is closed to that user; use a data directory elsewhere, "
                "like --data /var/lib/enginehouse, or open that one to passing through (chmod o+x)",
                code="invalid_setting",
                param="engine_user",
            )


def open_way(directories: Iterable[Path], user: User) -> None:
    """Let the user's group pass through directories of ours, without seeing what is in them."""
    for directory in directories:
        status = directory.stat()
        if not status.st_mode & stat.S_IXOTH:
            os.chown(directory, -1, user.gid)
            os.chmod(directory, (stat.S_IMODE(status.st_mode) & ~stat.S_IRWXG) | stat.S_IXGRP)


def let_read(tree: Path, user: User) -> None:
    """Make everything below `tree` readable for the user's group where it is not for everybody."""
    _let_read(tree, user)
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            _let_read(Path(directory, name), user)


def _let_read(path: Path, user: User) -> None:
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return
    needed = stat.S_IROTH | (stat.S_IXOTH if status.st_mode & stat.S_IXUSR else 0)
    if status.st_mode & needed != needed:
        os.chown(path, -1, user.gid, follow_symlinks=False)
        mode = stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID)
        os.chmod(path, mode | needed << 3)


def give(path: Path, user: User) -> None:
    """`path` and everything in it belongs to the user."""
    if path.lstat().st_uid == user.uid:
        return
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(Path(directory, name), user.uid, user.gid, follow_symlinks=False)
    os.chown(path, user.uid, user.gid, follow_symlinks=False)
