"""Routes for operations: request, plan, list, cancel, retry, release and dismiss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from enginehouse.api.requests import (
    accepted_response,
    caller_of,
    is_true,
    json_response,
    limit_of,
    list_response,
    read_body,
    requester_of,
    stored_view,
)
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.ids import OperationId
from enginehouse.core.name import shown
from enginehouse.core.operation import ALL_OPERATIONS, ENDED, BackendRequest, OperationFilter, OperationKind
from enginehouse.core.reference import is_digest, parse_uri, shown_uri
from enginehouse.core.views import OperationSummary, OperationView
from enginehouse.frontend.operations.canary import Canaries
from enginehouse.frontend.operations.cancel import Cancellation
from enginehouse.frontend.operations.plan import Planner
from enginehouse.frontend.operations.request import Requests
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.summaries import Summaries

MAX_LISTED = 500
_MAX_ID = 64  # an id of an operation is shorter
_KINDS = get_args(OperationKind)
_STATUSES = ("open", *sorted(ENDED))
_OUTCOMES = {"succeeded": "completed", "partial": "failed", "superseded": "cancelled"}


class OperationTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """One node of an operation; None means all of them."""

    node: str | None = None


class HistoryRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An ended operation with LocalAI's keys, then ours."""

    id: str
    name: str
    jobID: str
    isBackend: bool
    nodeID: str = ""
    taskType: str
    outcome: str
    error: str = ""
    startedAt: str
    finishedAt: str = ""
    # Ours.
    kind: str
    status: str
    author: str
    nodes: object
    excluded: object


_ALIKE = set(HistoryRecord.__struct_fields__) & set(OperationView.__struct_fields__) - {"taskType"}


class OperationRoutes:
    def __init__(
        self,
        operations: Requests,
        cancellation: Cancellation,
        planner: Planner,
        board: Board,
        canaries: Canaries,
        summaries: Summaries,
    ) -> None:
        self._summaries = summaries
        self._canaries = canaries
        self._operations = operations
        self._cancellation = cancellation
        self._planner = planner
        self._board = board

    async def request(self, request: Request) -> Response:
        asked = await _requested(request)
        operation_id = await self._operations.request(asked, requester_of(request))
        return await accepted_response(self._board, operation_id)

    async def plan(self, request: Request) -> Response:
        return json_response(await self._planner.plan(await _requested(request)))

    async def every(self, request: Request) -> Response:
        limit, before, wanted = limit_of(request, MAX_LISTED), _before(request), _wanted(request)
        listed: Summaries | Board = self._board if is_true(request, "rows", "true") else self._summaries
        views: Sequence[OperationView | OperationSummary]
        if is_true(request, "all", "false"):
            views = await listed.page(limit, before, wanted)
            return await list_response(request, {"operations": views, **_next(views, limit)})
        if before:
            raise Invalid(
                "cannot use `before` with the list of open operations: it works with `all=true` and with the history",
                code="unsupported",
                param="before",
            )
        if wanted != ALL_OPERATIONS:
            raise Invalid(
                "cannot choose among the open operations: `kind`, `status` and `node` work with `all=true`",
                code="unsupported",
                param=next(name for name in ("kind", "status", "node") if getattr(wanted, name)),
            )
        # A load that failed on one node and succeeded on another counts as succeeded.
        shown_ones = ("queued", "running", "failed", "partial")
        views = [view for view in await listed.unfinished(limit) if view.status in shown_ones]
        return json_response({"operations": views})

    async def one(self, request: Request) -> Response:
        return json_response(await self._board.view(_id(request)))

    async def history(self, request: Request) -> Response:
        limit = limit_of(request, MAX_LISTED)
        views = await self._board.page(limit, _before(request), is_ended=True)
        return json_response({"operations": [_record(view) for view in views], **_next(views, limit)})

    async def cancel(self, request: Request) -> Response:
        where = await read_body(request, OperationTarget)
        await self._cancellation.cancel(_id(request), where.node, caller_of(request).name)
        view = await stored_view(self._board, _id(request))
        return json_response({"success": True, "message": "Operation cancelled", "operation": view})

    async def retry(self, request: Request) -> Response:
        where = await read_body(request, OperationTarget)
        operation_id = await self._cancellation.retry(_id(request), where.node, requester_of(request))
        return await accepted_response(self._board, operation_id)

    async def release(self, request: Request) -> Response:
        await self._canaries.release(_id(request), caller_of(request).name)
        view = await stored_view(self._board, _id(request))
        return json_response({"success": True, "message": "Operation released", "operation": view})

    async def dismiss(self, request: Request) -> Response:
        await self._cancellation.dismiss(_id(request))
        return json_response({"success": True, "message": "Operation dismissed"})


async def _requested(request: Request) -> BackendRequest:
    asked = await read_body(request, BackendRequest)
    if asked.kind == "install" and asked.uri:
        check_sha256(asked.uri, asked.sha256)
    return asked


def check_sha256(uri: str, sha256: str) -> None:
    """Refuse an archive without a digest here, because every worker would refuse it."""
    is_good = is_digest(f"sha256:{sha256.strip().lower().removeprefix('sha256:')}")
    if not is_good and (sha256 or parse_uri(uri).kind == "archive"):
        raise Invalid(
            f"cannot install from {shown_uri(uri)}: give the sha256 of the archive, 64 hexadecimal digits",
            code="invalid_uri",
            param="sha256",
        )


def _id(request: Request) -> OperationId:
    return OperationId(request.path_params["id"])


def _record(view: OperationView) -> HistoryRecord:
    return HistoryRecord(
        **{field: getattr(view, field) for field in _ALIKE},
        taskType="deletion" if view.isDeletion else view.taskType.lower(),
        outcome=_OUTCOMES.get(view.status, view.status),
        startedAt=view.createdAt,
    )


def _before(request: Request) -> OperationId | None:
    """The id of the last operation of the previous page."""
    given = request.query_params.get("before", "")
    if len(given) > _MAX_ID or not given.isprintable():
        raise NotFound(f"cannot list operations before {shown(given)}: there is no such operation", param="before")
    return OperationId(given) if given else None


def _wanted(request: Request) -> OperationFilter:
    kind, status, node = (request.query_params.get(name, "") for name in ("kind", "status", "node"))
    for name, given, known in (("kind", kind, _KINDS), ("status", status, _STATUSES)):
        if given and given not in known:
            raise Invalid(
                f"cannot use {shown(given)} as `{name}`: it must be one of {', '.join(known)}",
                code="invalid_name",
                param=name,
            )
    return OperationFilter(kind=kind, status=status, node=node)


def _next(views: Sequence[OperationView | OperationSummary], limit: int) -> dict[str, str]:
    """Where the next page starts; empty on the last page."""
    return {"next": views[-1].jobID} if len(views) == limit else {}
