"""Routes for operations, and the stream of everything that changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Literal

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from enginehouse.api.app import Entry, caller_of, json_response, read_body
from enginehouse.core.errors import Invalid
from enginehouse.core.name import shown
from enginehouse.frontend.board import Board
from enginehouse.frontend.events import Event, Events
from enginehouse.frontend.operations import BackendWish, Operations

KEEP_ALIVE_SECONDS = 5.0  # shorter than any proxy's idle limit, and soon enough for a watcher to notice a dead server
MAX_LISTED = 500


class OperationRequest(Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["install", "upgrade", "delete"]
    name: str
    nodes: tuple[str, ...] | None = None
    force: bool = False


class OperationRoutes:
    def __init__(self, operations: Operations, board: Board, events: Events) -> None:
        self._operations = operations
        self._board = board
        self._events = events

    def entries(self) -> list[Entry]:
        return [
            Entry(
                method="POST",
                path="/api/operations",
                role="admin",
                summary="Install, upgrade or delete a backend on nodes.",
                call=self.request,
                body=OperationRequest,
                status=202,
            ),
            Entry(
                method="GET",
                path="/api/operations",
                role="admin",
                summary="Operations, newest first: open and failed ones, or `all=true`.",
                call=self.every,
            ),
            Entry(method="GET", path="/api/operations/{id}", role="admin", summary="One operation.", call=self.one),
            Entry(
                method="GET",
                path="/api/events",
                role="admin",
                summary="Every change, as server-sent events; `operation=ID` for those of one operation.",
                call=self.events,
            ),
        ]

    async def request(self, request: Request) -> Response:
        asked = await read_body(request, OperationRequest)
        wish = BackendWish(
            kind=asked.kind, name=asked.name, author=caller_of(request).name, nodes=asked.nodes, force=asked.force
        )
        operation_id = await self._operations.request(wish)
        return json_response(await self._board.view(operation_id), 202)

    async def every(self, request: Request) -> Response:
        every = request.query_params.get("all") in ("true", "1")
        views = await self._board.recent(_limit(request), every=every)
        if not every:
            # A load that went to another node after a failure has failed nowhere that matters.
            views = [view for view in views if view.status in ("queued", "running", "failed", "partial")]
        return json_response({"operations": views})

    async def one(self, request: Request) -> Response:
        return json_response(await self._board.view(str(request.path_params["id"])))

    async def events(self, request: Request) -> Response:
        only = request.query_params.get("operation", "")
        if only:
            await self._board.view(only)  # an unknown id is an error now, not a stream that never speaks
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(only), media_type="text/event-stream", headers=headers)

    async def _stream(self, only: str) -> AsyncIterator[bytes]:
        with self._events.watch() as watcher:
            # Watching begins before the first look, so nothing falls between the two.
            yield b"event: hello\ndata: {}\n\n"
            if only:
                # Through the board, which sees to it that nothing older is told after it.
                await self._board.operations_changed([only])
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        event = await watcher.queue.get()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                if not only or event.id == only:
                    yield _rendered(event)
                if watcher.overflowed or event.kind == "bye":
                    # It missed something, or this frontend stops: a watcher whose stream ends comes back and looks.
                    return


def _rendered(event: Event) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event.number, event.kind.encode(), event.body)


def _limit(request: Request) -> int:
    given = request.query_params.get("limit", "50")
    # Nine digits: Python refuses to read numbers of thousands, and not as an error of ours.
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MAX_LISTED:
        raise Invalid(
            f"cannot list {shown(given)} operations: `limit` is a number from 1 to {MAX_LISTED}",
            code="invalid_name",
            param="limit",
        )
    return int(given)
