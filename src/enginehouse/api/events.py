"""The stream of everything that changes: nodes, operations and models, as server-sent events.

An event's id is the store's time up to which everything has been told, the same on every frontend: a watcher that
comes back with `Last-Event-ID`, here or elsewhere, is first told what it missed, as it is now.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from enginehouse.api.requests import ABORT, SEND_BUFFER
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.operation import unknown_operation
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.events import Event, Events

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0  # shorter than any proxy's idle limit, and soon enough for a watcher to notice a dead server
WRITE_SECONDS = 20.0  # longer than any hiccup of a network
# A few seconds of a busy fleet. Left to itself the kernel keeps megabytes for each watcher that stands still, and it
# takes minutes until anybody notices.
ROOM_BYTES = 128 * 1024
_BYE = b"event: bye\ndata: {}\n\n"
_POSITION = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class EventRoutes:
    def __init__(self, board: Board, models: ModelViews, events: Events) -> None:
        self._board = board
        self._models = models
        self._events = events

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Until the client leaves, this frontend stops, or the client does not read."""
        request = Request(scope)
        only = request.query_params.get("operation", "")
        if "\x00" in only:
            raise unknown_operation(only)  # PostgreSQL cannot even be asked for it
        if only:
            await self._board.view(only)  # an unknown id is an error now, not a stream that never speaks
        since = _position(request.headers.get("last-event-id", ""))
        if bound := scope.get("state", {}).get(SEND_BUFFER):
            bound(ROOM_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(send, only, since))
                reading = group.create_task(_until_gone(receive))
                done, _ = await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
                for task in {writing, reading} - done:
                    task.cancel()
        except* (TimeoutError, EnginehouseError) as errors:
            # The head is out: a connection that ends before its time is what sends the client to look again.
            log.info("events.broken_off errors=%s", errors.exceptions)
            if abort := scope.get("state", {}).get(ABORT):
                abort()
                await asyncio.sleep(0)  # the server notices that the connection is gone before it looks for an end

    async def _write(self, send: Send, only: str, since: float | None) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-store"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with contextlib.aclosing(self.stream(only, since)) as chunks:
            async for chunk in chunks:
                # A client that reads nothing is not waited for: it finds the connection broken, comes back and looks.
                async with asyncio.timeout(WRITE_SECONDS):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def stream(self, only: str, since: float | None) -> AsyncGenerator[bytes, None]:
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
                        await watcher.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                if watcher.overflowed:
                    return  # it missed something: a watcher whose stream ends comes back and looks
                chunk = _of_one(watcher.take(), only) if only else watcher.take_chunk(_rendered)
                if chunk:
                    yield chunk
                if chunk.endswith(_BYE):
                    return

    async def _missed(self, since: float) -> list[bytes]:
        """What changed, as it is now. The id comes with the last one only: whoever is cut off before begins again."""
        missed = await self._board.changed_since(since)
        told = [Event(0.0, "node", node.id, msgspec.json.encode(node)) for node in missed.nodes]
        told += [Event(0.0, "operation", one.jobID, msgspec.json.encode(one)) for one in missed.operations]
        told += [Event(0.0, "model", model.name, msgspec.json.encode(model)) for model in await self._models.every()]
        # A node that was removed meanwhile has left nothing to tell of it: it is the one that is not named here.
        present = msgspec.json.encode({"nodes": missed.present})
        last = b"event: %s\ndata: %s\n\n" % (b"caught-up" if missed.is_all else b"overflow", present)
        return [*(_rendered(event) for event in told), b"id: %.6f\n" % missed.position + last]


def _rendered(event: Event) -> bytes:
    number = b"id: %.6f\n" % event.position if event.position else b""
    return number + b"event: %s\ndata: %s\n\n" % (event.kind.encode(), event.body)


def _of_one(events: Sequence[Event], only: str) -> bytes:
    return b"".join(_rendered(event) for event in events if event.id == only or event.kind == "bye")


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _position(text: str) -> float | None:
    return float(text) if _POSITION.fullmatch(text) else None
