"""Trees for engines that write to their own at every start, which a confined one may not.

LocalAI's Python backends set the links of their environment and edit its configuration before they exec Python. Such an
engine is started from a stand-in: a directory of the same name in which the small files that are rewritten are copies,
and everything else is a link into the tree. It belongs to one process and goes with it, so the tree stays as it was
installed, and two starts at once do not meet.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_SCRIPTS = Path("common", "libbackend.sh")  # LocalAI's: a tree that has it rewrites its environment
_ENVIRONMENT = "venv"
_COPIED = {"common"}  # directories of scripts, which look for their neighbours by their own real path
_COPIED_BYTES = 1024 * 1024  # scripts and settings are far smaller, programs and libraries larger


def is_needed(tree: Path) -> bool:
    return os.path.isfile(tree / _SCRIPTS)  # no, too, where the directory may not be entered


def make(tree: Path, place: Path) -> Path:
    """A stand-in for `tree` in the directory `place`. Blocks."""
    root = place / tree.name
    root.mkdir(mode=0o700)
    for entry in os.scandir(tree):
        is_directory = entry.is_dir(follow_symlinks=False)
        if entry.name == _ENVIRONMENT and is_directory:
            _stand_in_for_environment(Path(entry.path), root / entry.name)
        elif entry.name in _COPIED and is_directory:
            _copy_directory(Path(entry.path), root / entry.name)
        else:
            _copy_or_link(entry, root)
    return root


def _stand_in_for_environment(environment: Path, place: Path) -> None:
    place.mkdir(mode=0o700)
    for entry in os.scandir(environment):
        if entry.name == "bin" and entry.is_dir(follow_symlinks=False):
            _copy_directory(Path(entry.path), place / "bin")
        else:
            _copy_or_link(entry, place)


def _copy_directory(directory: Path, place: Path) -> None:
    """Its own files; what lies deeper is linked to."""
    place.mkdir(mode=0o700)
    for entry in os.scandir(directory):
        _copy_or_link(entry, place)


def _copy_or_link(entry: os.DirEntry[str], place: Path) -> None:
    target = place / entry.name
    if entry.is_symlink():
        # As it is: what it leads to is in the stand-in too.
        os.symlink(os.readlink(entry.path), target)
    elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size <= _COPIED_BYTES:
        shutil.copyfile(entry.path, target)
        target.chmod(0o700 if os.access(entry.path, os.X_OK) else 0o600)
    else:
        os.symlink(entry.path, target)
