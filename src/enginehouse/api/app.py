"""The HTTP application: one table of routes with a role each, and the one edge where errors become answers.

A route that is not in `routes` does not exist, and none can be without a role. The inference routes are plain ASGI
callables, because streaming through response classes costs several times as much per token; all the others are
functions of a request. This edge holds the second of the program's two broad `except`s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from enginehouse.api.auth import RouteRole, authorize, bearer
from enginehouse.api.errors import error_answer
from enginehouse.api.intake import request_id_of
from enginehouse.api.metrics import Metrics
from enginehouse.core.errors import EnginehouseError, Hopeless, Malformed, NotFound, TooLarge, Unauthenticated
from enginehouse.core.name import shown
from enginehouse.core.reading import read_json
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.fleet.tokens import Caller, Keys

log = logging.getLogger(__name__)

MAX_CONTROL_BYTES = 1024 * 1024
BODY_SECONDS = 30.0  # to receive 1 MiB; a connection is not held open for less
# In the state of a request: ends its connection at once. Closing it would wait for a client that does not read.
ABORT = "enginehouse.abort"
# In the state of a request: bounds the bytes that the kernel keeps for a client that does not read.
ROOM = "enginehouse.room"
T = TypeVar("T")


class Entry(Struct, frozen=True, kw_only=True):
    """One row of the route table."""

    method: str
    path: str
    role: RouteRole
    summary: str
    call: Callable[[Request], Awaitable[Response]] | None = None
    raw: ASGIApp | None = None
    body: type | None = None
    status: int = 200


class Edge:
    """Wraps one route: who asks, may they, and what an error looks like."""

    def __init__(self, entry: Entry, keys: Keys, metrics: Metrics, *, is_loopback: bool) -> None:
        self._entry = entry
        self._keys = keys
        self._metrics = metrics
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        scope["enginehouse.request_id"] = request_id
        is_started = False

        async def watched(message: object) -> None:
            nonlocal is_started
            is_started = True
            await send(message)  # type: ignore[arg-type]  # passed through untouched

        try:
            scope["enginehouse.caller"] = await self._authorized(scope)
            _check_address(scope)
            if self._entry.raw is not None:
                await self._entry.raw(scope, receive, watched)
            elif self._entry.call is not None:
                response = await self._entry.call(Request(scope, receive))
                response.headers["x-request-id"] = request_id
                await response(scope, receive, watched)
        except EnginehouseError as error:
            if isinstance(error, Unauthenticated):
                self._metrics.denied(error.code)
            await _answer(error, request_id, send, is_started)
        except ClientDisconnect:
            return  # it left before its request was whole: nothing was done, and nobody is there to be told
        except Exception as error:
            log.exception("request.failed id=%s method=%s path=%s", request_id, scope["method"], scope["path"])
            hidden = Hopeless(f"cannot answer: an internal error occurred; the log has it under {request_id}")
            await _answer(hidden, request_id, send, is_started)
            del error

    async def _authorized(self, scope: Scope) -> Caller:
        try:
            return authorize(self._keys, scope, self._entry.role, is_loopback=self._is_loopback)
        except Unauthenticated:
            if not bearer(scope):
                raise
            await self._keys.look_again()
        return authorize(self._keys, scope, self._entry.role, is_loopback=self._is_loopback)


def _check_address(scope: Scope) -> None:
    """No name holds a NUL, and PostgreSQL cannot even be asked for one."""
    if "\x00" in scope["path"] or b"%00" in scope["query_string"]:
        raise Malformed(f"cannot read {shown(scope['path'])}: no name holds a NUL character")


async def _answer(error: EnginehouseError, request_id: str, send: Send, is_started: bool) -> None:
    if is_started:
        # The head is out, so the only honest end is a broken one: the server cuts the connection.
        raise error
    status, headers, body = error_answer(error, request_id)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def build(entries: list[Entry], keys: Keys, metrics: Metrics, *, is_loopback: bool) -> Starlette:
    routes = [
        Route(
            entry.path,
            endpoint=Edge(entry, keys, metrics, is_loopback=is_loopback),
            methods=[entry.method],
        )
        for entry in entries
    ]
    app = Starlette(routes=routes, exception_handlers={404: _no_route, 405: _no_route})
    # A redirect would answer outside the table, and name a host that the client made up.
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, _error: Exception) -> Response:
    """No such path, or no such method on it: the second names those that there are."""
    path = shown(request.url.path)
    found = [route for route in request.app.routes if isinstance(route, Route)]
    allowed = ", ".join(
        sorted(
            {
                method
                for route in found
                if route.matches(request.scope)[0] is not Match.NONE
                for method in route.methods or ()
            }
        )
    )
    why = f"it takes {allowed}" if allowed else "there is no such route"
    error = NotFound(f"cannot find {request.method} {path}: {why}", code="not_found")
    status, headers, body = error_answer(error, request_id_of(request.scope["headers"]))
    named = {key.decode(): value.decode() for key, value in headers}
    return Response(body, 405, {**named, "allow": allowed}) if allowed else Response(body, status, named)


def caller_of(request: Request) -> Caller:
    caller: Caller = request.scope["enginehouse.caller"]
    return caller


def request_of(request: Request) -> Requester:
    """Who asks, and under which idempotency key."""
    return Requester(author=caller_of(request).name, key=request.headers.get("idempotency-key", ""))


async def read_body(request: Request, kind: type[T], *, limit_bytes: int = MAX_CONTROL_BYTES) -> T:
    """The body as `kind`; an empty one counts as `{}`, because many clients send none where every field is optional."""
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                received += chunk
                if len(received) > limit_bytes:
                    raise TooLarge(f"cannot read the body: more than {limit_bytes} bytes", code="too_large")
    except TimeoutError as error:
        raise Malformed(f"cannot read the body: it did not arrive within {BODY_SECONDS:.0f} s", code="slow") from error
    try:
        # From people alone: what a worker reports may quote the output of an engine.
        is_from_people = getattr(kind, "__struct_config__", None) and kind.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]
        if is_from_people and b"\\u0000" in received and _has_nul(msgspec.json.decode(received)):
            raise Malformed("cannot read the body: no text in it may hold a NUL character", code="invalid_json")
        return read_json(bytes(received) or b"{}", kind)
    except msgspec.ValidationError as error:
        raise Malformed(f"cannot read the body: {error}", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"cannot read the body: it is not valid JSON ({error})", code="invalid_json") from error


def _has_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(_has_nul(part) for pair in value.items() for part in pair)
    if isinstance(value, list):
        return any(_has_nul(part) for part in value)
    return isinstance(value, str) and "\x00" in value


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
