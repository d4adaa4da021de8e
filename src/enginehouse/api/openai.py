"""The inference routes as raw ASGI callables, one per path of OpenAI's API, and any call of LocalAI's protocol.

A request is decoded once, for its model; otherwise its bytes are passed on unchanged. The route is chosen before the
first byte of the answer. An incomplete answer never looks complete: a plain one is sent only when it is complete, and
a broken stream ends with an error event and without its end marker. When a client disconnects, its engine stops at
once. The only work per token is one send, and to count it; what was used is read from the end of the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from starlette.types import ASGIApp

from enginehouse.api.errors import error_answer
from enginehouse.api.intake import (
    Receive,
    form_type_of,
    model_asked_for,
    model_of_form,
    read_body,
    request_id_of,
    until_disconnect,
    with_model,
)
from enginehouse.api.relay import EventPasser, engine_error, passed_headers
from enginehouse.api.requests import WHEN_GONE
from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable, Upstream
from enginehouse.core.name import shown
from enginehouse.core.routing import Route
from enginehouse.core.usage import Used, used_by_answer, used_by_stream
from enginehouse.frontend.fleet.tokens import Caller
from enginehouse.ports import Engine, EngineCall, EngineResponse

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Callback = Callable[[], None]
WhenGone = Callable[[Callback | None], None]

MAX_ANSWER_BYTES = 32 * 1024 * 1024  # of an answer that is not a stream, which is held until it is complete
CONNECT_SECONDS = 2.0
HEAD_SECONDS = 900.0  # the head of a plain answer comes at its end: after minutes of generation on a slow machine
ROUTES_TRIED = 3
_PUBLIC = {
    "upstream_error": "cannot finish the answer: the engine did not complete it. Ask again",
    "upstream_timeout": "cannot answer: the engine did not begin to answer in time. Ask for a stream or for less",
    "replica_unreachable": "cannot answer: no replica of the model can be reached at the moment. Ask again soon",
}
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*(?:/[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*)*")
JSON = "application/json"
CLIENT_GONE = 499  # nginx's number; only the observer sees it
_NO_STATE: dict[str, Any] = {}


class Routes(Protocol):
    """The part of the router that a request uses."""

    async def acquire(self, model: str, token: str = "", body: bytes = b"") -> Route: ...

    def release(self, route: Route) -> None: ...

    def drop(self, route: Route) -> None: ...


class Finished(Struct, frozen=True, kw_only=True):
    """One request, however it ended. `node` is empty if no replica was reached, `model` if it is not known. A server
    outside of the cluster has no `node_id`.
    """

    caller: Caller | None
    model: str
    node: str
    node_id: str = ""
    path: str
    status: int
    seconds: float
    first_byte_seconds: float | None
    first_token_seconds: float | None = None  # of a stream
    used: Used | None = None  # None if the engine did not say
    is_broken: bool = False  # a stream that its engine did not complete


class Observer(Protocol):
    def admit(self, caller: Caller, model: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Called for callers with an allowance: raises if it does not cover the request. Adds headers of the answer."""

    def request_done(self, done: Finished) -> None:
        """Called once per request."""


class _Exchange:
    """The state of one request."""

    def __init__(self, path: str, request_id: str, send: Send, caller: Caller | None) -> None:
        self.path = path
        self.caller = caller
        self.content_type = JSON
        self.request_id = request_id
        self.send = send
        self.started = time.perf_counter()
        self.first_byte_seconds: float | None = None
        self.status = 0  # of the head that was sent
        self.model = ""
        self.is_model_known = False
        self.node = ""
        self.node_id = ""
        self.first_token_seconds: float | None = None
        self.used: Used | None = None
        self.is_broken = False
        self.limits: list[tuple[bytes, bytes]] = []  # headers about the limits of a limited token

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        if self.limits:
            headers = [*headers, *self.limits]
        self.first_byte_seconds = time.perf_counter() - self.started
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        await self.begin(status, headers)
        await self.send({"type": "http.response.body", "body": body})


class _Departure:
    """Ends the work on a request when its client disconnects. `asyncio.timeout` could do it, and costs more."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._has_happened = False
        self.is_over = False  # the answer is complete, and the task goes on to other things

    def __call__(self) -> None:
        if not self.is_over and not self._has_happened:
            self._has_happened = True
            self._task.cancel()

    def is_all_that_happened(self) -> bool:
        """Whether a cancellation came from here alone. It is then withdrawn."""
        return self._has_happened and self._task.uncancel() == 0


class OpenAI:
    """The routes. `head_seconds` bounds the time until an engine begins to answer."""

    def __init__(
        self, routes: Routes, engine: Engine, observer: Observer, *, head_seconds: float = HEAD_SECONDS
    ) -> None:
        self._routes = routes
        self._engine = engine
        self._observer = observer
        self._head_seconds = head_seconds

    def at(self, path: str) -> ASGIApp:
        """The route for one path of an engine."""
        return partial(self._serve, path)

    async def passed(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Any other path below `/v1`: it is the engine that knows whether it has it.

        Only plain segments: a path must not lead to the engine's own routes, or break the head of the request.
        """
        path = str(scope["path_params"]["path"])
        if not _PLAIN_PATH.fullmatch(path):
            raise NotFound(f"cannot find POST {shown('/v1/' + path)}: there is no such route", code="not_found")
        await self._serve(f"/v1/{path}", scope, receive, send, form_type=form_type_of(scope["headers"]))

    async def engine_call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A call of LocalAI's protocol: the model and the call are in the path, the message is the body."""
        named = scope["path_params"]
        await self._serve(f"/localai/{named['call']}", scope, receive, send, model=named["model"])

    async def _serve(
        self, path: str, scope: Scope, receive: Receive, send: Send, *, model: str = "", form_type: str = ""
    ) -> None:
        caller: Caller | None = scope.get("enginehouse.caller")
        request_id = scope.get("enginehouse.request_id") or request_id_of(scope["headers"])
        exchange = _Exchange(path, request_id, send, caller)
        exchange.content_type = form_type or JSON
        try:
            body = await read_body(scope["headers"], receive)
            if body is not None:
                exchange.model = model or (model_of_form(body, form_type) if form_type else model_asked_for(body))
                if caller is not None and caller.allowance is not None:
                    self._observer.admit(caller, exchange.model, exchange.limits)
                when_gone = scope.get("state", _NO_STATE).get(WHEN_GONE)
                if when_gone is None:
                    await self._answer_and_watch(exchange, body, receive)
                else:
                    await self._answer_unless_gone(exchange, body, when_gone)
        except EnginehouseError as error:
            if exchange.status == 0:
                await exchange.answer(*error_answer(_public_error(error, exchange), exchange.request_id))
        except OSError:
            pass  # some servers raise it from `send` after the client has disconnected, and no answer can arrive
        finally:
            self._observer.request_done(
                Finished(
                    caller=caller,
                    # Clients can invent names of models; as labels these would grow the statistics without limit.
                    model=exchange.model if exchange.is_model_known else "",
                    node=exchange.node,
                    node_id=exchange.node_id,
                    path=path,
                    status=exchange.status or CLIENT_GONE,
                    seconds=time.perf_counter() - exchange.started,
                    first_byte_seconds=exchange.first_byte_seconds,
                    first_token_seconds=exchange.first_token_seconds,
                    used=exchange.used,
                    is_broken=exchange.is_broken,
                )
            )

    async def _answer_unless_gone(self, exchange: _Exchange, body: bytes, when_gone: WhenGone) -> None:
        departure = _Departure()
        when_gone(departure)
        try:
            await self._route(exchange, body)
        except asyncio.CancelledError:
            if not departure.is_all_that_happened():
                raise
            exchange.status = CLIENT_GONE
        finally:
            departure.is_over = True
            when_gone(None)

    async def _answer_and_watch(self, exchange: _Exchange, body: bytes, receive: Receive) -> None:
        """The same for a server that tells of a disconnect only to those who wait for it."""
        failure: Exception | None = None
        told: list[Callback] = []

        def when_gone(callback: Callback | None) -> None:
            told[:] = [] if callback is None else [callback]

        async def watch() -> None:
            await until_disconnect(receive)
            for callback in told:
                callback()

        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch())
            try:
                await self._answer_unless_gone(exchange, body, when_gone)
            except (EnginehouseError, OSError) as error:
                failure = error  # raised below: raised here, the task group would wrap it
            finally:
                watcher.cancel()
        if failure is not None:
            raise failure

    async def _route(self, exchange: _Exchange, body: bytes) -> None:
        """Send the request to a replica. It moves on to another replica only if no engine has begun to work on it."""
        failure: EnginehouseError | None = None
        for _ in range(ROUTES_TRIED):
            route = await self._acquire(exchange, body)
            try:
                exchange.node, exchange.node_id = route.node_name, route.node_id
                failure = await self._try(exchange, route, body)
                if failure is None:
                    return
                self._routes.drop(route)
            finally:
                self._routes.release(route)
        assert failure is not None
        failure.retry_after_seconds = 1.0
        raise failure

    async def _acquire(self, exchange: _Exchange, body: bytes) -> Route:
        caller = exchange.caller
        try:
            route = await self._routes.acquire(exchange.model, caller.token_id if caller is not None else "", body)
        except Unavailable:
            exchange.is_model_known = True
            raise
        exchange.is_model_known = True
        return route

    async def _try(self, exchange: _Exchange, route: Route, body: bytes) -> EnginehouseError | None:
        """None if the request was answered; otherwise the reason why this replica cannot answer it."""
        if route.model != exchange.model and exchange.content_type == JSON and exchange.path.startswith("/v1/"):
            body = with_model(body, route.model)  # it named an alias
        call = EngineCall(
            address=route.address,
            key=route.key,
            method="POST",
            path=exchange.path,
            content_type=exchange.content_type,
            body=body,
            protocol=route.protocol,
            served=route.served,
        )
        try:
            response = await self._engine.send(call, connect_seconds=CONNECT_SECONDS, head_seconds=self._head_seconds)
        except Unavailable as error:
            if error.code == "replica_unreachable":
                return error
            raise
        try:
            if response.status in (401, 403):
                # The key belongs to one process, so another process listens on that port. It has done nothing for
                # this request.
                return Unavailable(
                    f"cannot use the engine at {route.address}: it is not the process that was started there",
                    code="replica_unreachable",
                )
            await self._relay(exchange, response)
            return None
        finally:
            await response.close()

    async def _relay(self, exchange: _Exchange, response: EngineResponse) -> None:
        headers, is_stream = passed_headers(response.headers, exchange.request_id)
        if exchange.node_id:  # the address of a server outside of the cluster is not for its clients
            headers.append((b"x-enginehouse-node", exchange.node.encode()))
        if is_stream and response.status < 400:
            await exchange.begin(response.status, headers)
            await _relay_events(exchange, response)
            return
        body = await _whole(response)
        if response.status >= 400:
            await exchange.answer(*engine_error(response.status, headers, body, exchange.request_id))
            return
        headers.append((b"content-length", str(len(body)).encode()))
        exchange.used = used_by_answer(body)
        await exchange.answer(response.status, headers, body)


async def _relay_events(exchange: _Exchange, response: EngineResponse) -> None:
    passer = EventPasser()
    send = exchange.send
    events = 0
    # What the last three writes of an engine said: the reason of the end, the usage, and the end marker.
    third = second = last = b""
    try:
        async for chunk in response.chunks():
            whole = passer.feed(chunk)
            if whole:
                if not events:
                    exchange.first_token_seconds = time.perf_counter() - exchange.started
                events += whole.count(b"\n\n") or 1
                third, second, last = second, last, whole
                await send({"type": "http.response.body", "body": whole, "more_body": True})
        rest = passer.finish()
        await send({"type": "http.response.body", "body": rest})
    except Upstream as error:
        exchange.is_broken = True
        # The head is sent, so the error goes into the stream. No end marker follows: it would make the answer look
        # complete.
        _, _, body = error_answer(_public_error(error, exchange), exchange.request_id)
        await send({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
    finally:
        # Also of a stream that its client left: the engine has done the work.
        exchange.used = used_by_stream(third + second + last, events)


def _public_error(error: EnginehouseError, exchange: _Exchange) -> EnginehouseError:
    """The error for the client, without addresses of engines; these go to the log only."""
    public = _PUBLIC.get(error.code)
    if public is None:
        return error
    log.warning("inference.failed id=%s node=%s error=%s", exchange.request_id, exchange.node, error.message)
    shown = type(error)(public, code=error.code)
    shown.retry_after_seconds = error.retry_after_seconds
    return shown


async def _whole(response: EngineResponse) -> bytes:
    pieces: list[bytes] = []
    size = 0
    async for chunk in response.chunks():
        size += len(chunk)
        if size > MAX_ANSWER_BYTES:
            raise Upstream(f"cannot pass on the answer: it is larger than {MAX_ANSWER_BYTES} bytes; ask for a stream")
        pieces.append(chunk)
    return b"".join(pieces)
