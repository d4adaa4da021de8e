"""Logs of engines on a node, and of its worker, through the frontend: as lines, or followed as server-sent events.

The worker's server is asked with a ticket; its bytes are passed on as they come, bounded, and the stream ends when the
client leaves.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from enginehouse.core.errors import Invalid, NotFound, Unavailable, Upstream
from enginehouse.core.name import check_model_name
from enginehouse.core.ticket import PROGRAM_LOG
from enginehouse.frontend.fleet.node_http import NodeDoor, NodeDoors
from enginehouse.ports import Engine, EngineCall, EngineResponse

CONNECT_SECONDS, HEAD_SECONDS = 5.0, 10.0
MAX_LINES = 1000
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
MAX_ANSWER_BYTES = 16 * 1024 * 1024  # 1000 lines of a worker's longest


class NodeLogRoutes:
    def __init__(self, doors: NodeDoors, engine: Engine) -> None:
        self._doors = doors
        self._engine = engine

    async def logs(self, request: Request) -> Response:
        """Of the engine of a model."""
        model = check_model_name(str(request.path_params["model"]))
        count, is_followed = asked_lines(request)
        door = await self._doors.for_logs(str(request.path_params["id"]))
        return await self._answer(door, f"/v1/backend-logs/{quote(model, safe='')}", count, is_followed)

    async def of_worker(self, request: Request) -> Response:
        """Of the worker itself."""
        count, is_followed = asked_lines(request)
        door = await self._doors.for_logs(str(request.path_params["id"]), PROGRAM_LOG)
        return await self._answer(door, "/v1/worker-log", count, is_followed)

    async def _answer(self, door: NodeDoor, path: str, count: int, is_followed: bool) -> Response:
        answer = await self._ask(door, f"{path}?lines={count}" + ("&follow=1" if is_followed else ""))
        if is_followed:
            return StreamingResponse(_passed_on(answer), media_type="text/event-stream", headers=STREAM_HEADERS)
        try:
            body = bytearray()
            async for chunk in answer.chunks():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise Upstream(f"cannot read logs of {door.name}: the answer of its worker is too large")
            return Response(bytes(body), media_type="application/json")
        finally:
            await answer.close()

    async def _ask(self, door: NodeDoor, path: str) -> EngineResponse:
        status = 0
        for ticket in door.tickets:
            call = EngineCall(address=door.address, key=ticket, method="GET", path=path)
            try:
                answer = await self._engine.send(call, connect_seconds=CONNECT_SECONDS, head_seconds=HEAD_SECONDS)
            except Unavailable as error:
                raise Unavailable(
                    f"cannot read logs of {door.name}: its worker does not answer at {door.address}; check that it "
                    "runs and that its HTTP port can be reached",
                    code="node_unreachable",
                ) from error
            if answer.status == 200:
                return answer
            status = answer.status
            await answer.close()
        if status == 404:
            raise NotFound(
                f"cannot read the log of the worker of {door.name}: it keeps none for operators; upgrade the worker"
            )
        raise Upstream(f"cannot read logs of {door.name}: its worker answered with status {status}")


def asked_lines(request: Request) -> tuple[int, bool]:
    """How many lines are asked for, and whether those that follow too."""
    lines, follow = request.query_params.get("lines", ""), request.query_params.get("follow", "")
    if lines and not (lines.isascii() and lines.isdecimal() and len(lines) < 9):
        raise Invalid(f"cannot show {lines[:20]!r} lines: it must be a number", code="invalid_value", param="lines")
    return min(int(lines or MAX_LINES), MAX_LINES), follow in ("1", "true")


async def _passed_on(answer: EngineResponse) -> AsyncIterator[bytes]:
    try:
        with contextlib.suppress(Upstream):  # the worker ended; the client sees the end and may ask again
            async for chunk in answer.chunks():
                yield chunk
    finally:
        await answer.close()
