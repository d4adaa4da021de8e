"""The route for the last hour, as this frontend saw it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import list_response
from enginehouse.core.ids import NodeId
from enginehouse.frontend.watching.past import Past

NO_NODES = "none"


class HistoryRoutes:
    def __init__(self, past: Past) -> None:
        self._past = past

    async def last_hour(self, request: Request) -> Response:
        named = request.query_params.get("nodes")
        only = None if named is None else {NodeId(one) for one in named.split(",") if one != NO_NODES}
        return await list_response(request, await self._past.encoded(only))
