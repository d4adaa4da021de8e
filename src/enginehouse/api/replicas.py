"""Routes for replicas: the list of all of them, for operators. Changes go through models and nodes."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response
from enginehouse.frontend.serving.replica_views import ReplicaViews


class ReplicaRoutes:
    def __init__(self, replicas: ReplicaViews) -> None:
        self._replicas = replicas

    async def every(self, _request: Request) -> Response:
        return json_response(await self._replicas.every())
