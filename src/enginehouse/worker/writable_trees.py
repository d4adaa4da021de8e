"""Makes writable copies of trees for engines that write to their own tree at every start.

A confined engine must not write to its tree, but LocalAI's Python backends set the links of their environment and edit
its configuration before they exec Python. Such an engine starts from a stand-in: a directory of the same name with
copies of the small files and links into the tree for everything else. A stand-in belongs to one process and is removed
with it. So the tree stays as installed, and concurrent starts do not interfere.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_SCRIPTS = Path("common", "libbackend.sh")  # LocalAI's: a tree with this file rewrites its environment
_ENVIRONMENT = "venv"
_COPIED = {"common"}  # directories of scripts, which find each other by their real path
_COPIED_BYTES = 1024 * 1024  # scripts and settings are far smaller, programs and libraries are larger


def is_needed(tree: Path) -> bool:
    return os.path.isfile(tree / _SCRIPTS)  # False, too, if the directory may not be entered


def make(tree: Path, parent: Path) -> Path:
    """Make a stand-in for `tree` in the directory `parent`. Blocks."""
    root = parent / tree.name
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


def _stand_in_for_environment(environment: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for entry in os.scandir(environment):
        if entry.name == "bin" and entry.is_dir(follow_symlinks=False):
            _copy_directory(Path(entry.path), target / "bin")
        else:
            _copy_or_link(entry, target)


def _copy_directory(directory: Path, target: Path) -> None:
    """Copy the files of a directory; its subdirectories become links."""
    target.mkdir(mode=0o700)
    for entry in os.scandir(directory):
        _copy_or_link(entry, target)


def _copy_or_link(entry: os.DirEntry[str], target: Path) -> None:
    path = target / entry.name
    if entry.is_symlink():
        # Unchanged: its target is in the stand-in, too.
        os.symlink(os.readlink(entry.path), path)
    elif entry.is_file(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_size <= _COPIED_BYTES:
        shutil.copyfile(entry.path, path)
        path.chmod(0o700 if os.access(entry.path, os.X_OK) else 0o600)
    else:
        os.symlink(entry.path, path)
