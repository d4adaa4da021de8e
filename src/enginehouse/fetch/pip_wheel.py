"""The pinned wheel of pip, for machines that join with a Python that has none (Debian's and Ubuntu's without more).

It comes from the package index of this machine and is kept in the data directory. uv installs pip into a temporary
directory, and that pip downloads its own wheel, because uv stores no wheels. Only a file with a pinned hash counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uv

from enginehouse.core.errors import Unavailable
from enginehouse.core.wheel import PinnedWheel
from enginehouse.fetch.pypi import uv_environment

LIMIT_SECONDS = 60.0  # of each of two small downloads
PAUSE_SECONDS = 30.0  # after a failure; the route is public, and each try starts two processes


class PipWheel:
    def __init__(self, wanted: PinnedWheel, directory: Path) -> None:
        self._wanted = wanted
        self._directory = directory
        self._failed_at: float | None = None

    async def fetch(self) -> bytes:
        """Return the file. Raises `Unavailable` if it cannot be had now; the caller does not call it twice at once."""
        wanted = self._wanted
        kept = self._directory / wanted.file_name
        found = await asyncio.to_thread(_checked, kept, wanted)
        if found:
            return found
        now = time.monotonic()
        if self._failed_at is not None and now - self._failed_at < PAUSE_SECONDS:
            raise _unavailable()
        try:
            content = await asyncio.to_thread(_download, wanted)
        except Unavailable:
            self._failed_at = now
            raise
        # Kept for the next start; without space on the disk it is fetched again.
        with contextlib.suppress(OSError):
            await asyncio.to_thread(_keep, kept, content)
        return content


def _unavailable() -> Unavailable:
    return Unavailable(
        "cannot hand out pip: this server does not reach its package index now; install pip or venv on the other "
        "machine (for example: apt-get install python3-venv)"
    )


def _download(wanted: PinnedWheel) -> bytes:
    with tempfile.TemporaryDirectory(prefix="enginehouse-pip-") as place:
        unpacked, downloaded, requirements = (Path(place, name) for name in ("unpacked", "downloaded", "pip.txt"))
        requirements.write_text(f"{wanted.requirement}\n")
        pinned = ("--no-deps", "--require-hashes", "-r", str(requirements))
        install = [uv.find_uv_bin(), "pip", "install", "--quiet", "--only-binary", ":all:", *pinned]
        _run([*install, "--target", str(unpacked), "--python", sys.executable], uv_environment(os.environ))
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:", *pinned]
        _run([*download, "--dest", str(downloaded)], {**os.environ, "PYTHONPATH": str(unpacked)})
        content = _checked(downloaded / wanted.file_name, wanted)
    if not content:
        raise _unavailable()
    return content


def _run(command: list[str], environment: dict[str, str]) -> None:
    try:
        # Outside any project, because uv would read its settings.
        subprocess.run(command, env=environment, cwd="/", capture_output=True, check=True, timeout=LIMIT_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise _unavailable() from error


def _checked(path: Path, wanted: PinnedWheel) -> bytes:
    """The content of the file; nothing if it is missing or another one."""
    try:
        content = path.read_bytes()
    except OSError:
        return b""
    return content if hashlib.sha256(content).hexdigest() in wanted.hashes else b""


def _keep(path: Path, content: bytes) -> None:
    # Its hash is checked whenever it is read, so half a file is no danger; the rename only avoids another download.
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)
