"""File permissions for the user of the engines: the least that they need.

Our directories on the path get the group of that user and the execute bit for it, and stay closed to all others. Files
to read keep their owner; those that are not world-readable become readable by the group. Directories that are not ours
are never changed. All functions block.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from enginehouse.core.errors import Invalid
from enginehouse.host.confinement import User


def check_way(directory: Path, user: User) -> None:
    """Raise `Invalid` if `user` cannot traverse a parent of `directory`."""
    for above in reversed(directory.resolve().parents):
        status = above.stat()
        is_open = status.st_mode & stat.S_IXOTH
        is_open = is_open or (status.st_mode & stat.S_IXGRP and status.st_gid in user.groups)
        if not is_open and status.st_uid != user.uid:
            raise Invalid(
                f"cannot run engines as {user.name}: it has no access to {above}; use another data directory, such as "
                "--data /var/lib/enginehouse, or allow access with chmod o+x",
                code="invalid_setting",
                param="engine_user",
            )


def open_way(directories: Iterable[Path], user: User) -> None:
    """Let the group of the user traverse our directories, but not list them."""
    for directory in directories:
        status = directory.stat()
        if not status.st_mode & stat.S_IXOTH:
            os.chown(directory, -1, user.gid)
            os.chmod(directory, (stat.S_IMODE(status.st_mode) & ~stat.S_IRWXG) | stat.S_IXGRP)


def let_read(tree: Path, user: User) -> None:
    """Make everything below `tree` readable by the group of the user, if it is not world-readable."""
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
    """Make the user the owner of `path` and everything in it."""
    if path.lstat().st_uid == user.uid:
        return
    for directory, names, files in os.walk(path):
        for name in (*names, *files):
            os.chown(Path(directory, name), user.uid, user.gid, follow_symlinks=False)
    os.chown(path, user.uid, user.gid, follow_symlinks=False)
