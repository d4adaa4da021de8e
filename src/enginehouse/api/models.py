"""Routes for models: list, load, unload and delete for operators, and OpenAI's `/v1/models`."""

from __future__ import annotations

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.accounts import check_model
from enginehouse.api.requests import accepted_response, caller_of, json_response, read_body, requester_of
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.serving.router import model_not_found
from enginehouse.frontend.watching.board import Board


class ModelTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """The node to load on or unload from; None means the best one for a load, and every one for an unload."""

    node: str | None = None


class ModelRoutes:
    def __init__(self, models: ModelViews, loader: Loader, operations: Requests, board: Board) -> None:
        self._models = models
        self._loader = loader
        self._operations = operations
        self._board = board

    async def every(self, _request: Request) -> Response:
        return json_response(await self._models.every())

    async def load(self, request: Request) -> Response:
        where = await read_body(request, ModelTarget)
        name = str(request.path_params["name"])
        by = requester_of(request)
        found = await self._loader.request(name, where.node, by.author, by.key)
        if isinstance(found, str):
            return await accepted_response(self._board, found)
        views = {view.name: view for view in await self._models.every()}
        return json_response({"ready": True, "replicas": views[name].replicas})

    async def unload(self, request: Request) -> Response:
        where = await read_body(request, ModelTarget)
        name = str(request.path_params["name"])
        operation_id = await self._operations.request_unload(name, where.node, requester_of(request))
        return await accepted_response(self._board, operation_id)

    async def delete(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        operation_id = await self._operations.request_model_delete(name, requester_of(request))
        return await accepted_response(self._board, operation_id)

    async def listed(self, request: Request) -> Response:
        allowance = caller_of(request).allowance
        served = await self._served()
        if allowance is not None:
            served = [one for one in served if allowance.admits(str(one["id"]))]
        return json_response({"object": "list", "data": served})

    async def described(self, request: Request) -> Response:
        name = str(request.path_params["name"])
        check_model(caller_of(request), name)
        for model in await self._served():
            if model["id"] == name:
                return json_response(model)
        raise model_not_found(name)

    async def _served(self) -> list[dict[str, object]]:
        return [
            {"id": view.name, "object": "model", "created": int(view.created_at), "owned_by": "enginehouse"}
            for view in await self._models.every()
            if view.state != "available"
        ]
