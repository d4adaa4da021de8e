"""PUT and HEAD of files, as LocalAI's frontends send them: whole, or in ranges that go on where the last one ended.

The statuses and headers are LocalAI's. Unlike there, a whole upload is written beside the old file and renamed, so a
file that an engine has mapped is never truncated, and two uploads of one file never mix.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

from aiohttp import web
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, NotFound
from enginehouse.core.progress import format_bytes
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.http_server import storage
from enginehouse.worker.http_server.storage import Incoming, Roots
from enginehouse.worker.locks import Locks

MAX_BODY_BYTES = 50 * 1024**3  # LocalAI's limit, per request
WRITE_BYTES = 1024 * 1024
STALL_SECONDS = 120.0  # without a byte
WAIT_SECONDS = 10.0  # for another upload of the same file
_CONTENT_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


class ReceivedRange(Struct, frozen=True):
    start: int
    end: int  # the last byte
    total: int


class RefusedRequest(Exception):
    """An answer that is not a success."""

    def __init__(self, status: int, text: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.answer = plain(status, text, headers)


def plain(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=text, content_type="text/plain", charset="utf-8", headers=headers)


class FileUploads:
    def __init__(self, roots: Roots) -> None:
        self._roots = roots
        self._locks = Locks()

    async def head(self, path: Path) -> web.Response:
        try:
            state = await in_thread(storage.state_of, path)
        except NotFound:
            return plain(404, "not found\n")
        except EnginehouseError:
            return plain(400, "is a directory\n")
        digest = {"X-Target-Sha256": state.target} if state.target else {"X-Content-Sha256": state.sha256}
        size = str(state.size_bytes)
        headers = {"Accept-Ranges": "bytes", "Content-Length": size, "X-File-Size": size, "X-Local-Path": str(path)}
        return web.Response(headers={**headers, **digest})

    async def put(self, request: web.BaseRequest, key: str, path: Path) -> web.Response:
        declared = request.headers.get("X-Content-SHA256", "").strip().lower()
        part = _range_of(request)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    await held.enter_async_context(self._locks.hold(str(path)))
            except TimeoutError:
                # What a LocalAI frontend takes as a reason to look again and go on later.
                raise _wrong_start(part, await in_thread(storage.size_of, path)) from None
            try:
                await in_thread(storage.make_parents, self._roots, key, path)
                if await in_thread(path.is_dir):
                    raise RefusedRequest(400, "is a directory\n")
                await self._check_room(request, path, part)
                if part is None:
                    return await self._take_whole(request, path, declared)
                return await self._take_part(request, path, declared, part)
            except OSError as error:
                raise RefusedRequest(500, f"{disk.storage_error(error, 'store the file').message}\n") from error

    async def _check_room(self, request: web.BaseRequest, path: Path, part: ReceivedRange | None) -> None:
        coming = part.total - part.start if part is not None else request.content_length or 0
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise RefusedRequest(413, f"send more than {format_bytes(MAX_BODY_BYTES)} in ranges\n")
        free = await in_thread(disk.free_bytes, path.parent)
        if coming > free:
            text = f"the file needs {format_bytes(coming)}, {format_bytes(free)} are free on this disk\n"
            raise RefusedRequest(507, text)

    async def _take_whole(self, request: web.BaseRequest, path: Path, declared: str) -> web.Response:
        incoming = await in_thread(Incoming, path, is_appended=False)
        is_kept = False
        try:
            size = await self._copy(request, incoming, MAX_BODY_BYTES)
            if request.content_length is not None and size != request.content_length:
                raise RefusedRequest(400, "the upload was cut off\n")
            digest = incoming.digest()
            if declared and digest != declared:
                raise _mismatch(declared, digest)
            is_kept = True
        finally:
            await in_thread(incoming.close, is_kept=is_kept)
        await in_thread(incoming.place, digest)
        return web.json_response({"local_path": str(path)})

    async def _take_part(
        self, request: web.BaseRequest, path: Path, declared: str, part: ReceivedRange
    ) -> web.Response:
        await in_thread(_prepare, path, declared, part)
        if part.start != (current := await in_thread(storage.size_of, path)):
            raise _wrong_start(part, current)
        expected = part.end - part.start + 1
        if (request.content_length or 0) > expected:
            raise RefusedRequest(400, f"the body has more than the {expected} bytes of its range\n")
        if declared:
            await in_thread(storage.write_sidecar, path, storage.TARGET, declared)
        incoming = await in_thread(Incoming, path, is_appended=True)
        try:
            size = await self._copy(request, incoming, expected)
        finally:
            await in_thread(incoming.close, is_kept=True)
        if size != expected:
            raise RefusedRequest(400, f"the upload was cut off: {size} of {expected} bytes\n")
        if part.end + 1 < part.total:
            headers = {"Range": f"bytes=0-{part.end}", "X-File-Size": str(part.end + 1)}
            return web.Response(status=308, headers=headers)
        digest = await in_thread(incoming.digest)
        if declared and digest != declared:
            await in_thread(storage.forget, path)
            raise _mismatch(declared, digest)
        await in_thread(incoming.place, digest)
        return web.json_response({"local_path": str(path)})

    async def _copy(self, request: web.BaseRequest, incoming: Incoming, limit_bytes: int) -> int:
        """Copy the body, at most `limit_bytes`; returns how much came. A connection that is cut off ends it."""
        size, gathered = 0, bytearray()
        try:
            while True:
                async with asyncio.timeout(STALL_SECONDS):
                    piece = await request.content.readany()
                if not piece or size + len(gathered) + len(piece) > limit_bytes:
                    break
                gathered += piece
                if len(gathered) >= WRITE_BYTES:
                    await in_thread(incoming.write, bytes(gathered))
                    size, gathered = size + len(gathered), bytearray()
        except (TimeoutError, ConnectionError, web.RequestPayloadError):
            pass  # the caller sees that bytes are missing; those that came are kept
        finally:
            if gathered:
                await in_thread(incoming.write, bytes(gathered))
        return size + len(gathered)


def _prepare(path: Path, declared: str, part: ReceivedRange) -> None:
    """Decide whether the bytes that are there belong to this upload. Blocks."""
    target, whole = storage.read_sidecar(path, storage.TARGET), storage.read_sidecar(path, storage.DIGEST)
    if part.start == 0:
        if not declared or declared not in (target, whole):
            storage.forget(path)
    elif target and target != declared:
        storage.forget(path)
        raise RefusedRequest(
            409,
            f"X-Content-SHA256 mismatch with in-progress upload (was {target}, now {declared}); restart from byte 0\n",
        )


def _range_of(request: web.BaseRequest) -> ReceivedRange | None:
    given = request.headers.get("Content-Range", "")
    if not given:
        return None
    if not given.startswith("bytes "):
        raise RefusedRequest(400, 'invalid Content-Range: missing "bytes" prefix\n')
    found = _CONTENT_RANGE.fullmatch(given.removeprefix("bytes "))
    if found is None:
        raise RefusedRequest(400, "invalid Content-Range: write bytes START-END/TOTAL with three numbers\n")
    part = ReceivedRange(*map(int, found.groups()))
    if part.end < part.start or part.total < part.end + 1:
        raise RefusedRequest(400, "invalid Content-Range: its numbers contradict each other\n")
    return part


def _wrong_start(part: ReceivedRange | None, current: int) -> RefusedRequest:
    start, total = (part.start, str(part.total)) if part is not None else (0, "*")
    return RefusedRequest(
        416,
        f"Content-Range start {start} does not match current file size {current}\n",
        {"Content-Range": f"bytes */{total}", "X-File-Size": str(current)},
    )


def _mismatch(expected: str, got: str) -> RefusedRequest:
    return RefusedRequest(400, f"sha256 mismatch: expected {expected} got {got}\n")
