"""The HTTP application: authorizes every request, calls its route, and turns errors into answers.

Only the routes of `routes.make_routes` exist, and each has a role. The inference routes and the event stream are plain
ASGI callables, because streaming through response classes costs several times as much per token; all other routes are
functions of a request. Paths without parameters are looked up in a dict; only what it does not have passes the
framework's middleware and its list of patterns. This file holds the second of the program's two broad `except`s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from enginehouse.api.audit import record_of
from enginehouse.api.auth import bearer, check_role, check_site, identify
from enginehouse.api.cookies import session_secret
from enginehouse.api.errors import error_answer
from enginehouse.api.intake import request_id_of
from enginehouse.api.late_route import LateRoute
from enginehouse.api.metrics import Metrics
from enginehouse.api.requests import ABORT
from enginehouse.api.routes import ApiRoute
from enginehouse.api.turns import Turns
from enginehouse.core.errors import (
    Denied,
    EnginehouseError,
    Hopeless,
    Malformed,
    NotFound,
    Unauthenticated,
    http_status,
)
from enginehouse.core.name import shown
from enginehouse.frontend.fleet.audit import AuditLedger
from enginehouse.frontend.fleet.tokens import Keys

log = logging.getLogger(__name__)

TURNS_AT_ONCE = 8  # requests of machines that begin before others are looked for: two or three milliseconds
_OF_MACHINES = "/api/node/"


class RouteEndpoint:
    """The ASGI endpoint of one route: authorizes the caller, calls the route, answers errors."""

    def __init__(self, route: ApiRoute, keys: Keys, metrics: Metrics, audit: AuditLedger, *, is_loopback: bool) -> None:
        self._route = route
        self._keys = keys
        self._metrics = metrics
        self._audit = audit
        self._is_audited = route.is_audited
        self._is_read = route.method == "GET"
        self._is_loopback = is_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = request_id_of(scope["headers"])
        scope["enginehouse.request_id"] = request_id
        is_started = False

        def watched(message: Message) -> Awaitable[None]:
            nonlocal is_started
            is_started = True
            if self._is_read and message.get("more_body") and self._has_ended(scope):
                # Whoever follows events or logs has signed out, or the token was revoked.
                if abort := scope.get("state", {}).get(ABORT):
                    abort()
                return _nothing()
            return send(message)

        try:
            await self._authorized(scope)
            _check_address(scope)
            if self._route.raw is not None:
                await self._route.raw(scope, receive, watched)
            elif self._route.call is not None:
                response = await self._route.call(Request(scope, receive))
                self._record(scope, response.status_code, response)
                response.headers["x-request-id"] = request_id
                await response(scope, receive, watched)
        except EnginehouseError as error:
            if isinstance(error, Unauthenticated | Denied):
                self._metrics.denied(error.code)
            self._record(scope, http_status(error), error=error.code)
            await _answer(error, request_id, send, is_started)
        except ClientDisconnect:
            return  # the client left before its request was complete: nothing was done, and no answer can arrive
        except Exception as error:
            log.exception("request.failed id=%s method=%s path=%s", request_id, scope["method"], scope["path"])
            hidden = Hopeless(f"cannot answer: an internal error occurred; the log has it under {request_id}")
            self._record(scope, http_status(hidden), error=hidden.code)
            await _answer(hidden, request_id, send, is_started)
            del error

    def _has_ended(self, scope: Scope) -> bool:
        """Whether the credential of a request that is still being answered counts no more."""
        try:
            identify(self._keys, scope, self._route.role, is_loopback=self._is_loopback)
        except Unauthenticated:
            return True
        return False

    def _record(self, scope: Scope, status: int, response: Response | None = None, *, error: str = "") -> None:
        if self._is_audited:
            body = bytes(getattr(response, "body", b""))  # a response that is streamed has none
            self._audit.note(record_of(scope, self._route.summary, status, error=error, body=body))

    async def _authorized(self, scope: Scope) -> None:
        """Find out who asks, put that into the scope, and raise unless the caller may call the route."""
        role = self._route.role
        try:
            caller = identify(self._keys, scope, role, is_loopback=self._is_loopback)
        except Unauthenticated:
            secret = bearer(scope) or session_secret(scope)
            if not secret:
                raise
            # Another frontend may have created the token or the session a moment ago.
            await self._keys.look_again(secret)
            caller = identify(self._keys, scope, role, is_loopback=self._is_loopback)
        scope["enginehouse.caller"] = caller
        check_role(caller, role)
        if caller.session_id:
            await _from_proxy(scope)
            check_site(scope)


async def _nothing() -> None:
    pass


async def _ignore(scope: Scope, receive: Receive, send: Send) -> None:
    pass


# Only behind a proxy on this machine: who asks, and whether by HTTPS. Inference needs neither, unless a browser asks.
_TRUSTED = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
_read_proxy_headers: Any = ProxyHeadersMiddleware(_ignore, trusted_hosts=_TRUSTED)  # type: ignore[arg-type]


async def _from_proxy(scope: Scope) -> None:
    """Read into the scope what a proxy says; on routes that have not passed the framework this is still to be done."""
    await _read_proxy_headers(scope, None, None)


def _check_address(scope: Scope) -> None:
    """Refuse NUL characters: no name contains one, and PostgreSQL rejects them in a query."""
    if "\x00" in scope["path"] or b"%00" in scope["query_string"]:
        raise Malformed(f"cannot read {shown(scope['path'])}: it contains a NUL character")


async def _answer(error: EnginehouseError, request_id: str, send: Send, is_started: bool) -> None:
    if is_started:
        # The head is sent, so the error can only be shown by cutting the connection, which the server does.
        raise error
    status, headers, body = error_answer(error, request_id)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Application:
    """The whole HTTP interface as ASGI.

    `endpoints` are the inference routes without parameters, by their path as it is on the wire. A path that is written
    differently (percent-encoded, with a query) is not in it and takes the framework's way to the same endpoint.
    """

    def __init__(self, framework: Starlette, endpoints: dict[bytes, tuple[str, ASGIApp]]) -> None:
        self.routes = framework.routes
        self.endpoints = endpoints
        self._by_path = {path: endpoint for path, endpoint in endpoints.values()}
        self._turns = Turns(TURNS_AT_ONCE)
        self._framework: Any = ProxyHeadersMiddleware(framework, trusted_hosts=_TRUSTED)  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._by_path.get(scope["path"]) if scope.get("method") == "POST" else None
        if endpoint is None and scope["path"].startswith(_OF_MACHINES):
            await self._turns.take()
        await (endpoint or self._framework)(scope, receive, send)


def build(
    routes: Sequence[ApiRoute], keys: Keys, metrics: Metrics, audit: AuditLedger, *, is_loopback: bool
) -> Application:
    made = [(route, RouteEndpoint(route, keys, metrics, audit, is_loopback=is_loopback)) for route in routes]
    framework = Starlette(
        routes=[LateRoute(route.path, endpoint, route.method) for route, endpoint in made],
        exception_handlers={404: _no_route, 405: _no_route},
    )
    # A redirect would be an answer outside the table, and would contain a host name chosen by the client.
    framework.router.redirect_slashes = False
    endpoints: dict[bytes, tuple[str, ASGIApp]] = {
        route.path.encode(): (route.path, endpoint)
        for route, endpoint in made
        if route.raw is not None and route.method == "POST" and "{" not in route.path
    }
    return Application(framework, endpoints)


async def _no_route(request: Request, _error: Exception) -> Response:
    """Answer an unknown path with 404, and an unknown method on a known path with 405 and the allowed methods."""
    path = shown(request.url.path)
    found = [route for route in request.app.routes if isinstance(route, LateRoute)]
    matching = [route for route in found if route.matches(request.scope)[0] is not Match.NONE]
    allowed = ", ".join(sorted({method for route in matching for method in route.methods}))
    why = f"it takes {allowed}" if allowed else "there is no such route"
    error = NotFound(f"cannot find {request.method} {path}: {why}", code="not_found")
    status, headers, body = error_answer(error, request_id_of(request.scope["headers"]))
    named = {key.decode(): value.decode() for key, value in headers}
    return Response(body, 405, {**named, "allow": allowed}) if allowed else Response(body, status, named)
