"""`ports.Engine` for engines that speak OpenAI's HTTP API themselves (llama-server, xllamacpp, vLLM, SGLang).

A small client that passes bytes without parsing them. It must not send a request twice once the engine may have started
on it: only a kept connection that was closed before the first byte of a response is replaced, once. Closing a response
early aborts the connection, because that is the only way to tell an engine to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

from enginehouse.core.errors import EnginehouseError, Invalid, Upstream
from enginehouse.engine.dialing import dial
from enginehouse.engine.openai.connection import Connection
from enginehouse.ports import EngineCall, EngineResponse, EngineTarget, Headers

# Engines close an idle connection after 5 s (cpp-httplib, uvicorn). Close first, or requests race with that.
IDLE_SECONDS = 3.0
# Kept per engine. Those beyond the number of requests at once close by themselves after the seconds above.
IDLE_PER_ENGINE = 1024
# llama.cpp's server assigns one of a fixed number of threads to every open connection, idle or not, so each kept one
# takes a thread from waiting requests. Such servers announce how long they wait (`Keep-Alive: timeout=5, max=100`);
# servers with an event loop do not. These few save reconnects for sequential requests.
IDLE_PER_THREADED_ENGINE = 4
REMEMBERED_HEADS = 1024
# LocalAI's routes that are not OpenAI's: llama.cpp, vLLM and SGLang have them too, beside `/v1`.
OWN_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
READY_SECONDS = 1.0
KEY_SECONDS = 2.0  # a refusal is immediate; an engine that is still working has accepted the request
WRONG_KEY = "not-the-key-of-any-replica"


class _Response:
    """The response on one connection. It is its own iterator, so that abandoning it leaves nothing behind."""

    def __init__(self, engine: HttpEngine, connection: Connection) -> None:
        self._engine = engine
        self._connection = connection
        self._is_closed = False
        self.status = connection.status
        self.headers: Headers = connection.headers

    def chunks(self) -> AsyncIterator[bytes]:
        return self

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._is_closed:
            raise Upstream(f"cannot read from the engine at {self._connection.address}: the response was closed")
        chunk = await self._connection.next_chunk()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.give_back(self._connection)


class HttpEngine:
    """A client that keeps connections per address. Belongs to one event loop."""

    def __init__(self) -> None:
        self._idle: dict[str, list[Connection]] = {}
        self._heads: dict[tuple[str, str, str, str, str], bytes] = {}
        self._sweep: asyncio.TimerHandle | None = None

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        head = self._head(call)
        kept = self._take(call.address)
        if kept is not None:
            try:
                return await self._exchange(kept, head, call.body, head_seconds)
            except Upstream as error:
                if kept.has_bytes or error.code == "upstream_timeout":
                    raise
                # It was closed while idle. From here on the request counts as sent, so a refused connection means that
                # the engine ended and not that another replica may be tried.
                try:
                    fresh = await _connect(call.address, connect_seconds)
                except EnginehouseError:
                    raise error from None
                return await self._exchange(fresh, head, call.body, head_seconds)
        return await self._exchange(await _connect(call.address, connect_seconds), head, call.body, head_seconds)

    async def is_ready(self, target: EngineTarget) -> bool:
        call = EngineCall(address=target.address, key=target.key, method="GET", path="/health")
        try:
            async with asyncio.timeout(READY_SECONDS):
                response = await self.send(call, connect_seconds=READY_SECONDS, head_seconds=READY_SECONDS)
                try:
                    async for _ in response.chunks():
                        pass
                    return response.status == 200
                finally:
                    await response.close()
        except (EnginehouseError, TimeoutError):
            return False

    async def checks_key(self, target: EngineTarget) -> bool:
        return await self._refuses(target.address, "") and await self._refuses(target.address, WRONG_KEY)

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        """Engines that speak OpenAI's HTTP take their model at start."""

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        return False

    async def _refuses(self, address: str, key: str) -> bool:
        # Not `/health` or `/v1/models`, which engines answer without a key. The empty body causes no work.
        call = EngineCall(address=address, key=key, method="POST", path="/v1/chat/completions", body=b"{}")
        try:
            async with asyncio.timeout(KEY_SECONDS):
                response = await self.send(call, connect_seconds=KEY_SECONDS, head_seconds=KEY_SECONDS)
                await response.close()
                return response.status in (401, 403)
        except (EnginehouseError, TimeoutError):
            return False

    def forget(self, address: str) -> None:
        for connection in self._idle.pop(address, ()):
            connection.cut()

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.cut()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        """Keep the connection for the next request, or abort it if its response was not read to the end."""
        if not connection.is_reusable:
            connection.cut()
            return
        loop = connection.loop  # asking for the running one is a system call
        connection.idle_since = loop.time()
        idle = self._idle.setdefault(connection.address, [])
        idle.append(connection)
        if len(idle) > (IDLE_PER_THREADED_ENGINE if connection.takes_a_thread else IDLE_PER_ENGINE):
            idle.pop(0).cut()
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_SECONDS, self._close_idle)

    async def _exchange(self, connection: Connection, head: bytes, body: bytes, head_seconds: float) -> EngineResponse:
        connection.send(head, body)
        # A timer of its own instead of `asyncio.timeout`, which costs several times as much per request.
        timer = connection.loop.call_later(head_seconds, connection.expire, head_seconds)
        is_answered = False
        try:
            await connection.wait_for_head()
            is_answered = True
        finally:
            timer.cancel()
            if not is_answered:
                # After a cancelled request or a broken response, the connection must not be reused.
                connection.cut()
        return _Response(self, connection)

    def _head(self, call: EngineCall) -> bytes:
        """The head of a request; all but the length of its body is remembered, because few differ."""
        key = (call.address, call.key, call.method, call.path, call.content_type)
        beginning = self._heads.get(key)
        if beginning is None:
            beginning = _beginning(call)
            if len(self._heads) >= REMEMBERED_HEADS:
                self._heads.clear()
            self._heads[key] = beginning
        if call.body or call.method == "POST":
            return b"%bcontent-length: %d\r\n\r\n" % (beginning, len(call.body))
        return beginning + b"\r\n"

    def _take(self, address: str) -> Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.is_lost and connection.idle_since > connection.loop.time() - IDLE_SECONDS:
                return connection
            connection.cut()
        return None

    def _close_idle(self) -> None:
        """Close connections of engines without further requests; otherwise they would stay until the engine ends."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - IDLE_SECONDS
        for address in list(self._idle):
            kept = []
            for connection in self._idle[address]:
                if connection.is_lost or connection.idle_since <= oldest:
                    connection.cut()
                else:
                    kept.append(connection)
            if kept:
                self._idle[address] = kept
            else:
                del self._idle[address]
        self._sweep = loop.call_later(IDLE_SECONDS, self._close_idle) if self._idle else None


async def _connect(address: str, connect_seconds: float) -> Connection:
    return await dial(address, connect_seconds, lambda: Connection(address))


def _beginning(call: EngineCall) -> bytes:
    lines = [
        f"{call.method} {OWN_PATHS.get(call.path, call.path)} HTTP/1.1",
        f"host: {call.address}",
        "user-agent: enginehouse",
        "accept-encoding: identity",  # the bytes are passed on unchanged, to a client that may support no other coding
    ]
    if call.key:
        lines.append(f"authorization: Bearer {call.key}")
    if call.body or call.method == "POST":
        lines.append(f"content-type: {call.content_type}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1:
        raise Invalid(f"cannot send a request to the engine at {call.address}: its head contains a line break")
    return f"{head}\r\n".encode("latin-1")
