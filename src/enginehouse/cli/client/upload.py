"""Uploads a file to the frontend in parts. An interrupted upload goes on where it was, also with another command.

The frontend says how much it has; nothing is remembered here. The file is identified by its sha256.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from enginehouse.cli.client.connect import FrontendApi, waiting
from enginehouse.cli.terminal.output import is_terminal, printable, size
from enginehouse.core.errors import Conflict, Invalid, Unavailable
from enginehouse.link.client import RawBody

PART_BYTES = 32 * 1024**2  # what is sent again, at most, after a lost connection
PART_SECONDS = 600.0
VERIFY_SECONDS = 3600.0  # the frontend reads the whole file once before it answers the last part
TRIES = 5  # of one part
_READ_BYTES = 1024**2


def upload_file(frontend: FrontendApi, path: Path) -> tuple[str, int]:
    """Upload a file unless the frontend has it. Returns its sha256 and its size."""
    try:
        total = path.stat().st_size
        if not total:
            raise Invalid(f"cannot upload {path}: it is empty", code="unsupported", param="source")
        with waiting(f"reading {path.name}"):
            sha256 = _digest(path)
        _send(frontend, path, sha256, total)
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror or error}", code="invalid_uri", param="source") from error
    return sha256, total


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _send(frontend: FrontendApi, path: Path, sha256: str, total: int) -> None:
    offset, is_complete = _offset(frontend, sha256)
    tries = TRIES
    show = _progress(path.name, total)
    with open(path, "rb") as file:
        while not is_complete:
            file.seek(offset)
            content = file.read(PART_BYTES)
            if not content:
                raise Invalid(f"cannot upload {path}: it became shorter meanwhile", code="unsupported", param="source")
            end = offset + len(content)
            headers = {
                "Content-Range": f"bytes {offset}-{end - 1}/{total}",
                "Content-Type": "application/octet-stream",
            }
            limit = VERIFY_SECONDS if end == total else PART_SECONDS
            try:
                frontend.client.request_bytes(
                    "PUT", f"/api/uploads/{sha256}", RawBody(content, headers), timeout_seconds=limit
                )
            except (Conflict, Unavailable) as error:
                # The part may have arrived although its answer was lost.
                tries -= 1
                if tries <= 0 or error.code == "disk_full":
                    raise
                offset, is_complete = _offset(frontend, sha256)
                continue
            offset, is_complete, tries = end, end == total, TRIES
            show(offset)
    show(-1)


def _offset(frontend: FrontendApi, sha256: str) -> tuple[int, bool]:
    status, headers = frontend.client.head(f"/api/uploads/{sha256}")
    if status != 200:
        if status != 404:
            # A HEAD has no body; the same request with one says what is wrong.
            frontend.client.request_bytes("PUT", f"/api/uploads/{sha256}", RawBody(b""))
        return 0, False
    offset = headers.get("upload-offset", "0")
    return int(offset) if offset.isdecimal() else 0, headers.get("upload-complete") == "?1"


def _progress(name: str, total: int) -> Callable[[int], None]:
    """Shows how far an upload is, on a terminal; -1 erases it."""

    def show(done: int) -> None:
        if is_terminal(sys.stderr):
            text = "" if done < 0 else f"uploading {printable(name)}: {size(done)} of {size(total)}"
            sys.stderr.write(f"\r\x1b[2K{text}")
            sys.stderr.flush()

    return show
