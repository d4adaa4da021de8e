"""Programs and packages from outside that tests use: found on the machine, or fetched once into a cache.

What is missing fails in continuous integration and is skipped on a person's machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginehouse-tests"
BUILD_SECONDS = 400.0  # cold, with downloads, beside other tests


def tool(name: str, elsewhere: str = "") -> str:
    """The path of a program."""
    found = shutil.which(name) or shutil.which(name, path=elsewhere)
    if found is None:
        sentence = f"there is no {name} here: install it to test against what needs it"
        if os.environ.get("CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    return found


@contextlib.contextmanager
def cached_place(source: Path) -> Iterator[Path]:
    """A directory of the cache for these sources; one process at a time fills it."""
    digest = hashlib.sha256()
    for file in sorted(source.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    place = CACHE / f"{source.name}-{digest.hexdigest()[:16]}"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def npm_place(source: Path) -> Path:
    """A copy of a directory with a package-lock.json, with its packages installed."""
    npm = tool("npm")
    with cached_place(source) as place:
        if not (place / "done").exists():
            for file in source.iterdir():
                shutil.copy(file, place)
            run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], place)
            (place / "done").touch()
    return place


def run(command: list[str], directory: Path) -> None:
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if ended.returncode:
        pytest.fail(f"{' '.join(command)} failed: {ended.stdout}{ended.stderr}")
