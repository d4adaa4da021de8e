"""Files that a frontend holds, read by workers in ranges: an origin of bytes like a web server.

The frontends of a cluster are equal, but an upload lies on the one that received it, so each is asked. The node's own
token is presented. Reads block in threads; each has a limit.
"""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import AsyncIterator, Callable, Sequence

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable, Upstream
from enginehouse.link.client import FrontendClient

READ_BYTES = 1024 * 1024
SILENCE_SECONDS = 60.0

_Opened = tuple[http.client.HTTPConnection, http.client.HTTPResponse]


class FrontendUploads:
    """The frontends that this worker knows, and the token that it presents."""

    def __init__(self, clients: Sequence[FrontendClient], token: Callable[[], str]) -> None:
        self._clients = clients
        self._token = token

    async def size_of(self, sha256: str) -> int:
        refusal: EnginehouseError = _absent(sha256)
        for client in self._clients:
            try:
                return await asyncio.to_thread(self._size, client, sha256)
            except (Unavailable, NotFound) as error:
                # An unreachable frontend may have it: that is worth a retry, an absence is not.
                refusal = error if isinstance(error, Unavailable) or isinstance(refusal, NotFound) else refusal
        raise refusal

    async def read(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yield bytes [start, end). Raises `Upstream` when the transfer is cut off."""
        connection, response = await self._open(sha256, start, end)
        left = end - start
        try:
            while left:
                try:
                    piece = await asyncio.to_thread(response.read, min(READ_BYTES, left))
                except (OSError, http.client.HTTPException, ValueError) as error:
                    raise Upstream(f"cannot read the upload {sha256[:12]}…: the connection was cut off") from error
                if not piece:
                    raise Upstream(f"cannot read the upload {sha256[:12]}…: {left} bytes are missing")
                left -= len(piece)
                yield piece
        finally:
            response.close()
            connection.close()

    async def _open(self, sha256: str, start: int, end: int) -> _Opened:
        refusal: EnginehouseError = _absent(sha256)
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        for client in self._clients:
            try:
                connection, response = await self._got(client, sha256, wanted)
            except (Unavailable, NotFound) as error:
                refusal = error if isinstance(error, Unavailable) or isinstance(refusal, NotFound) else refusal
                continue
            if response.status == 206 or (response.status == 200 and start == 0):
                return connection, response
            connection.close()
        raise Upstream(refusal.message) if isinstance(refusal, Unavailable) else refusal

    async def _got(self, client: FrontendClient, sha256: str, headers: dict[str, str]) -> _Opened:
        opening = asyncio.get_running_loop().run_in_executor(None, self._get, client, sha256, headers)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)  # the thread goes on
            raise

    def _get(self, client: FrontendClient, sha256: str, headers: dict[str, str]) -> _Opened:
        return client.open(f"/api/uploads/{sha256}", headers, token=self._token(), timeout_seconds=SILENCE_SECONDS)

    def _size(self, client: FrontendClient, sha256: str) -> int:
        connection, response = self._get(client, sha256, {"Range": "bytes=0-0"})
        try:
            total = (response.headers.get("Content-Range") or "").rpartition("/")[2]
            length = total if response.status == 206 else response.headers.get("Content-Length") or ""
            if not length.isdecimal():
                raise Unavailable(f"cannot read the upload {sha256[:12]}…: {client.url} does not report its size")
            return int(length)
        finally:
            connection.close()


class UploadOrigin:
    """One upload as an origin of a blob."""

    def __init__(self, uploads: FrontendUploads, sha256: str) -> None:
        self.uri = f"upload:{sha256}"
        self.supports_ranges = True
        self._uploads = uploads
        self._sha256 = sha256

    async def size(self) -> int:
        return await self._uploads.size_of(self._sha256)

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        stop = layer.size_bytes if end is None else min(end, layer.size_bytes)
        if start < stop:
            async for piece in self._uploads.read(self._sha256, start, stop):
                yield piece


def _close_opened(opening: asyncio.Future[_Opened]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        connection, response = opening.result()
        response.close()
        connection.close()


def _absent(sha256: str) -> NotFound:
    return NotFound(
        f"cannot find the upload {sha256[:12]}… on any frontend that this worker knows; upload the file again, and "
        "give the worker the addresses of all frontends with --url"
    )
