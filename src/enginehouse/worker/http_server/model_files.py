"""Verified files of models over HTTP, for other nodes: by digest, whole or in ranges, with a ticket for that file.

Only files that are in place under a manifest are served, never one that is arriving. Few transfers run at once, and
each has a limit: engines on this machine come first. `HEAD` says without a transfer whether the file is here, is
coming, or has to wait.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Protocol

from aiohttp import web

from enginehouse.host.blocking import in_thread
from enginehouse.worker.http_server.uploads import RefusedRequest, plain
from enginehouse.worker.models.peers import MOVED

MAX_TRANSFERS = 16  # four nodes with four connections each
TRANSFER_SECONDS = 300.0  # for one range, which has 8 MiB
READ_BYTES = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")


class HeldFiles(Protocol):
    """The files of models on this node."""

    def path_by_digest(self, sha256: str) -> Path | None:
        """The path of a verified file. Blocks."""

    def moved(self, sha256: str) -> int | None:
        """A number that grows while the file is being fetched; None if it is not."""


def is_digest_of_file(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


class ModelFileAnswers:
    def __init__(self, files: HeldFiles | None) -> None:
        self._files = files
        self._transfers = 0
        self.refused = 0  # because too many transfers ran

    async def answer(self, request: web.BaseRequest, sha256: str) -> web.StreamResponse:
        """The caller has checked the ticket."""
        if request.method not in ("GET", "HEAD"):
            return plain(405, "method not allowed\n")
        path = await in_thread(self._files.path_by_digest, sha256) if self._files is not None else None
        if path is None:
            moved = self._files.moved(sha256) if self._files is not None else None
            if moved is None:
                return plain(404, "file not found\n")
            return web.Response(status=202, headers={MOVED: str(moved)})
        if self._transfers >= MAX_TRANSFERS:
            self.refused += 1
            return plain(503, "too many transfers\n", {"Retry-After": "1"})
        if request.method == "HEAD":
            size = (await in_thread(path.stat)).st_size
            return web.Response(headers={"Content-Length": str(size), "Accept-Ranges": "bytes"})
        self._transfers += 1
        try:
            async with asyncio.timeout(TRANSFER_SECONDS):
                return await _send(request, path)
        except TimeoutError:
            raise RefusedRequest(503, "the transfer took too long\n") from None
        finally:
            self._transfers -= 1


async def _send(request: web.BaseRequest, path: Path) -> web.StreamResponse:
    descriptor = await in_thread(os.open, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        start, end = _range_of(request, size)
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(end - start)}
        if request.headers.get("Range"):
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        response = web.StreamResponse(status=206 if request.headers.get("Range") else 200, headers=headers)
        await response.prepare(request)
        while start < end:
            content = await in_thread(os.pread, descriptor, min(READ_BYTES, end - start), start)
            if not content:
                break  # it was truncated meanwhile; the reader sees that bytes are missing
            await response.write(content)
            start += len(content)
        return response
    finally:
        os.close(descriptor)


def _range_of(request: web.BaseRequest, size: int) -> tuple[int, int]:
    """The bytes [start, end) that are asked for."""
    given = request.headers.get("Range", "")
    if not given:
        return 0, size
    found = _RANGE.fullmatch(given)
    start = int(found[1]) if found is not None else size
    end = min(size, int(found[2]) + 1) if found is not None and found[2] else size
    if start >= end:
        raise RefusedRequest(416, "cannot read this range\n", {"Content-Range": f"bytes */{size}"})
    return start, end
