"""Serves the application on a socket, beside the loops of the frontend; the only door to uvicorn.

The loops end when the server has: an answer under way may need them.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from enginehouse.api.app import ABORT
from enginehouse.loop import Loop

STOP_SECONDS = 10  # for answers under way when a frontend is asked to stop


async def serve(app: object, listener: socket.socket, loops: dict[str, Loop], on_stop: Callable[[], None]) -> None:
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        http=_connection,  # type: ignore[arg-type]  # only ever called
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=16 * 1024,
        server_header=False,
    )
    server = uvicorn.Server(config)

    def stop() -> None:
        on_stop()
        server.should_exit = True

    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop)
    # uvicorn replaces the handlers while it serves; its own only sets should_exit, so the streams are ended here too.
    server.handle_exit = lambda *_: stop()  # type: ignore[method-assign]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop.run(), name=loop.name) for loop in loops.values()]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()


def _connection(**given: Any) -> asyncio.Protocol:
    """uvicorn's own, with a way for routes to end it. Its transport comes later."""
    made: Any = None

    def abort() -> None:
        made.transport.abort()

    made = AutoHTTPProtocol(**{**given, "app_state": {**given["app_state"], ABORT: abort}})
    connection: asyncio.Protocol = made
    return connection
