"""Routes for wanted replicas: LocalAI's scheduling API, the explanation of a placement, the state of a load."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response, read_body
from enginehouse.core.errors import NotFound
from enginehouse.core.schedule import ScheduleRequest
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.schedules import Schedules, ScheduleState
from enginehouse.frontend.watching.views import render_time


class ScheduleRoutes:
    def __init__(self, schedules: Schedules, loader: Loader) -> None:
        self._schedules = schedules
        self._loader = loader

    async def every(self, _request: Request) -> Response:
        return json_response([_rendered(one) for one in await self._schedules.every()])

    async def one(self, request: Request) -> Response:
        return json_response(_rendered(await self._schedules.get(str(request.path_params["model"]))))

    async def put(self, request: Request) -> Response:
        return json_response(_rendered(await self._schedules.put(await read_body(request, ScheduleRequest))))

    async def remove(self, request: Request) -> Response:
        await self._schedules.remove(str(request.path_params["model"]))
        return Response(status_code=204)

    async def explain(self, request: Request) -> Response:
        return json_response(await self._schedules.explain(str(request.path_params["name"])))

    async def load_status(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        found = await self._loader.load_status(name)
        if found is None:
            raise NotFound(f"cannot show the load of {name}: it is not being loaded", code="not_found", param="model")
        return json_response(found)


def _rendered(state: ScheduleState) -> dict[str, Any]:
    """LocalAI's object: the selector is a text with JSON in it, and empty fields are left out."""
    one, info = state.schedule, state.info
    plain = {
        "id": one.model_name,
        "model_name": one.model_name,
        "min_replicas": one.min_replicas,
        "max_replicas": one.max_replicas,
        "unsatisfiable_ticks": info.failures,
        "created_at": render_time(one.created_at),
        "updated_at": render_time(one.updated_at),
    }
    selector = msgspec.json.encode(one.node_selector).decode() if one.node_selector else ""
    optional = {
        "node_selector": selector,
        "spread_all": one.spread_all,
        "route_policy": one.route_policy,
        "balance_abs_threshold": one.balance_abs_threshold,
        "balance_rel_threshold": one.balance_rel_threshold,
        "min_prefix_match": one.min_prefix_match,
        "idle_seconds": one.idle_seconds,
        "unsatisfiable_until": render_time(info.retry_at) if info.retry_at else "",
        "reason": info.reason,
    }
    return {**plain, **{key: value for key, value in optional.items() if value}}
