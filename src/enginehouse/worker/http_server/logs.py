"""Logs of engines over HTTP: LocalAI's three routes, and a stream of events for frontends of ours.

A follower is answered from the rings of `engines.logs`, so a slow one holds up nobody. Followers end with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import msgspec
from aiohttp import WSMsgType, web

from enginehouse.core.log_line import LogLine
from enginehouse.host.blocking import in_thread
from enginehouse.host.program_log import LogTail
from enginehouse.worker.engines.logs import MAX_LINES, EngineLogs
from enginehouse.worker.http_server.uploads import plain

LOOK_SECONDS = 0.25
KEEP_ALIVE_SECONDS = 5.0
PING_SECONDS = 30.0  # LocalAI's
MAX_FOLLOWERS = 32
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}


class LogAnswers:
    def __init__(self, logs: EngineLogs, program_log: Path | None = None, secrets: Collection[str] = ()) -> None:
        self._logs = logs
        self._program_log = program_log
        self._secrets = secrets
        self._stopped = asyncio.Event()
        self._followers = 0

    def start(self) -> None:
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def answer(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        if request.method != "GET":
            return plain(405, "method not allowed\n")
        if not name:
            return _json(self._logs.models())
        asked = parse_qs(urlsplit(request.raw_path).query)
        limit = _count(asked.get("lines", [""])[0])
        is_socket = name.endswith("/ws") and request.headers.get("Upgrade", "").lower() == "websocket"
        if not is_socket and asked.get("follow", [""])[0] not in ("1", "true"):
            return _json(self._logs.lines(name, limit=limit))
        if self._followers >= MAX_FOLLOWERS:
            return plain(503, "too many followers\n")
        self._followers += 1
        try:
            if is_socket:
                return await self._socket(request, name.removesuffix("/ws"))
            return await self._stream(request, name, limit)
        finally:
            self._followers -= 1

    async def program(self, request: web.BaseRequest) -> web.StreamResponse:
        """The log of the worker itself, like that of an engine."""
        if request.method != "GET":
            return plain(405, "method not allowed\n")
        if self._program_log is None:
            return plain(404, "this worker keeps no log\n")
        asked = parse_qs(urlsplit(request.raw_path).query)
        limit = _count(asked.get("lines", [""])[0])
        tail = LogTail(self._program_log, "worker", self._secrets)
        first = await in_thread(tail.last, limit)
        if asked.get("follow", [""])[0] not in ("1", "true"):
            return _json(first)
        if self._followers >= MAX_FOLLOWERS:
            return plain(503, "too many followers\n")
        self._followers += 1
        try:
            response = web.StreamResponse(headers=_EVENTS)
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # the follower has left
                await self._write(response, first, lambda: in_thread(tail.added))
            return response
        finally:
            self._followers -= 1

    async def _stream(self, request: web.BaseRequest, name: str, limit: int) -> web.StreamResponse:
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # the follower has left
            await self._write_events(response, name, limit)
        return response

    async def _write_events(self, response: web.StreamResponse, name: str, limit: int) -> None:
        positions: dict[str, int] = {}

        async def added() -> list[LogLine]:
            return self._logs.lines(name, positions)

        await self._write(response, self._logs.lines(name, positions, limit), added)

    async def _write(
        self, response: web.StreamResponse, lines: list[LogLine], added: Callable[[], Awaitable[list[LogLine]]]
    ) -> None:
        waited = KEEP_ALIVE_SECONDS  # so that the head and a first comment go out at once
        while True:
            if lines:
                await response.write(b"".join(b"data: %s\n\n" % msgspec.json.encode(line) for line in lines))
                waited = 0.0
            elif waited >= KEEP_ALIVE_SECONDS:
                await response.write(b": keep-alive\n\n")
                waited = 0.0
            if await self._is_over():
                return
            waited += LOOK_SECONDS
            lines = await added()

    async def _socket(self, request: web.BaseRequest, name: str) -> web.StreamResponse:
        socket = web.WebSocketResponse(heartbeat=PING_SECONDS)
        await socket.prepare(request)
        positions: dict[str, int] = {}
        first = msgspec.to_builtins(self._logs.lines(name, positions))
        with contextlib.suppress(ConnectionError):  # the follower has left
            await socket.send_json({"type": "initial", "lines": first})
            await self._send_lines(socket, name, positions)
            await socket.close()
        return socket

    async def _send_lines(self, socket: web.WebSocketResponse, name: str, positions: dict[str, int]) -> None:
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(_until_closed(socket))
            try:
                while not (reading.done() or await self._is_over()):
                    for line in self._logs.lines(name, positions):
                        if reading.done():
                            return
                        await socket.send_json({"type": "line", "line": msgspec.to_builtins(line)})
            except ConnectionError:
                return
            finally:
                reading.cancel()

    async def _is_over(self) -> bool:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await self._stopped.wait()
        except TimeoutError:
            return False
        return True


async def _until_closed(socket: web.WebSocketResponse) -> None:
    async for message in socket:
        if message.type in (WSMsgType.CLOSE, WSMsgType.ERROR):
            return


def _count(text: str) -> int:
    return min(int(text), MAX_LINES) if text.isascii() and text.isdecimal() and len(text) < 9 else MAX_LINES


def _json(value: list[str] | list[LogLine]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value) + b"\n", content_type="application/json")
