"""The operator's routes for nodes: list, approve, drain, resume and remove them, and manage the backends of one."""

from __future__ import annotations

from typing import get_args

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.operations import check_sha256
from enginehouse.api.requests import (
    accepted_response,
    caller_of,
    is_true,
    json_response,
    limit_of,
    list_response,
    read_body,
    requester_of,
)
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.fingerprint import fingerprint_of
from enginehouse.core.ids import NodeId
from enginehouse.core.name import check_name, shown
from enginehouse.core.node import NodeQuery, Status
from enginehouse.core.operation import BackendKind, BackendRequest
from enginehouse.frontend.fleet.admission import Rejections
from enginehouse.frontend.fleet.labels import NodeLabels
from enginehouse.frontend.fleet.node_views import NodeViews
from enginehouse.frontend.fleet.nodes import Nodes
from enginehouse.frontend.operations.cancel import Cancellation
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.views import render_node, render_time

MAX_LISTED = 1000
_MAX_ID = 64  # an id of a node is shorter
_STATUSES: tuple[Status, ...] = get_args(Status)


class NodeBackend(Struct, frozen=True, forbid_unknown_fields=True):
    """LocalAI's body. `backend_galleries` is refused, because the galleries are a setting of the cluster."""

    backend: str = ""
    uri: str = ""
    name: str = ""
    alias: str = ""
    force: bool = False
    backend_galleries: str = ""


class ApprovalRequest(Struct, frozen=True):
    fingerprint: str = ""  # of the key that the node must have


class NodeRoutes:
    def __init__(
        self,
        nodes: Nodes,
        views: NodeViews,
        operations: Requests,
        cancellation: Cancellation,
        board: Board,
        labels: NodeLabels,
        rejections: Rejections,
    ) -> None:
        self._rejections = rejections
        self._views = views
        self._labels = labels
        self._nodes = nodes
        self._operations = operations
        self._cancellation = cancellation
        self._board = board

    async def every(self, request: Request) -> Response:
        return await list_response(request, await self._views.every(_asked(request)))

    async def one(self, request: Request) -> Response:
        return json_response(await self._views.one(_name(request)))

    async def approve(self, request: Request) -> Response:
        asked = await read_body(request, ApprovalRequest)
        node, now = await self._nodes.approve(_name(request), asked.fingerprint)
        return json_response({**msgspec.to_builtins(render_node(node, now)), "message": "node approved"})

    async def remove(self, request: Request) -> Response:
        force = is_true(request, "force", "false")
        name = await self._cancellation.remove_node(_name(request), caller_of(request).name, force=force)
        return json_response({"message": "node deregistered", "name": name})

    async def reject(self, request: Request) -> Response:
        node = await self._rejections.reject(_name(request), caller_of(request).name)
        return json_response({"message": "node rejected", "id": node.id, "name": node.name})

    async def rejected(self, _request: Request) -> Response:
        return json_response(
            [
                {
                    "name": one.name,
                    "fingerprint": fingerprint_of(one.public_key),
                    "public_key": one.public_key,
                    "rejected_at": render_time(one.rejected_at),
                }
                for one in await self._rejections.every()
            ]
        )

    async def take_back(self, request: Request) -> Response:
        await self._rejections.take_back(_name(request), caller_of(request).name)
        return Response(status_code=204)

    async def drain(self, request: Request) -> Response:
        operation_id = await self._operations.request_drain(_name(request), requester_of(request))
        # LocalAI's message; that of an operation is its status.
        return await accepted_response(self._board, operation_id, message="node set to draining")

    async def resume(self, request: Request) -> Response:
        node = await self._nodes.resume(_name(request))
        return json_response({"message": "node resumed", "name": node.name})

    async def labels(self, request: Request) -> Response:
        return json_response(await self._labels.get(_name(request)))

    async def set_labels(self, request: Request) -> Response:
        wanted = await read_body(request, dict[str, str])
        change = self._labels.merge if request.method == "PATCH" else self._labels.replace
        return json_response(await change(_name(request), wanted))

    async def remove_label(self, request: Request) -> Response:
        await self._labels.remove(_name(request), str(request.path_params["key"]))
        return Response(status_code=204)

    async def backends(self, request: Request) -> Response:
        return json_response((await self._views.one(_name(request))).backends)

    async def install(self, request: Request) -> Response:
        return await self._request(request, "install")

    async def upgrade(self, request: Request) -> Response:
        return await self._request(request, "upgrade")

    async def delete(self, request: Request) -> Response:
        return await self._request(request, "delete")

    async def _request(self, request: Request, kind: BackendKind) -> Response:
        asked = await read_body(request, NodeBackend)
        if asked.backend_galleries:
            raise Invalid(
                "cannot use galleries from a request: configure them with --backend-galleries",
                code="unsupported",
                param="backend_galleries",
            )
        if not asked.backend and not (asked.uri and asked.name):
            raise Invalid(
                f"cannot {kind} a backend: the request names none. Give a backend, or a uri and a name",
                code="invalid_name",
                param="backend",
            )
        if kind == "install" and asked.uri:
            check_sha256(asked.uri, "")  # LocalAI's body has no sha256
        by = requester_of(request)
        wanted = BackendRequest(
            kind=kind,
            name=(asked.name if asked.uri else "") or asked.backend,
            nodes=(_name(request),),
            uri=asked.uri,
            alias=asked.alias,
            force=asked.force or kind == "delete",  # LocalAI's route asks nothing
        )
        operation_id = await self._operations.request(wanted, by)
        answer = {
            "jobID": operation_id,
            "statusUrl": f"/backends/jobs/{operation_id}",
            "message": f"{kind} of {wanted.name} was accepted",
        }
        return json_response(answer, 202)


def _asked(request: Request) -> NodeQuery:
    """The part of the list that is asked for; without parameters, all of it."""
    given = request.query_params
    status, name, after = given.get("status"), given.get("name", ""), given.get("after", "")
    if status is not None and status not in _STATUSES:
        raise Invalid(
            f"cannot use {shown(status)} as `status`: use {', '.join(_STATUSES)}", code="invalid_name", param="status"
        )
    # PostgreSQL refuses a query with NUL.
    if len(after) > _MAX_ID or not after.isprintable():
        raise NotFound(f"cannot list nodes after {shown(after)}: there is no such node", param="after")
    limit = limit_of(request, MAX_LISTED) if "limit" in given else None
    return NodeQuery(limit=limit, after=NodeId(after), status=status, name=check_name(name, "node") if name else "")


def _name(request: Request) -> str:
    return str(request.path_params["id"])
