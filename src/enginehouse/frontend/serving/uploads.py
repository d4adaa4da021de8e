"""Files that people upload: stored below one directory under their digest, until workers have fetched them.

The name of a file here is its sha256 and nothing that a client wrote. A file under its final name has that digest; one
that is arriving has another name and grows from its start only, so an interrupted upload goes on where it was. What no
model refers to is removed after a day. Each frontend has its own uploads; workers ask every frontend they know.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from enginehouse.core.errors import Conflict, Invalid, NotFound, Unavailable
from enginehouse.core.gguf import PREFIX_BYTES, GgufHeader, is_gguf, read_gguf
from enginehouse.core.progress import format_bytes
from enginehouse.host import disk
from enginehouse.store import models
from enginehouse.store.db import Store

log = logging.getLogger(__name__)

STEP_SECONDS = 3600.0
KEPT_SECONDS = 24 * 3600.0  # of uploads that no model refers to
HEADROOM_BYTES = 1024**3  # left free on the disk: the database may be on it
SILENCE_SECONDS = 60.0
MAX_HEADER_BYTES = 64 * 1024**2  # the largest vocabularies take a tenth of it
MAX_UPLOADS = 16  # at the same time
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = ".part"


class UploadState(Struct, frozen=True):
    """How many bytes of an upload are here, and whether it is complete and verified."""

    offset_bytes: int
    is_complete: bool


class UploadRange(Struct, frozen=True):
    """The part of a file that one request carries: [start, end) of `total` bytes."""

    start: int
    end: int
    total: int


class Uploads:
    def __init__(self, directory: Path, store: Store) -> None:
        self._directory = directory
        self._store = store
        self._writing: set[str] = set()

    async def state(self, sha256: str) -> UploadState:
        """Return how far an upload is; raises `NotFound` if nothing of it is here."""
        name = _checked(sha256)
        found = await asyncio.to_thread(self._state, name)
        if found is None:
            raise _unknown(name)
        return found

    async def path(self, sha256: str) -> Path:
        """Return the path of a complete upload."""
        name = _checked(sha256)
        found = await asyncio.to_thread(self._state, name)
        if found is None or not found.is_complete:
            raise _unknown(name)
        return self._directory / name

    async def header(self, sha256: str) -> GgufHeader | None:
        """Return the header of a complete upload that is a GGUF file; None for another file."""
        path = await self.path(sha256)
        return await asyncio.to_thread(_header, path)

    async def write(self, sha256: str, part: UploadRange, body: AsyncIterator[bytes]) -> UploadState:
        """Append a part, and verify the file after its last one. Bytes that arrived stay when the body is cut off."""
        name = _checked(sha256)
        if name in self._writing:
            raise Conflict(f"cannot upload {name[:12]}: another upload of the same file is under way; try again later")
        if len(self._writing) >= MAX_UPLOADS:
            raise Unavailable(f"cannot upload {name[:12]}: {MAX_UPLOADS} uploads are under way; try again later")
        self._writing.add(name)
        try:
            return await self._write(name, part, body)
        except OSError as error:
            raise disk.storage_error(error, f"store the upload {name[:12]}") from error
        finally:
            self._writing.discard(name)

    async def _write(self, name: str, part: UploadRange, body: AsyncIterator[bytes]) -> UploadState:
        await asyncio.to_thread(self._directory.mkdir, 0o700, True, True)
        before = await asyncio.to_thread(self._state, name) or UploadState(0, False)
        if before.is_complete:
            return before
        if part.start != before.offset_bytes:
            refused = Conflict(
                f"cannot append at byte {part.start}: {before.offset_bytes} bytes of the file are here; go on there",
                code="wrong_offset",
            )
            refused.details["offset"] = before.offset_bytes
            raise refused
        free = await asyncio.to_thread(disk.free_bytes, self._directory)
        if part.total - part.start > free - HEADROOM_BYTES:
            raise Unavailable(
                f"cannot store the upload: it needs {format_bytes(part.total - part.start)}, and "
                f"{format_bytes(max(0, free - HEADROOM_BYTES))} are free; make room in the data directory",
                code="disk_full",
            )
        await self._append(self._directory / (name + _PART), part, body)
        if part.end < part.total:
            return UploadState(part.end, False)
        await asyncio.to_thread(self._verify, name, part.total)
        log.info("upload.finished sha256=%s bytes=%d", name, part.total)
        return UploadState(part.total, True)

    async def _append(self, path: Path, part: UploadRange, body: AsyncIterator[bytes]) -> None:
        left = part.end - part.start
        file = await asyncio.to_thread(_locked, path, part.start)
        try:
            pieces = body.__aiter__()
            while left:
                try:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    raise Invalid(
                        f"cannot finish the part: {left} bytes of it are missing; ask how far the upload is and go on",
                        code="cut_off",
                    ) from None
                except TimeoutError:
                    raise Unavailable("cannot finish the part: no data arrives; go on later", code="stalled") from None
                if len(piece) > left:
                    raise Invalid("cannot store the part: it is longer than its Content-Range", code="unsupported")
                if piece:
                    await asyncio.to_thread(file.write, piece)
                    left -= len(piece)
        finally:
            await asyncio.to_thread(file.close)

    def _verify(self, name: str, total: int) -> None:
        part = self._directory / (name + _PART)
        found = disk.sha256_of(part)
        if part.stat().st_size != total or found != name:
            part.unlink(missing_ok=True)
            raise Invalid(
                f"cannot use the upload: its sha256 is {found}, not {name}; upload the file again",
                code="digest_mismatch",
            )
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.rename(self._directory / name)
        disk.sync_directory(self._directory)

    def _state(self, name: str) -> UploadState | None:
        try:
            return UploadState((self._directory / name).stat().st_size, True)
        except FileNotFoundError:
            pass
        try:
            return UploadState((self._directory / (name + _PART)).stat().st_size, False)
        except FileNotFoundError:
            return None

    async def step(self) -> None:
        """Remove old uploads that no model refers to."""
        rows = await self._store.look(models.every)
        used = {file.uri.removeprefix("upload:") for model, _ in rows for file in model.files}
        await asyncio.to_thread(self._prune, used)

    def _prune(self, used: set[str]) -> None:
        if not self._directory.is_dir():
            return
        for path in self._directory.iterdir():
            name = path.name.removesuffix(_PART)
            is_old = time.time() - path.stat().st_mtime > KEPT_SECONDS
            if is_old and name not in used and name not in self._writing and _SHA256.fullmatch(name):
                path.unlink(missing_ok=True)
                log.info("upload.removed sha256=%s", name)


def _locked(path: Path, size_bytes: int) -> BinaryIO:
    """Open a growing upload for this process alone: several frontends may share the directory."""
    with ExitStack() as unless_locked, suppress(BlockingIOError):
        file = unless_locked.enter_context(open(path, "ab"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_size == size_bytes:
            unless_locked.pop_all()
            return file
    raise Conflict("cannot append to the upload: another one of the same file is under way; try again later")


def _header(path: Path) -> GgufHeader | None:
    with open(path, "rb") as file:
        head, size_bytes = file.read(PREFIX_BYTES), os.fstat(file.fileno()).st_size
        if not is_gguf(head):
            return None
        header = read_gguf(head, size_bytes)
        if header.is_complete:
            return header
        # The file is here, so the list of its tensors is read too, which tells whether it is cut off.
        return read_gguf(head + file.read(MAX_HEADER_BYTES), size_bytes)


def _checked(sha256: str) -> str:
    if not _SHA256.fullmatch(sha256):
        raise Invalid(
            "cannot use this digest of an upload: it must be 64 hexadecimal digits in lower case",
            code="invalid_name",
            param="sha256",
        )
    return sha256


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"cannot find the upload {name[:12]}…: it is not complete on this frontend; upload the file here first",
        code="not_found",
        param="sha256",
    )
