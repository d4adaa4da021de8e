"""`ports.Engine` for engines that speak LocalAI's gRPC protocol: requests of OpenAI's API are translated to its calls.

One long-lived connection per engine carries all calls. A request is sent once. An answer begins when the first message
of its first call has arrived, so a call that fails at once has a status of its own. Closing a response early cancels
its calls, which tells the engine to stop.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack

import msgspec
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Invalid, NotFound, Unavailable, Upstream
from enginehouse.engine.localai import (
    chat,
    completions,
    control,
    embeddings,
    generic,
    rerank,
    tokens,
)
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.failures import failure_of
from enginehouse.engine.localai.planning import Planned, PlannedCall, TextContext
from enginehouse.engine.localai.responses import StreamedResponse, WholeResponse
from enginehouse.engine.localai.status import PERMISSION_DENIED, UNAUTHENTICATED, GrpcError
from enginehouse.engine.localai.stream import GrpcStream
from enginehouse.ports import EngineCall, EngineResponse, EngineTarget

# A stream may take as long as its client reads. The limit only ends calls that everybody has forgotten.
STREAM_SECONDS = 24 * 3600.0
# Calls of one request at the same time: engines queue what they cannot compute, and hundreds of inputs are one request.
MAX_CALLS = 32
FetchMedia = Callable[[str], Awaitable[bytes]]

_PLANS: dict[str, tuple[str, Callable[[bytes, TextContext], Planned]]] = {
    "/v1/chat/completions": ("answer a chat", chat.plan),
    "/v1/completions": ("complete a text", completions.plan),
    "/v1/embeddings": ("embed a text", embeddings.plan),
    "/v1/rerank": ("rank documents", rerank.plan),
    "/v1/tokenize": ("tokenize a text", tokens.plan_tokenize),
    "/v1/detokenize": ("read tokens", tokens.plan_detokenize),
}


class _Sent(Struct, frozen=True, kw_only=True):
    """A request on its way: where to, its limits, and what it is for."""

    call: EngineCall
    connect_seconds: float
    head_seconds: float  # for a whole answer, or for the first messages of a stream
    task: str = "make this call"

    def to(self, planned: PlannedCall, *, is_last: bool = True) -> GrpcCall:
        return GrpcCall(
            address=self.call.address,
            method=planned.method,
            key=self.call.key,
            message=planned.message,
            connect_seconds=self.connect_seconds,
            deadline_seconds=STREAM_SECONDS,
            ends=is_last,
        )

    def failure(self, error: GrpcError) -> EnginehouseError:
        model = self.call.served.name if self.call.served is not None else "the model"
        if error.status in (PERMISSION_DENIED, UNAUTHENTICATED):
            # The key belongs to one process, so another process listens on that port.
            return Unavailable(
                f"cannot use the engine at {self.call.address}: it is not the process that was started there",
                code="replica_unreachable",
            )
        return failure_of(error.status, error.detail, model=model, task=self.task)


class LocalaiEngine:
    """A client for all engines of a program. Belongs to one event loop."""

    def __init__(self, fetch_media: FetchMedia | None = None) -> None:
        """`fetch_media` gets pictures that a request names by URL; without it, requests must contain them."""
        self._client = GrpcClient()
        self._fetch_media = fetch_media

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        sent = _Sent(call=call, connect_seconds=connect_seconds, head_seconds=head_seconds)
        if call.path.startswith(generic.PREFIX):
            return await self._send_generic(sent)
        if call.path not in _PLANS:
            raise NotFound(
                f"cannot answer {call.path}: the engine of this model speaks LocalAI's protocol, which has no such "
                "call; POST /api/engines/MODEL/CALL makes any call that it has",
                code="unsupported",
            )
        task, plan = _PLANS[call.path]
        sent = _Sent(call=call, connect_seconds=connect_seconds, head_seconds=head_seconds, task=task)
        planned = await self._plan(call, plan)
        if planned.events is not None:
            return await self._stream(sent, planned)
        assert planned.whole is not None, "a plan is a stream or has a whole answer"
        replies = await self._replies(sent, planned.calls)
        return WholeResponse(200, planned.whole(replies))

    async def _plan(self, call: EngineCall, plan: Callable[[bytes, TextContext], Planned]) -> Planned:
        assert call.served is not None, "a route to an engine of LocalAI has its model"
        context = TextContext(
            config=call.served.config,
            identity=call.served.identity,
            model=call.served.name,
            id=f"chatcmpl-{uuid.uuid4().hex}",
            created=int(time.time()),
            seed=random.randrange(2**31),
        )
        planned = plan(call.body, context)
        if not planned.urls:
            return planned
        if self._fetch_media is None:
            raise Invalid("cannot fetch the pictures of this request: send them as data: URLs", code="unsupported")
        media = {url: await self._fetch_media(url) for url in planned.urls}
        return plan(call.body, msgspec.structs.replace(context, media=media))

    async def _replies(self, sent: _Sent, calls: Sequence[PlannedCall]) -> list[bytes]:
        """One reply per call, in their order."""
        try:
            async with asyncio.timeout(sent.head_seconds):
                if len(calls) == 1:
                    return [await self._client.unary(sent.to(calls[0]))]
                return await self._many(sent, calls)
        except TimeoutError as error:
            raise _too_slow(sent) from error
        except GrpcError as error:
            raise sent.failure(error) from error

    async def _many(self, sent: _Sent, calls: Sequence[PlannedCall]) -> list[bytes]:
        room = asyncio.Semaphore(MAX_CALLS)
        failures: list[EnginehouseError] = []

        async def one(call: PlannedCall) -> bytes:
            async with room:
                if failures:
                    return b""
                try:
                    return await self._client.unary(sent.to(call))
                except EnginehouseError as error:  # raised below: a task group would wrap it
                    failures.append(error)
                    return b""

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(call)) for call in calls]
        if failures:
            raise failures[0]
        return [task.result() for task in tasks]

    async def _stream(self, sent: _Sent, planned: Planned) -> EngineResponse:
        streams: list[GrpcStream] = []

        def cancel() -> None:
            for stream in streams:
                stream.cancel()

        with ExitStack() as unless_begun:
            unless_begun.callback(cancel)
            for call in planned.calls:
                streams.append(await self._client.start(sent.to(call)))  # noqa: PERF401  # `cancel` must see each at once
            first = await _first_messages(sent, streams[0])
            unless_begun.pop_all()
        return StreamedResponse(_events(sent, planned, streams, first), cancel)

    async def _send_generic(self, sent: _Sent) -> EngineResponse:
        call = sent.call
        wanted = generic.read_call(call.path, call.body, call.served.identity if call.served is not None else "")
        first, *rest = wanted.requests
        stream = await self._client.start(sent.to(PlannedCall(wanted.method, first), is_last=not rest))
        with ExitStack() as unless_begun:
            unless_begun.callback(stream.cancel)
            for message in rest:
                await stream.send(message)
            await stream.end()
            messages = await _first_messages(sent, stream)
            unless_begun.pop_all()
        if wanted.is_stream:
            return StreamedResponse(generic.events(wanted, messages, stream), stream.cancel)
        stream.cancel()
        if not messages:
            raise Upstream(f"cannot read the answer of the engine at {call.address}: it has no message")
        return WholeResponse(200, generic.write_answer(wanted, messages[0]))

    # Control --------------------------------------------------------------------------------------------------------

    async def is_ready(self, target: EngineTarget) -> bool:
        return await control.is_ready(self._client, target)

    async def checks_key(self, target: EngineTarget) -> bool:
        return await control.checks_key(self._client, target)

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        await control.load(self._client, target, options, limit_seconds=limit_seconds)

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        return await control.free(self._client, target, limit_seconds=limit_seconds)

    def forget(self, address: str) -> None:
        self._client.forget(address)

    async def close(self) -> None:
        await self._client.close()


async def _first_messages(sent: _Sent, stream: GrpcStream) -> list[bytes]:
    try:
        async with asyncio.timeout(sent.head_seconds):
            return await stream.next_messages()
    except TimeoutError as error:
        raise _too_slow(sent) from error
    except GrpcError as error:
        raise sent.failure(error) from error


async def _events(
    sent: _Sent, planned: Planned, streams: Sequence[GrpcStream], messages: list[bytes]
) -> AsyncIterator[bytes]:
    """The events of one call after the other. Calls run at the same time; the windows of later ones hold them back."""
    assert planned.events is not None, "called for a stream"
    writer = planned.events()
    try:
        for index, stream in enumerate(streams):
            while True:
                if index or not messages:
                    messages = await stream.next_messages()
                if not messages:
                    break
                if written := writer.feed(index, messages):
                    yield written
                messages = []
            yield writer.finish(index)
    except GrpcError as error:
        raise Upstream(sent.failure(error).message) from error


def _too_slow(sent: _Sent) -> Upstream:
    return Upstream(
        f"cannot get an answer from the engine at {sent.call.address} within {sent.head_seconds:g} s",
        code="upstream_timeout",
    )
