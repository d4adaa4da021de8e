"""Routes for tokens. Only the answer that creates or rotates a token contains it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import caller_of, json_response, read_body
from enginehouse.core.allowance import Allowance, make_allowance
from enginehouse.frontend.fleet.tokens import Keys, Rotated, TokenLimits
from enginehouse.frontend.watching.views import render_time

log = logging.getLogger(__name__)


class TokenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    role: str = "user"
    name: str | None = None
    node: str = ""  # only for join tokens: the one node that may use it
    models: tuple[str, ...] = ()  # only for user tokens: names or patterns; none means every model
    requests_per_minute: int = 0  # only for user tokens, like the next one; 0 means no limit
    tokens_per_minute: int = 0
    ttl_seconds: float = 0.0  # 0 means that it never expires


class RotateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    keep_seconds: float = 0.0  # how long the old secret counts beside the new one


class TokenRoutes:
    def __init__(self, keys: Keys, renew_file: Callable[[Rotated], bool]) -> None:
        """`renew_file` puts a new secret into the file on this machine that had the old one."""
        self._keys = keys
        self._renew_file = renew_file

    async def create(self, request: Request) -> Response:
        asked = await read_body(request, TokenRequest)
        allowance = make_allowance(asked.models, asked.requests_per_minute, asked.tokens_per_minute)
        limits = TokenLimits(node=asked.node, allowance=allowance, ttl_seconds=asked.ttl_seconds)
        made = await self._keys.create(asked.role, asked.name, limits=limits)
        log.info("token.created id=%s role=%s name=%s by=%s", made.id, made.role, made.name, caller_of(request).name)
        shown = {"id": made.id, "role": made.role, "name": made.name, "token": made.token}
        return json_response(shown | _limits(asked.node, allowance, made.expires_at), 201)

    async def revoke(self, request: Request) -> Response:
        row = await self._keys.revoke(str(request.path_params["id"]))
        log.info("token.revoked id=%s role=%s name=%s by=%s", row.id, row.role, row.name, caller_of(request).name)
        return json_response({"id": row.id, "role": row.role, "name": row.name, "message": "token revoked"})

    async def rotate(self, request: Request) -> Response:
        asked = await read_body(request, RotateRequest)
        made = await self._keys.rotate(str(request.path_params["id"]), keep_seconds=asked.keep_seconds)
        row = made.row
        is_in_file = await asyncio.to_thread(self._renew_file, made)
        log.info("token.rotated id=%s role=%s name=%s by=%s", row.id, row.role, row.name, caller_of(request).name)
        shown = {"id": row.id, "role": row.role, "name": row.name, "token": made.token, "file_renewed": is_in_file}
        old = {"old_until": render_time(made.old_until)} if made.old_until else {}
        return json_response(shown | _limits(row.node, row.allowance, row.expires_at) | old)

    async def every(self, _request: Request) -> Response:
        rows, now = await self._keys.every(), self._keys.now()
        return json_response(
            [
                {"id": row.id, "role": row.role, "name": row.name, "created_at": render_time(row.created_at)}
                | _limits(row.node, row.allowance, row.expires_at)
                | ({"last_used_at": render_time(row.used_at)} if row.used_at else {})
                | ({"old_until": render_time(row.previous_until)} if row.previous_until > now else {})
                | ({"expired": True} if row.is_expired(now) else {})
                for row in rows
            ]
        )


def _limits(node: str, allowance: Allowance | None, expires_at: float) -> dict[str, object]:
    """The limits that a token has; those that it does not have are left out."""
    limits = allowance or Allowance()
    every = {
        "node": node,
        "models": limits.models,
        "requests_per_minute": limits.requests_per_minute,
        "tokens_per_minute": limits.tokens_per_minute,
        "expires_at": render_time(expires_at) if expires_at else "",
    }
    return {name: value for name, value in every.items() if value}
