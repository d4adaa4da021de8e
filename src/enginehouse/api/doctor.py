"""The route of the doctor: what this frontend finds about itself, the database, NATS and every node."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response
from enginehouse.core.finding import has_problem
from enginehouse.frontend.diagnosis import Diagnosis


class DoctorRoutes:
    def __init__(self, diagnosis: Diagnosis) -> None:
        self._diagnosis = diagnosis

    async def look(self, _request: Request) -> Response:
        found = await self._diagnosis.look()
        return json_response({"needs_person": has_problem(found), "findings": found})
