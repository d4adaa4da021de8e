"""The inference routes with everything real but the engine's words: one ASGI client, a router from a list, a scripted
upstream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from enginehouse.api.openai import Finished, OpenAI
from enginehouse.core.errors import EnginehouseError, NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.routing import Route
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.frontend.fleet.tokens import Caller

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHAT = b'{"model":"tiny","messages":[],"temperature":0.10}'
EVENTS = b'data: {"model":"tiny","choices":[]}\n\ndata: [DONE]\n\n'


class Routing:
    """Routes from a list, in turn; counts what is held as the real one does."""

    def __init__(self, *routes: Route) -> None:
        self.routes = list(routes)
        self.held = 0
        self.acquired = 0
        self.dropped: list[Route] = []
        self.error: EnginehouseError | None = None

    async def acquire(self, model: str, token: str = "", body: bytes = b"") -> Route:
        if self.error is not None:
            raise self.error
        left = [route for route in self.routes if route.model == model and route not in self.dropped]
        if not left:
            raise NotFound(f"cannot find the model {model}", code="model_not_found", param="model")
        self.held += 1
        self.acquired += 1
        return left[0]

    def release(self, route: Route) -> None:
        self.held -= 1

    def drop(self, route: Route) -> None:
        self.dropped.append(route)


class Seen:
    def __init__(self) -> None:
        self.requests: list[dict[str, object]] = []

    def admit(self, caller: Caller, model: str, headers: list[tuple[bytes, bytes]]) -> None:
        raise AssertionError("no caller of these tests is limited")

    def request_done(self, done: Finished) -> None:
        self.requests.append(msgspec.structs.asdict(done))


class Client:
    """One request as ASGI: `receive` gives the body and then waits until the client leaves."""

    def __init__(self, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.scope: MutableMapping[str, Any] = {"type": "http", "headers": headers or []}
        self.messages: list[MutableMapping[str, Any]] = [{"type": "http.request", "body": body}]
        self.sent: list[MutableMapping[str, Any]] = []
        self.left = asyncio.Event()
        self.got_bytes = asyncio.Event()

    async def receive(self) -> MutableMapping[str, Any]:
        if self.messages:
            return self.messages.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)
        if message.get("body"):
            self.got_bytes.set()

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    @property
    def is_ended(self) -> bool:
        return bool(self.sent) and not self.sent[-1].get("more_body", False) and "body" in self.sent[-1]

    @property
    def error(self) -> dict[str, object]:
        error: dict[str, object] = json.loads(self.body)["error"]
        return error


class World:
    def __init__(self, *ports: int) -> None:
        self.requests: list[bytes] = []
        self.routing = Routing(
            *(
                Route(
                    model="tiny",
                    slot=number,
                    node_id=NodeId(f"n-{number}"),
                    node_name=f"node-{number}",
                    address=f"127.0.0.1:{port}",
                    key="key",
                    revision="r",
                    nonce="x",
                )
                for number, port in enumerate(ports)
            )
        )
        self.engine = HttpEngine()
        self.seen = Seen()
        self.api = OpenAI(self.routing, self.engine, self.seen, head_seconds=5)

    async def ask(self, client: Client) -> Client:
        await self.api.at("/v1/chat/completions")(client.scope, client.receive, client.send)
        assert self.routing.held == 0
        assert len(self.seen.requests) == 1
        return client


@asynccontextmanager
async def serving(script: Script, *, before: tuple[int, ...] = ()) -> AsyncIterator[World]:
    world: World | None = None

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                assert world is not None
                world.requests.append(head + await reader.readexactly(length))
                await script(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    world = World(*before, server.sockets[0].getsockname()[1])
    try:
        yield world
    finally:
        await world.engine.close()
        server.close()
        await server.wait_closed()


def answering(raw: bytes, *, closes: bool = False) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        await writer.drain()
        if closes:
            raise ConnectionError

    return script


def plain(body: bytes, status: str = "200 OK", kind: str = "application/json; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 {status}\r\nServer: llama.cpp\r\nSet-Cookie: a=b\r\nContent-Type: {kind}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def stream(*chunks: bytes, ends: bool = True) -> bytes:
    raw = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return raw + b"0\r\n\r\n" if ends else raw
