"""Routes about the frontend itself: alive, ready, figures, and the description of all routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from enginehouse import __version__
from enginehouse.api import openapi
from enginehouse.api.app import Entry, json_response
from enginehouse.api.metrics import Metrics

_ROOT = (Path(__file__).parent / "web" / "root.html").read_bytes()
# Nothing but the page itself and its own style; no other site may show it within a page of its own.
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class SystemRoutes:
    def __init__(self, metrics: Metrics, unready: Callable[[], Sequence[str]]) -> None:
        """`unready` names what keeps this frontend from doing its work; nothing when all is well."""
        self._metrics = metrics
        self._unready = unready
        self.table: Sequence[Entry] = ()

    def entries(self) -> list[Entry]:
        return [
            Entry(method="GET", path="/", role="public", summary="What this is, for a browser.", call=self.root),
            Entry(method="GET", path="/healthz", role="public", summary="It lives.", call=self.alive),
            Entry(method="GET", path="/readyz", role="public", summary="It works, or why not.", call=self.ready),
            Entry(method="GET", path="/version", role="user", summary="Which version.", call=self.version),
            Entry(method="GET", path="/metrics", role="admin", summary="Prometheus figures.", call=self.figures),
            Entry(method="GET", path="/openapi.json", role="admin", summary="This table.", call=self.described),
        ]

    async def root(self, _request: Request) -> Response:
        return Response(_ROOT, media_type="text/html; charset=utf-8", headers=_PAGE_HEADERS)

    async def alive(self, _request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        reasons = list(self._unready())
        if reasons:
            return json_response({"status": "not ready", "reasons": reasons}, 503)
        return json_response({"status": "ok"})

    async def version(self, _request: Request) -> Response:
        return json_response({"version": __version__})

    async def figures(self, _request: Request) -> Response:
        return Response(await self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def described(self, _request: Request) -> Response:
        return json_response(openapi.document(self.table))
