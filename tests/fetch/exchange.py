"""HTTP as the faulty server speaks it: one request, one reply whose body can be spoilt on its way out."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

_CHUNK_BYTES = 256 * 1024
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_KEPT = ("content-type", "docker-content-digest", "content-range", "etag", "location", "www-authenticate")


@dataclass
class Request:
    """A request as it came in; `status` and `sent_bytes` are filled in while it is answered, and `is_over` when no more
    is sent: that was all, or the connection is gone.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    sent_bytes: int = 0
    is_over: bool = False


@dataclass
class Reply:
    """A true answer and what is to go wrong with it. `length` bytes come from `source`, `announced` are promised."""

    status: int
    headers: dict[str, str]
    length: int
    announced: int
    source: asyncio.StreamReader | bytes = b""
    start_byte: int = 0
    cut_after: int | None = None
    stall_after: int | None = None
    flip_at: int | None = None
    added: bytes = b""
    writer: asyncio.StreamWriter | None = field(default=None)

    @classmethod
    def of(cls, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Reply:
        return cls(status, {k.lower(): v for k, v in (headers or {}).items()}, len(body), len(body), body)

    async def pieces(self) -> AsyncIterator[bytes]:
        left, position = self.length, 0
        while left > 0:
            if isinstance(self.source, bytes):
                piece = self.source[position : position + min(left, _CHUNK_BYTES)]
            else:
                piece = await self.source.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise ConnectionResetError("the upstream ended early")
            flip = -1 if self.flip_at is None else self.flip_at - position
            if 0 <= flip < len(piece):
                piece = piece[:flip] + bytes([piece[flip] ^ 1]) + piece[flip + 1 :]
            position += len(piece)
            left -= len(piece)
            yield piece
        if self.added:
            yield self.added

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.writer is not None:
            self.writer.close()


class Connection:
    """One client's connection: requests one after the other."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        closing: asyncio.Event,
        rate: Callable[[], float | None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._closing = closing
        self._rate = rate

    async def read_request(self) -> Request | None:
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, path, _ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        return Request(method, path, headers, await self._reader.readexactly(int(headers.get("content-length", "0"))))

    async def send(self, request: Request, reply: Reply) -> bool:
        """Whether the connection can carry another request afterwards."""
        headers = {"content-length": str(reply.announced)} | reply.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value)
        request.status = reply.status
        self._writer.write(f"HTTP/1.1 {reply.status} x\r\n{lines}\r\n".encode("latin-1"))
        await self._writer.drain()
        if request.method == "HEAD":
            return True
        async for piece in reply.pieces():
            limit = reply.stall_after if reply.stall_after is not None else reply.cut_after
            allowed = piece if limit is None else piece[: limit - request.sent_bytes]
            await self._write(request, allowed)
            if limit is not None and request.sent_bytes >= limit:
                if reply.stall_after is not None:
                    await self._closing.wait()
                return False
        return reply.announced == reply.length + len(reply.added)

    async def _write(self, request: Request, piece: bytes) -> None:
        rate = self._rate()
        step = len(piece) if rate is None else max(1, int(rate / 50))
        for start in range(0, len(piece), step or 1):
            part = piece[start : start + step]
            self._writer.write(part)
            request.sent_bytes += len(part)
            await self._writer.drain()
            if rate is not None:
                await asyncio.sleep(len(part) / rate)


def range_of(request: Request, shift_bytes: int = 0) -> str | None:
    """The request's Range header, moved by so many bytes."""
    wanted = request.headers.get("range")
    found = _RANGE.fullmatch(wanted or "")
    if not found or not shift_bytes:
        return wanted
    end = str(int(found[2]) + shift_bytes) if found[2] else ""
    return f"bytes={int(found[1]) + shift_bytes}-{end}"


def served_file(content: bytes, request: Request, wanted: str | None) -> Reply:
    """A file as a plain web server gives it: ETag, If-None-Match, Range, If-Range."""
    tag = '"' + hashlib.sha256(content).hexdigest()[:16] + '"'
    headers = {"etag": tag, "accept-ranges": "bytes"}
    if request.headers.get("if-none-match") == tag:
        return Reply.of(304, b"", headers)
    found = _RANGE.fullmatch(wanted or "")
    if not found or request.headers.get("if-range", tag) != tag:
        return Reply.of(200, content, headers)
    start = int(found[1])
    end = min(int(found[2]) + 1 if found[2] else len(content), len(content))
    if start >= len(content):
        return Reply.of(416, b"", {"content-range": f"bytes */{len(content)}"})
    reply = Reply.of(206, content[start:end], headers | {"content-range": f"bytes {start}-{end - 1}/{len(content)}"})
    reply.start_byte = start
    return reply


async def from_upstream(address: str, request: Request, wanted: str | None) -> Reply:
    """The upstream's answer to the same request, its body still to be read."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024 * 1024)
    passed = {"host": address, "connection": "close"}
    passed |= {name: request.headers[name] for name in ("accept", "authorization") if name in request.headers}
    if wanted:
        passed["range"] = wanted
    lines = "".join(f"{name}: {value}\r\n" for name, value in passed.items())
    writer.write(f"{request.method} {request.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1"))
    await writer.drain()
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest if line)}
    length = int(headers.get("content-length", "0"))
    kept = {name: headers[name] for name in _KEPT if name in headers}
    start = re.match(r"bytes (\d+)-", headers.get("content-range", ""))
    return Reply(
        status=int(first.split(" ")[1]),
        headers=kept,
        length=0 if request.method == "HEAD" else length,
        announced=length,
        source=reader,
        start_byte=int(start[1]) if start else 0,
        writer=writer,
    )
