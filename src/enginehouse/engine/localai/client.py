"""LocalAI's engines behind the seam of all engines: OpenAI's HTTP in, gRPC to the process, OpenAI's HTTP out.

A path chooses the translator. All calls of a request are sent before the first answer is read, so an engine works on
them at the same time, up to a limit. A stream's head is given only with its first reply: an engine that refuses is an
error and not a stream. Closing a response cancels its calls, which tells the engine to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from enginehouse.core.errors import EnginehouseError, NotFound, Upstream
from enginehouse.engine.localai import backend_pb2, chat, completions, embeddings, rerank, status, tokens
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.failures import failure_of
from enginehouse.engine.localai.planning import Planned, TextContext, unsupported
from enginehouse.engine.localai.status import GrpcError
from enginehouse.engine.localai.stream import GrpcStream
from enginehouse.ports import EngineCall, EngineResponse, Headers

Plan = Callable[[bytes, TextContext], Planned]
Fetch = Callable[[str], Awaitable[bytes]]

# Path, translator, and what the request asks for, in messages.
_TRANSLATORS: dict[str, tuple[Plan, str]] = {
    "/v1/chat/completions": (chat.plan, "answer a chat"),
    "/v1/completions": (completions.plan, "complete a text"),
    "/v1/embeddings": (embeddings.plan, "embed a text"),
    "/v1/rerank": (rerank.plan, "rank documents"),
    "/v1/tokenize": (tokens.plan_tokenize, "tokenize a text"),
    "/v1/detokenize": (tokens.plan_detokenize, "read tokens"),
}
AT_ONCE = 32  # calls of one request; a list of inputs must not fill an engine's queue
STREAM_SECONDS = 86_400.0  # of a whole stream: as good as no limit. Its client, its engine or keepalive ends it
READY_SECONDS = 1.0
WRONG_KEY = "not-the-key-of-any-replica"
_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


class LocalAIEngine:
    """Owns the connections to engines. Belongs to one event loop."""

    def __init__(self, fetch: Fetch | None = None) -> None:
        self._client = GrpcClient()
        self._fetch = fetch

    async def send(
        self, call: EngineCall, context: TextContext, *, connect_seconds: float, head_seconds: float
    ) -> EngineResponse:
        """`head_seconds` bounds a whole answer, and the first reply of a stream."""
        found = _TRANSLATORS.get(call.path)
        if found is None:
            raise NotFound(f"cannot use {call.path}: LocalAI's engines have no such route", code="not_found")
        plan, task = found
        planned = await self._planned(plan, call.body, context)
        deadline_seconds = STREAM_SECONDS if planned.streams else head_seconds
        limits = (connect_seconds, deadline_seconds)
        calls = _Calls(self._client, call, planned, limits)
        try:
            async with asyncio.timeout(head_seconds):
                if planned.events is not None:
                    return _StreamedResponse(calls, await calls.first(), context.model, task)
                assert planned.whole is not None
                return _WholeResponse(planned.whole([await calls.only(n) for n in range(len(planned.calls))]))
        except GrpcError as error:
            raise failure_of(error.status, error.detail, model=context.model, task=task) from error
        except TimeoutError as error:
            raise Upstream(
                f"cannot get an answer from the engine at {call.address} within {head_seconds:g} s",
                code="upstream_timeout",
            ) from error
        finally:
            if not calls.is_handed_over:
                calls.cancel()

    async def is_ready(self, address: str, key: str) -> bool:
        try:
            return await self._health(address, key) == b"OK"
        except EnginehouseError:
            return False

    async def checks_key(self, address: str) -> bool:
        for key in ("", WRONG_KEY):
            try:
                await self._health(address, key)
                return False
            except GrpcError as error:
                if error.status != status.UNAUTHENTICATED:
                    return False
            except EnginehouseError:
                return False
        return True

    async def close(self) -> None:
        await self._client.close()

    async def _health(self, address: str, key: str) -> bytes:
        call = GrpcCall(
            address=address, method="Health", key=key, connect_seconds=READY_SECONDS, deadline_seconds=READY_SECONDS
        )
        return backend_pb2.Reply.FromString(await self._client.unary(call)).message

    async def _planned(self, plan: Plan, body: bytes, context: TextContext) -> Planned:
        planned = plan(body, context)
        if not planned.urls:
            return planned
        if self._fetch is None:
            raise unsupported("messages", "media are not fetched here. Send them as `data:` URLs")
        media = {url: await self._fetch(url) for url in planned.urls}
        return plan(body, msgspec.structs.replace(context, media=media))


class _Calls:
    """The calls of one request, started in order and read in order."""

    def __init__(self, client: GrpcClient, call: EngineCall, planned: Planned, limits: tuple[float, float]) -> None:
        self._client = client
        self._call = call
        self.planned = planned
        self._connect_seconds, self._deadline_seconds = limits
        self._streams: list[GrpcStream] = []
        self.is_handed_over = False

    async def stream(self, index: int) -> GrpcStream:
        """The stream of a call. Those that follow it are started too, within the limit."""
        wanted = min(index + AT_ONCE, len(self.planned.calls))
        while len(self._streams) < wanted:
            planned = self.planned.calls[len(self._streams)]
            self._streams.append(
                await self._client.start(
                    GrpcCall(
                        address=self._call.address,
                        method=planned.method,
                        key=self._call.key,
                        message=planned.message,
                        connect_seconds=self._connect_seconds,
                        deadline_seconds=self._deadline_seconds,
                    )
                )
            )
        return self._streams[index]

    async def first(self) -> list[bytes]:
        return await (await self.stream(0)).next_messages()

    async def only(self, index: int) -> bytes:
        """The one reply of a call."""
        stream = await self.stream(index)
        replies: list[bytes] = []
        while batch := await stream.next_messages():
            replies += batch
            if len(replies) > 1:
                break
        if len(replies) != 1:
            raise Upstream(f"cannot read the answer of the engine at {self._call.address}: it is not one message")
        return replies[0]

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()


class _WholeResponse:
    """An answer that is complete."""

    status = 200
    headers = _JSON

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        yield self._body

    async def close(self) -> None:
        pass


class _StreamedResponse:
    """Events as the replies arrive, one choice after the other; the engine works on all of them meanwhile."""

    status = 200
    headers = _EVENTS

    def __init__(self, calls: _Calls, first: list[bytes], model: str, task: str) -> None:
        self._calls = calls
        self._first = first
        self._model = model
        self._task = task
        calls.is_handed_over = True

    async def chunks(self) -> AsyncIterator[bytes]:
        planned = self._calls.planned
        assert planned.events is not None
        writer = planned.events()
        try:
            for index in range(len(planned.calls)):
                stream = await self._calls.stream(index)
                batch = self._first if index == 0 else await stream.next_messages()
                while batch:
                    events = writer.feed(index, batch)
                    if events:
                        yield events
                    batch = await stream.next_messages()
                yield writer.finish(index)
        except GrpcError as error:
            failure = failure_of(error.status, error.detail, model=self._model, task=self._task)
            raise Upstream(failure.message, code=failure.code) from error

    async def close(self) -> None:
        self._calls.cancel()
