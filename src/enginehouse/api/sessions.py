"""Routes for sessions of people in browsers: sign in and out, login links, and the list of who is signed in.

The secret of a session is in the Set-Cookie header only, and only the answer that makes a link has its code.
"""

from __future__ import annotations

import logging
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from enginehouse import __version__
from enginehouse.api.auth import check_sign_in_site
from enginehouse.api.cookies import header, session_secret, set_cookie
from enginehouse.api.requests import caller_of, json_response, read_body
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.frontend.fleet.sessions import Sessions
from enginehouse.frontend.fleet.tokens import Caller, Keys
from enginehouse.frontend.watching.views import render_time

log = logging.getLogger(__name__)


class SessionRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A sign-in: either the code of a login link, or a token."""

    code: str = ""
    token: str = ""


class LinkRequest(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["admin", "viewer"] = "admin"


class SessionRoutes:
    def __init__(self, sessions: Sessions, keys: Keys, frontend_id: str) -> None:
        self._sessions = sessions
        self._keys = keys
        self._frontend_id = frontend_id

    async def sign_in(self, request: Request) -> Response:
        check_sign_in_site(request.scope)
        asked = await read_body(request, SessionRequest)
        if bool(asked.code) == bool(asked.token):
            raise Invalid("cannot sign in: give a `code` or a `token`, and not both", code="unsupported", param="code")
        old = session_secret(request.scope)
        made = await self._sessions.sign_in(
            code=asked.code,
            token=asked.token,
            address=address_of(request.scope),
            replaces=self._keys.identify_session(old) if old else None,
        )
        caller = request.scope["enginehouse.caller"] = made.caller
        log.info("session.began id=%s role=%s name=%s", caller.session_id, caller.role, caller.name)
        answer = json_response(self._shown(caller), 201)
        left = caller.expires_at - self._keys.now()
        answer.headers["set-cookie"] = set_cookie(request.scope, made.secret, left)
        answer.headers["cache-control"] = "no-store"
        return answer

    async def present(self, request: Request) -> Response:
        return json_response(self._shown(caller_of(request)))

    async def sign_out(self, request: Request) -> Response:
        caller = caller_of(request)
        if not caller.session_id:
            raise Conflict(
                "cannot sign out: this request came with a token and not with a session; revoke the token to end it"
            )
        await self._sessions.end(caller.session_id)
        log.info("session.ended id=%s by=%s", caller.session_id, caller.name)
        answer = Response(status_code=204)
        answer.headers["set-cookie"] = set_cookie(request.scope, "", 0)
        return answer

    async def make_link(self, request: Request) -> Response:
        asked = await read_body(request, LinkRequest)
        made = await self._sessions.make_code(caller_of(request), asked.role)
        # After the `#`, which browsers keep to themselves: no log and no Referer has the code.
        url = f"{request.url.scheme}://{header(request.scope, b'host')}/#/login/{made.code}"
        answer = json_response({"url": url, "code": made.code, "expires_at": render_time(made.expires_at)}, 201)
        answer.headers["cache-control"] = "no-store"
        return answer

    async def every(self, request: Request) -> Response:
        own = caller_of(request).session_id
        return json_response(
            [
                {
                    "id": row.id,
                    "name": row.name,
                    "role": row.role,
                    "created_at": render_time(row.created_at),
                    "expires_at": render_time(row.expires_at),
                    "address": row.address,
                    "is_current": row.id == own,
                }
                for row in await self._sessions.every()
            ]
        )

    async def end(self, request: Request) -> Response:
        session_id = str(request.path_params["id"])
        await self._sessions.end(session_id)
        log.info("session.ended id=%s by=%s", session_id, caller_of(request).name)
        return Response(status_code=204)

    def _shown(self, caller: Caller) -> dict[str, object]:
        return {
            "name": caller.name,
            "role": caller.role,
            "expires_at": render_time(caller.expires_at) if caller.expires_at else None,
            "version": __version__,
            "frontend": self._frontend_id,
            "session_id": caller.session_id,
        }


def address_of(scope: Scope) -> str:
    """The address of the client; behind a trusted proxy, what that says."""
    client = scope.get("client")
    return str(client[0]) if client else ""
