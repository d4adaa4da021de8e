"""LocalAI's routes to install, upgrade and delete backends, and its view of a job.

They create ordinary operations, which are listed, followed and cancelled like any other. Unlike in LocalAI, an unknown
job is a 404, and a refused request is not carried out.
"""

from __future__ import annotations

from msgspec import Struct, field
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import json_response, read_body, requester_of
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import OperationId
from enginehouse.core.operation import BackendKind, BackendRequest
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeRow, OperationView
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.watching.board import Board


class Apply(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    force: bool = False


class JobStatus(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An operation with LocalAI's keys."""

    deletion: bool
    file_name: str
    error: str = ""
    processed: bool
    message: str
    progress: float
    phase: str = ""
    current_bytes: int = 0
    total_bytes: int = 0
    file_size: str
    downloaded_size: str
    gallery_element_name: str
    cancelled: bool
    cancellable: bool
    nodes: list[NodeRow] = field(default_factory=list)


class BackendJobRoutes:
    def __init__(self, operations: Requests, galleries: Galleries, board: Board) -> None:
        self._operations = operations
        self._galleries = galleries
        self._board = board

    async def apply(self, request: Request) -> Response:
        asked = await read_body(request, Apply)
        metas = self._galleries.metas_of(asked.id)
        if metas:
            refused = Conflict(
                f"cannot install {asked.id} on every node: it is a build for one kind of hardware; install {metas[0]}, "
                "which chooses the right build on each node, or name a node",
                code="concrete_backend_requires_target",
                param="id",
            )
            refused.details["meta_alternative"] = metas[0]
            raise refused
        return await self._request(request, "install", asked.id, force=asked.force)

    async def upgrade(self, request: Request) -> Response:
        return await self._request(request, "upgrade", str(request.path_params["name"]))

    async def delete(self, request: Request) -> Response:
        return await self._request(request, "delete", str(request.path_params["name"]), force=True)

    async def _request(self, request: Request, kind: BackendKind, name: str, *, force: bool = False) -> Response:
        by = requester_of(request)
        wanted = BackendRequest(kind=kind, name=name, force=force)
        operation_id = await self._operations.request(wanted, by)
        address = f"{request.url.scheme}://{request.url.netloc}/backends/jobs/{operation_id}"
        return json_response({"id": operation_id, "status_url": address})

    async def job(self, request: Request) -> Response:
        return json_response(job_status(await self._board.view(OperationId(request.path_params["id"]))))


def job_status(view: OperationView) -> JobStatus:
    total, done = view.totalBytes, view.currentBytes
    return JobStatus(
        deletion=view.isDeletion,
        file_name=next((row.file_name for row in view.nodes if row.state == "running" and row.file_name), ""),
        error=view.error,
        processed=not view.cancellable,
        message="completed" if view.status == "succeeded" else view.message,
        progress=float(view.progress),
        phase=view.phase,
        current_bytes=done,
        total_bytes=total,
        file_size=format_bytes(total) if total else "",
        downloaded_size=format_bytes(done) if done else "",
        gallery_element_name=view.name,
        cancelled=view.status == "cancelled",
        cancellable=view.cancellable,
        nodes=view.nodes,
    )
