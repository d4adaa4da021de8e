"""The file server of LocalAI's workers: what is there of a file, and PUT of its bytes in ranges.

The address is a node's, not a user's, so the rules for outbound addresses do not apply: callers pass addresses of
approved nodes only. Redirects are not followed, and no proxy is used, because each request carries the worker's token.
Bodies are streamed. A server that takes no byte for a while is given up; one that has all bytes may hash them first.
The library is imported with the first request: that takes a sixth of a frontend's start, and few clusters have such
workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable, Upstream

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

CONNECT_SECONDS = 30.0  # LocalAI's
STALL_SECONDS = 60.0
# LocalAI's workers hash a whole file before they answer; the slowest disk that is worth waiting for.
HASHED_BYTES_PER_SECOND = 20_000_000.0
LOG_SECONDS = 5.0
MAX_TEXT_BYTES = 4096
MAX_LOG_BYTES = 4 * 1024 * 1024


class WorkerPlace(Struct, frozen=True, kw_only=True):
    """The HTTP server of one worker. `token` is the worker's registration token."""

    name: str  # of the node, for messages
    address: str
    token: str

    def __repr__(self) -> str:
        return f"WorkerPlace({self.name!r}, {self.address!r})"


class RemoteFile(Struct, frozen=True, kw_only=True):
    """What a worker has of a file. `target` is the digest that the file will have, while it is not whole."""

    size_bytes: int
    path: str
    sha256: str = ""
    target: str = ""


class SentPart(Struct, frozen=True, kw_only=True):
    """The bytes [start, end) of `total`, and the digest of the whole file; "" if it is not known."""

    start: int
    end: int
    total: int
    sha256: str = ""
    has_range: bool = True  # otherwise the server replaces what it has of the file


class PutAnswer(Struct, frozen=True, kw_only=True):
    status: int
    text: str = ""
    path: str = ""  # after the last byte


class _Stored(Struct):
    local_path: str = ""


class _LogLine(Struct):
    text: str = ""


class WorkerFileServers:
    """Owns the connections and must be closed."""

    def __init__(self, *, stall_seconds: float = STALL_SECONDS) -> None:
        self._stall_seconds = stall_seconds
        self._session: aiohttp.ClientSession | None = None

    async def head(self, place: WorkerPlace, key: str, size_bytes: int) -> RemoteFile | None:
        """What the worker has of a file; None if it has nothing. `size_bytes` is what it may have to hash first."""
        try:
            async with asyncio.timeout(self._hashing_seconds(size_bytes)):
                async with self._opened().head(
                    _url(place, f"files/{key}"), headers=_bearer(place), allow_redirects=False
                ) as answer:
                    if answer.status == 404:
                        return None
                    if answer.status != 200:
                        raise refusal(place, PutAnswer(status=answer.status))
                    size = answer.headers.get("X-File-Size", answer.headers.get("Content-Length", ""))
                    return RemoteFile(
                        size_bytes=int(size) if size.isdecimal() else 0,
                        path=answer.headers.get("X-Local-Path", ""),
                        sha256=answer.headers.get("X-Content-SHA256", ""),
                        target=answer.headers.get("X-Target-SHA256", ""),
                    )
        except _failures() as error:
            raise _unreachable(place, error) from error

    async def put(self, place: WorkerPlace, key: str, part: SentPart, body: AsyncIterator[bytes]) -> PutAnswer:
        """Send a part and return the answer, whatever its status. An error of `body` is raised as it is."""
        headers = _bearer(place) | {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(part.end - part.start),
            **({"Content-Range": f"bytes {part.start}-{part.end - 1}/{part.total}"} if part.has_range else {}),
            **({"X-Content-SHA256": part.sha256} if part.sha256 else {}),
        }
        failures: list[EnginehouseError] = []
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._stall_seconds) as limit:

                async def watched() -> AsyncIterator[bytes]:
                    try:
                        async for piece in body:
                            limit.reschedule(loop.time() + self._stall_seconds)
                            yield piece
                    except EnginehouseError as error:
                        failures.append(error)
                        raise
                    # The worker has all bytes and may hash the file before it answers.
                    limit.reschedule(loop.time() + self._hashing_seconds(part.total))

                async with self._opened().put(
                    _url(place, f"files/{key}"), headers=headers, data=watched(), allow_redirects=False
                ) as answer:
                    text = (await answer.content.read(MAX_TEXT_BYTES)).decode("utf-8", "replace").strip()
                    return PutAnswer(status=answer.status, text=text, path=_path_in(text, answer.status))
        except _failures() as error:
            raise failures[0] if failures else _unreachable(place, error) from error

    async def last_lines(self, place: WorkerPlace, process_key: str, count: int) -> list[str]:
        """The last lines that an engine logged; [] if they cannot be read."""
        url = _url(place, f"backend-logs/{quote(process_key, safe='')}")
        try:
            async with asyncio.timeout(LOG_SECONDS):
                async with self._opened().get(url, headers=_bearer(place), allow_redirects=False) as answer:
                    body = await answer.content.read(MAX_LOG_BYTES) if answer.status == 200 else b"[]"
            return [line.text for line in msgspec.json.decode(body, type=list[_LogLine])[-count:]]
        except msgspec.DecodeError:
            return []
        except _failures():
            return []

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _hashing_seconds(self, size_bytes: int) -> float:
        return self._stall_seconds + size_bytes / HASHED_BYTES_PER_SECOND

    def _opened(self) -> aiohttp.ClientSession:
        """The session. Created at the first request, because it is bound to the running event loop."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def file_key(directory: str, name: str) -> str:
    """The key of a model's file, escaped as a path of a URL: the server decodes it once."""
    return f"models/{quote(directory, safe='')}/{quote(name, safe='/')}"


def refusal(place: WorkerPlace, answer: PutAnswer) -> EnginehouseError:
    """The error for an answer that is neither a success nor a reason to continue elsewhere in the file."""
    if answer.status in (401, 403):
        return Hopeless(
            f"cannot place files on {place.name}: its worker refuses the token that it registered with; start the "
            "worker with the token of this cluster (LOCALAI_REGISTRATION_TOKEN)",
            code="unauthenticated",
        )
    if answer.status == 507 or "no space left" in answer.text:
        return Unavailable(
            f"cannot place files on {place.name}: its disk is full; make room there, it is retried automatically",
            code="insufficient_disk",
        )
    said = f": {answer.text[:200]}" if answer.text else ""
    return Upstream(f"cannot place files on {place.name}: its worker answered with status {answer.status}{said}")


def _failures() -> tuple[type[Exception], ...]:
    import aiohttp

    return aiohttp.ClientError, TimeoutError, OSError


def _url(place: WorkerPlace, path: str) -> URL:
    from yarl import URL

    return URL(f"http://{place.address}/v1/{path}", encoded=True)


def _bearer(place: WorkerPlace) -> dict[str, str]:
    return {"Authorization": f"Bearer {place.token}"}


def _path_in(text: str, status: int) -> str:
    try:
        return msgspec.json.decode(text.encode(), type=_Stored).local_path if status == 200 else ""
    except msgspec.DecodeError:
        return ""


def _unreachable(place: WorkerPlace, error: Exception) -> Upstream:
    if isinstance(error, TimeoutError):
        return Upstream(
            f"cannot place files on {place.name}: its file server at {place.address} stalls; check the network",
            code="stalled",
        )
    return Upstream(
        f"cannot place files on {place.name}: its file server at {place.address} cannot be reached or cut off the "
        "connection; check that its HTTP port is open",
        code="node_unreachable",
    )
