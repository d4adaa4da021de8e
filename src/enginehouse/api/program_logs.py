"""The logs of the programs on the server side: of the frontend that answers, and of the NATS server beside it.

They are read from the files that these programs write, bounded and without secrets. A follower ends with the frontend.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from enginehouse.api.node_logs import STREAM_HEADERS, asked_lines
from enginehouse.api.requests import json_response
from enginehouse.core.errors import NotFound
from enginehouse.core.log_line import LogLine
from enginehouse.core.name import shown
from enginehouse.host.blocking import in_thread
from enginehouse.host.program_log import LogTail

LOOK_SECONDS = 0.25
KEEP_ALIVE_SECONDS = 5.0


class ProgramLogRoutes:
    def __init__(self, files: dict[str, Path], secrets: Collection[str], is_stopping: Callable[[], bool]) -> None:
        self._files = files
        self._secrets = secrets
        self._is_stopping = is_stopping

    async def logs(self, request: Request) -> Response:
        name = str(request.path_params["program"])
        count, is_followed = asked_lines(request)
        file = self._files.get(name)
        if file is None:
            raise NotFound(f"cannot show the log of {shown(name)}: there are {', '.join(self._files)}", param="program")
        tail = LogTail(file, name, self._secrets)
        if not await in_thread(lambda: tail.exists):
            raise NotFound(
                f"cannot show the log of {name}: this frontend does not keep it. Look on the machine where it runs",
                param="program",
            )
        first = await in_thread(tail.last, count)
        if not is_followed:
            return json_response(first)
        return StreamingResponse(self._events(tail, first), media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _events(self, tail: LogTail, lines: list[LogLine]) -> AsyncIterator[bytes]:
        waited = KEEP_ALIVE_SECONDS  # so that the head and a first comment go out at once
        while not self._is_stopping():
            if lines:
                yield b"".join(b"data: %s\n\n" % msgspec.json.encode(line) for line in lines)
                waited = 0.0
            elif waited >= KEEP_ALIVE_SECONDS:
                yield b": keep-alive\n\n"
                waited = 0.0
            await asyncio.sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
            lines = await in_thread(tail.added)
