"""Inspects directories of backends: their metadata and whether they can be started.

Read-only, except that `check_run_file` makes a run file executable.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.installation import METADATA_FILE, RUN_FILE, Found


def now() -> str:
    """RFC 3339, as in LocalAI's metadata. Shown to people only; no decision depends on it."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def inspect(path: Path) -> Found:
    metadata: bytes | None
    try:
        metadata = (path / METADATA_FILE).read_bytes()
    except FileNotFoundError:
        metadata = None
    except OSError:
        metadata = b""
    try:
        status = (path / RUN_FILE).stat()
        has_run_file = (path / RUN_FILE).is_file() and status.st_size > 0 and status.st_mode & 0o111 != 0
    except OSError:
        has_run_file = False
    return Found(name=path.name, metadata=metadata, has_run_file=has_run_file)


def inode(path: Path) -> int | None:
    try:
        return path.stat(follow_symlinks=False).st_ino
    except OSError:
        return None


def directories(path: Path) -> list[Path]:
    try:
        return [one for one in sorted(path.iterdir()) if one.is_dir() and not one.is_symlink()]
    except FileNotFoundError:
        return []


def check_removable(installed: Iterable[InstalledBackend], directory: str) -> None:
    """Raise `Invalid` for a backend that came with the machine."""
    if any(backend.name == directory and backend.is_system for backend in installed):
        raise Invalid(f"cannot delete {directory}: it belongs to the system", code="unsupported", param="backend")


def check_run_file(staging: Path, resolved: Resolved) -> None:
    run_file = staging / RUN_FILE
    if run_file.is_symlink() or not run_file.is_file() or not run_file.stat().st_size:
        raise Hopeless(
            f"cannot install {resolved.directory}: {resolved.uri} has no {RUN_FILE}, "
            "so it is not a backend; check the URI",
            code="unsupported",
        )
    if not run_file.stat().st_mode & 0o111:
        run_file.chmod(0o700)  # LocalAI does the same before a start
