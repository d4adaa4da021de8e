"""Routes that hand out this program: `/join.sh`, and the files that the script fetches.

They are public, because a machine that joins has no credential yet: nothing of the cluster is in them. The wheel is
made once, off the event loop, from the files of the installed package; it is sent in pieces, so that a slow reader
holds one piece and not a copy of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from enginehouse.core.errors import NotFound
from enginehouse.core.name import shown
from enginehouse.host.program import Program, pinned_pip, read_program

PIECE_BYTES = 256 * 1024
_HEADERS = {"x-content-type-options": "nosniff", "cache-control": "no-cache"}
FetchPip = Callable[[], Awaitable[bytes]]


class ProgramRoutes:
    def __init__(self, fetch_pip: FetchPip) -> None:
        """`fetch_pip` returns the pinned wheel of pip, for machines whose Python has none."""
        self._fetch_pip = fetch_pip
        self._program: Program | None = None
        self._pip: bytes = b""
        self._making = asyncio.Lock()

    async def script(self, request: Request) -> Response:
        program = await self._made()
        return _answer(request, program.script, program.script_sha256, "text/x-shellscript; charset=utf-8")

    async def file(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        program = await self._made()
        if name == program.wheel_name:
            return _answer(request, program.wheel, program.wheel_sha256, "application/octet-stream")
        if name == pinned_pip().file_name:
            async with self._making:
                self._pip = self._pip or await self._fetch_pip()
            digest = hashlib.sha256(self._pip).hexdigest()
            return _answer(request, self._pip, digest, "application/octet-stream")
        raise NotFound(f"cannot find {shown(name)}: this server hands out {program.wheel_name}; fetch /join.sh again")

    async def _made(self) -> Program:
        async with self._making:
            if self._program is None:
                self._program = await asyncio.to_thread(read_program)
        return self._program


def _answer(request: Request, content: bytes, sha256: str, media_type: str) -> Response:
    etag = f'"{sha256}"'
    headers = {**_HEADERS, "etag": etag, "content-length": str(len(content))}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={**_HEADERS, "etag": etag})
    return StreamingResponse(_pieces(content), media_type=media_type, headers=headers)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]
