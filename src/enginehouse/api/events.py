"""The stream of everything that changes: nodes, operations and models, as server-sent events.

An event's id is the store's time up to which everything has been told, the same on every frontend: a watcher that
comes back with `Last-Event-ID`, here or elsewhere, is first told what it missed, as it is now.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from enginehouse.api.app import Entry
from enginehouse.frontend.board import Board
from enginehouse.frontend.events import Event, Events
from enginehouse.frontend.models import Models

KEEP_ALIVE_SECONDS = 5.0  # shorter than any proxy's idle limit, and soon enough for a watcher to notice a dead server
_POSITION = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class EventRoutes:
    def __init__(self, board: Board, models: Models, events: Events) -> None:
        self._board = board
        self._models = models
        self._events = events

    def entries(self) -> list[Entry]:
        return [
            Entry(
                method="GET",
                path="/api/events",
                role="admin",
                summary="Every change, as server-sent events; `operation=ID` for those of one operation.",
                call=self.events,
            ),
        ]

    async def events(self, request: Request) -> Response:
        only = request.query_params.get("operation", "")
        if only:
            await self._board.view(only)  # an unknown id is an error now, not a stream that never speaks
        since = _position(request.headers.get("last-event-id", ""))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._stream(only, since), media_type="text/event-stream", headers=headers)

    async def _stream(self, only: str, since: float | None) -> AsyncIterator[bytes]:
        with self._events.watch() as watcher:
            # Watching begins before the first look, so nothing falls between the two.
            yield b"event: hello\ndata: {}\n\n"
            if only:
                # Through the board, which sees to it that nothing older is told after it.
                await self._board.operations_changed([only])
            elif since is not None:
                for missed in await self._missed(since):
                    yield missed
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        event = await watcher.queue.get()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                if not only or event.id == only or event.kind == "bye":
                    yield _rendered(event)
                if watcher.overflowed or event.kind == "bye":
                    # It missed something, or this frontend stops: a watcher whose stream ends comes back and looks.
                    return

    async def _missed(self, since: float) -> list[bytes]:
        """What changed, as it is now. The id comes with the last one only: whoever is cut off before begins again."""
        missed = await self._board.changed_since(since)
        told = [Event(0.0, "node", node.id, msgspec.json.encode(node)) for node in missed.nodes]
        told += [Event(0.0, "operation", one.jobID, msgspec.json.encode(one)) for one in missed.operations]
        told += [Event(0.0, "model", model.name, msgspec.json.encode(model)) for model in await self._models.every()]
        last = b"event: caught-up\ndata: {}\n\n" if missed.is_all else b"event: overflow\ndata: {}\n\n"
        return [*(_rendered(event) for event in told), b"id: %.6f\n" % missed.position + last]


def _rendered(event: Event) -> bytes:
    number = b"id: %.6f\n" % event.position if event.position else b""
    return number + b"event: %s\ndata: %s\n\n" % (event.kind.encode(), event.body)


def _position(text: str) -> float | None:
    return float(text) if _POSITION.fullmatch(text) else None
