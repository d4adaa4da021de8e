"""Routes about the frontend itself: liveness, readiness, statistics and the OpenAPI document."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from enginehouse import __version__
from enginehouse.api.metrics import Metrics
from enginehouse.api.requests import json_response


class SystemRoutes:
    def __init__(self, metrics: Metrics, unready: Callable[[], Sequence[str]]) -> None:
        """`unready` returns the reasons why this frontend is not ready; empty when it is."""
        self._metrics = metrics
        self._unready = unready
        self.make_openapi: Callable[[], Mapping[str, object]] = dict  # set once the route table exists
        self._openapi: Mapping[str, object] | None = None

    async def alive(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        reasons = list(self._unready())
        if reasons:
            return json_response({"status": "not ready", "reasons": reasons}, 503)
        return json_response({"status": "ok"})

    async def version(self, _request: Request) -> Response:
        return json_response({"version": __version__})

    async def statistics(self, _request: Request) -> Response:
        return Response(await self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def document(self, _request: Request) -> Response:
        if self._openapi is None:
            # With the first request, because it takes a tenth of a start; in a thread, because that is long.
            self._openapi = await asyncio.to_thread(self.make_openapi)
        return json_response(self._openapi)
