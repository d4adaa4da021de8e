"""The route of the doctor: what this frontend finds about itself, the database, NATS and every node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response
from enginehouse.core.finding import has_problem
from enginehouse.core.ids import NodeId
from enginehouse.frontend.diagnosis import Diagnosis


class DoctorRoutes:
    def __init__(self, diagnosis: Diagnosis, own_node: Callable[[Request], Awaitable[NodeId]]) -> None:
        """`own_node` gives the node of the path, or refuses a caller that may not act for it."""
        self._diagnosis = diagnosis
        self._own_node = own_node

    async def look(self, _request: Request) -> Response:
        found = await self._diagnosis.look()
        return json_response({"needs_person": has_problem(found), "findings": found})

    async def reach(self, request: Request) -> Response:
        """Whether this frontend reaches the node that asks."""
        return json_response(await self._diagnosis.reach(await self._own_node(request)))
