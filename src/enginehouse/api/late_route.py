"""A route of the framework whose pattern is compiled when a path first begins like it.

Compiling the patterns of all routes takes a tenth of a frontend's start.
"""

from __future__ import annotations

from collections.abc import Set
from functools import cached_property

from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send


class LateRoute(BaseRoute):
    def __init__(self, path: str, endpoint: ASGIApp, method: str) -> None:
        self.path = path
        self._endpoint = endpoint
        self._method = method
        # What every path of this route begins with; all of it, if the path has no parameters.
        self._beginning, brace, _ = path.partition("{")
        self._is_whole = not brace

    @cached_property
    def _route(self) -> Route:
        return Route(self.path, endpoint=self._endpoint, methods=[self._method])

    @property
    def methods(self) -> Set[str]:
        return self._route.methods or frozenset()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        path = scope.get("path", "")
        if path == self._beginning if self._is_whole else path.startswith(self._beginning):
            return self._route.matches(scope)
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._route.handle(scope, receive, send)
