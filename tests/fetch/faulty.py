"""A server between us and a registry that has misfortunes on request, and remembers what it was asked and sent.

    async with faulty(registry.address) as proxy:
        proxy.plan(Cut(after_bytes=1000), path=layer.digest, times=1)
        ... fetch from proxy.address ...
        assert proxy.bytes_sent(layer.digest) < size + 1000

Without an upstream it serves only `files` (path → bytes, with ranges and an ETag), which makes it an archive server,
a token server or a canary. `ask_for_tokens` puts a bearer challenge in front of everything under /v2/.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import assert_never
from urllib.parse import parse_qs, urlsplit

from tests.fetch.exchange import Connection, Reply, Request, from_upstream, range_of, served_file
from tests.fetch.faults import (
    Answer,
    Cut,
    Drop,
    Extra,
    Fault,
    Flip,
    Hang,
    Header,
    IgnoreRange,
    Redirect,
    Short,
    Stall,
    WrongLength,
    WrongRange,
)
from tests.fetch.real_registry import basic


@dataclass
class _Planned:
    fault: Fault
    path: str
    method: str
    times: int | None
    after: int


@dataclass
class Tokens:
    """Bearer tokens: `realm` is where clients are sent for them; "" means this server's own /token."""

    realm: str = ""
    service: str = "tests"
    user: str = ""
    password: str = ""
    identity_token: str = ""
    lifetime_seconds: int | None = 300
    valid: set[str] = field(default_factory=set)
    given: int = 0


class Faulty:
    """One listening server. `requests` has every request so far, with the bytes of the body that were sent."""

    def __init__(self, upstream: str) -> None:
        self.address = ""
        self.upstream = upstream
        self.files: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.connections = 0
        self.bytes_per_second: float | None = None
        self.on_request: Callable[[Request], None] | None = None
        self.tokens: Tokens | None = None
        self._planned: list[_Planned] = []
        self._closing = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def reference(self, name: str) -> str:
        return f"{self.address}/{name}"

    def plan(self, fault: Fault, *, path: str = "", method: str = "", times: int | None = 1, after: int = 0) -> None:
        """`fault` for the next `times` requests (None: all) whose path contains `path`, sparing the first `after`."""
        self._planned.append(_Planned(fault, path, method, times, after))

    def forget_plans(self) -> None:
        self._planned.clear()

    def ask_for_tokens(self, tokens: Tokens | None = None) -> Tokens:
        self.tokens = tokens or Tokens()
        return self.tokens

    def bytes_sent(self, digest: str = "") -> int:
        """Bytes of bodies sent for paths that contain `digest`, broken transfers included."""
        return sum(request.sent_bytes for request in self.requests if digest in request.path)

    def asked(self, path: str, method: str = "") -> list[Request]:
        return [request for request in self.requests if path in request.path and method in request.method]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open.add(writer)
        connection = Connection(reader, writer, self._closing, lambda: self.bytes_per_second)
        try:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                while request := await connection.read_request():
                    self.requests.append(request)
                    if self.on_request is not None:
                        self.on_request(request)
                    try:
                        if not await self._answer(connection, request):
                            break
                    finally:
                        request.is_over = True
        finally:
            self._open.discard(writer)
            writer.close()

    async def close(self) -> None:
        self._closing.set()
        for writer in list(self._open):
            writer.transport.abort()

    async def _answer(self, connection: Connection, request: Request) -> bool:
        faults = self._due(request)
        for fault in faults:
            if isinstance(fault, Drop):
                return False
            if isinstance(fault, Hang):
                await self._closing.wait()
                return False
        reply = _instead(faults, request) or self._token_reply(request)
        if reply is None:
            ignores = any(isinstance(fault, IgnoreRange) for fault in faults)
            shift = sum(fault.shift_bytes for fault in faults if isinstance(fault, WrongRange))
            reply = await self._true_reply(request, None if ignores else range_of(request, shift))
        async with reply:
            return await connection.send(request, _spoilt(reply, faults, request))

    def _due(self, request: Request) -> list[Fault]:
        found: list[Fault] = []
        for planned in list(self._planned):
            if planned.path not in request.path or planned.method not in request.method:
                continue
            if planned.after:
                planned.after -= 1
                continue
            found.append(planned.fault)
            if planned.times is not None:
                planned.times -= 1
                if planned.times == 0:
                    self._planned.remove(planned)
        return found

    async def _true_reply(self, request: Request, wanted: str | None) -> Reply:
        path = urlsplit(request.path).path
        if path in self.files:
            return served_file(self.files[path], request, wanted)
        if not self.upstream:
            return Reply.of(404, b"not here")
        return await from_upstream(self.upstream, request, wanted)

    def _token_reply(self, request: Request) -> Reply | None:
        if self.tokens is None:
            return None
        asked = urlsplit(request.path)
        if asked.path == "/token":
            return self._give_token(self.tokens, request, parse_qs(asked.query or request.body.decode()))
        presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not asked.path.startswith("/v2/") or presented in self.tokens.valid:
            return None
        realm = self.tokens.realm or f"{self.url}/token"
        repository = asked.path.removeprefix("/v2/").partition("/manifests/")[0].partition("/blobs/")[0]
        challenge = f'Bearer realm="{realm}",service="{self.tokens.service}",scope="repository:{repository}:pull"'
        return Reply.of(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"www-authenticate": challenge})

    def _give_token(self, tokens: Tokens, request: Request, asked: dict[str, list[str]]) -> Reply:
        if tokens.user and request.headers.get("authorization", "") != basic(tokens.user, tokens.password):
            return Reply.of(401, b"wrong")
        if tokens.identity_token and asked.get("refresh_token") != [tokens.identity_token]:
            return Reply.of(401, b"wrong")
        tokens.given += 1
        token = f"token-{tokens.given}-{asked.get('scope', [''])[0]}"
        tokens.valid.add(token)
        document: dict[str, object] = {"token": token}
        if tokens.lifetime_seconds is not None:
            document["expires_in"] = tokens.lifetime_seconds
        return Reply.of(200, json.dumps(document).encode(), {"content-type": "application/json"})


def _instead(faults: list[Fault], request: Request) -> Reply | None:
    for fault in faults:
        if isinstance(fault, Answer):
            return Reply.of(fault.status, fault.body, dict(fault.headers))
        if isinstance(fault, Redirect):
            target = fault.to if urlsplit(fault.to).path else fault.to + request.path
            return Reply.of(fault.status, b"", {"location": target})
    return None


def _spoilt(reply: Reply, faults: list[Fault], request: Request) -> Reply:
    for fault in faults:
        match fault:
            case Cut():
                reply.cut_after = fault.after_bytes
            case Stall():
                reply.stall_after = fault.after_bytes
            case Flip():
                reply.flip_at = fault.at_byte - reply.start_byte
            case Short():
                reply.length -= fault.missing_bytes
                reply.announced = reply.length
            case Extra():
                reply.added = b"x" * fault.added_bytes
                reply.announced = reply.length + fault.added_bytes
            case WrongLength():
                reply.announced = reply.length + fault.difference_bytes
            case Header():
                reply.headers[fault.name.lower()] = fault.value
            case Answer() | Redirect() | IgnoreRange() | WrongRange() | Hang() | Drop():
                pass
            case _:
                assert_never(fault)
    return reply


@asynccontextmanager
async def faulty(upstream: str = "") -> AsyncIterator[Faulty]:
    """A faulty server in front of `upstream` (host:port), on a free port of loopback."""
    world = Faulty(upstream)
    server = await asyncio.start_server(world.accept, "127.0.0.1", 0, limit=1024 * 1024)
    world.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield world
    finally:
        server.close()
        await world.close()
        await server.wait_closed()
