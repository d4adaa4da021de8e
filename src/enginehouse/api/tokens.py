"""Routes for tokens. Only the answer that creates a token contains it."""

from __future__ import annotations

import logging

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import caller_of, json_response, read_body
from enginehouse.frontend.fleet.tokens import Keys
from enginehouse.frontend.watching.views import render_time

log = logging.getLogger(__name__)


class TokenRequest(Struct, frozen=True, forbid_unknown_fields=True):
    role: str = "user"
    name: str | None = None
    node: str = ""  # only for join tokens: the one node that may use it


class TokenRoutes:
    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def create(self, request: Request) -> Response:
        asked = await read_body(request, TokenRequest)
        return json_response(await self._keys.create(asked.role, asked.name, node=asked.node), 201)

    async def revoke(self, request: Request) -> Response:
        row = await self._keys.revoke(str(request.path_params["id"]))
        log.info("token.revoked id=%s role=%s name=%s by=%s", row.id, row.role, row.name, caller_of(request).name)
        return json_response({"id": row.id, "role": row.role, "name": row.name, "message": "token revoked"})

    async def every(self, _request: Request) -> Response:
        rows = await self._keys.every()
        return json_response(
            [
                {"id": row.id, "role": row.role, "name": row.name, "created_at": render_time(row.created_at)}
                | ({"node": row.node} if row.node else {})
                for row in rows
            ]
        )
