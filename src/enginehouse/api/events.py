"""The event stream: every change of a node, operation or model, and the pulse, as server-sent events.

A stream begins with all of the open operations; the events after that have the rows that changed. The id of an event is
a time of the store up to which every change was sent, so it means the same on every frontend. A client that reconnects
to any frontend with `Last-Event-ID` first gets the current state of what changed since then.
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

from enginehouse.api.intake import until_disconnect
from enginehouse.api.requests import ABORT, SEND_BUFFER
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import OperationId
from enginehouse.core.operation import unknown_operation
from enginehouse.frontend.serving.models import ModelViews
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.events import Event, Events
from enginehouse.frontend.watching.pulse import Pulse

log = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 5.0  # below the idle timeout of proxies, and short enough for a client to notice a dead server
WRITE_SECONDS = 20.0  # longer than a short interruption of the network
# A few seconds of events of a busy cluster. By default the kernel buffers megabytes for each client that does not read,
# and it takes minutes until the write fails.
SEND_BUFFER_BYTES = 128 * 1024
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_HELLO = b"event: hello\ndata: {}\n\n"
_BYE = b"event: bye\ndata: {}\n\n"
_POSITION = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")


class EventRoutes:
    def __init__(self, board: Board, models: ModelViews, events: Events, pulse: Pulse) -> None:
        self._board = board
        self._models = models
        self._events = events
        self._pulse = pulse

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client disconnects, this frontend stops, or the client stops reading."""
        request = Request(scope)
        only = OperationId(request.query_params.get("operation", ""))
        if "\x00" in only:
            raise unknown_operation(only)  # PostgreSQL rejects it in a query
        if only:
            await self._board.view(only)  # an unknown id is an error, not a silent stream
        if scope["method"] == "HEAD":
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": b""})
            return
        since = _position(request.headers.get("last-event-id", ""))
        if bound := scope.get("state", {}).get(SEND_BUFFER):
            bound(SEND_BUFFER_BYTES)
        try:
            async with asyncio.TaskGroup() as group:
                writing = group.create_task(self._write(send, only, since))
                reading = group.create_task(until_disconnect(receive))
                done, _ = await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
                for task in {writing, reading} - done:
                    task.cancel()
        except* (TimeoutError, EnginehouseError) as errors:
            # The head is sent, so only a broken connection can tell the client to reconnect and look again.
            log.info("events.aborted errors=%s", errors.exceptions)
            if abort := scope.get("state", {}).get(ABORT):
                abort()
                await asyncio.sleep(0)  # lets the server see that the connection is closed before the response ends

    async def _write(self, send: Send, only: OperationId, since: float | None) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with contextlib.aclosing(self.stream(only, since)) as chunks:
            async for chunk in chunks:
                # After this the connection is cut; the client reconnects and reads what it missed.
                async with asyncio.timeout(WRITE_SECONDS):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def stream(self, only: OperationId, since: float | None) -> AsyncGenerator[bytes, None]:
        with self._events.watch() as watcher:
            # Watching begins before the first read, so no change is lost in between.
            if only:
                yield _HELLO
                # Through the board, which never sends an older state after a newer one.
                await self._board.show([only])
                watcher.skip()  # its state now is that after the events so far
                view = self._board.known(only) or await self._board.view(only)
                yield _rendered(Event(0.0, "operation", only, msgspec.json.encode(view)))
            elif since is None:
                yield _HELLO + self._beginning()
            else:
                yield _HELLO
                for missed in await self._missed(since):
                    yield missed
            if not only and (figures := await self._pulse.beginning()):
                yield _rendered(Event(0.0, "pulse", "", figures))
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await watcher.wait()
                except TimeoutError:
                    yield b": keep-alive\n\n"
                    continue
                if watcher.overflowed:
                    return  # events were dropped: the client reconnects and reads what it missed
                chunk = _of_one(watcher.take(), only) if only else watcher.take_chunk(_rendered)
                if chunk:
                    yield chunk
                if chunk.endswith(_BYE):
                    return

    def _beginning(self) -> bytes:
        """All open operations; `overflow` if there are so many that the client must list them."""
        found = self._board.known_open()
        if found is None:
            return b"event: overflow\ndata: {}\n\n"
        events = (Event(0.0, "operation", one.jobID, msgspec.json.encode(one)) for one in found)
        return b"".join(map(_rendered, events))

    async def _missed(self, since: float) -> list[bytes]:
        """The current state of what changed. Only the last event has an id: a client cut off before it starts again."""
        missed = await self._board.changed_since(since)
        sent = [Event(0.0, "node", node.id, msgspec.json.encode(node)) for node in missed.nodes]
        sent += [Event(0.0, "operation", one.jobID, msgspec.json.encode(one)) for one in missed.operations]
        sent += [Event(0.0, "model", model.name, msgspec.json.encode(model)) for model in await self._models.every()]
        # A removed node leaves no row to send; the client removes the nodes that are not named here.
        present = msgspec.json.encode({"nodes": missed.present})
        last = b"event: %s\ndata: %s\n\n" % (b"caught-up" if missed.is_all else b"overflow", present)
        return [*(_rendered(event) for event in sent), b"id: %.6f\n" % missed.position + last]


def _rendered(event: Event) -> bytes:
    number = b"id: %.6f\n" % event.position if event.position else b""
    return number + b"event: %s\ndata: %s\n\n" % (event.kind.encode(), event.body)


def _of_one(events: Sequence[Event], only: OperationId) -> bytes:
    return b"".join(_rendered(event) for event in events if event.id == only or event.kind == "bye")


def _position(text: str) -> float | None:
    return float(text) if _POSITION.fullmatch(text) else None
