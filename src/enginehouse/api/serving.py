"""Serves the application on a socket, beside the loops of the frontend; the only door to uvicorn.

The loops end when the server has: an answer under way may need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from enginehouse.api.requests import ABORT, SEND_BUFFER
from enginehouse.host import processes
from enginehouse.loop import Loop

STOP_SECONDS = 10  # for answers under way when a frontend is asked to stop
SHORT_STOP_SECONDS = 1  # for answers that take no time
LINGER_SECONDS = 1.0  # balancers ask several times a second; who stops a frontend by hand hardly notices


@contextlib.asynccontextmanager
async def answering(app: object, listener: socket.socket) -> AsyncIterator[None]:
    """Answer with `app` while this lasts, on a copy of the listening socket: whoever connects afterwards waits for the
    next who takes it.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=SHORT_STOP_SECONDS,
        server_header=False,
    )
    server = uvicorn.Server(config)
    # A signal ends a program that has done nothing yet.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener.dup()]))
        try:
            yield
        finally:
            server.should_exit = True


async def serve(
    app: object,
    listener: socket.socket,
    loops: dict[str, Loop],
    *,
    on_notice: Callable[[], None],
    on_stop: Callable[[], None],
    linger_seconds: float,
) -> None:
    """Asked to stop, it gives notice, goes on for `linger_seconds`, so that whoever sends requests here can learn it,
    and then takes no more. A second request to stop ends the lingering.
    """
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
    running = asyncio.get_running_loop()
    lingering: asyncio.TimerHandle | None = None

    def stop() -> None:
        on_stop()
        server.should_exit = True

    def give_notice() -> None:
        nonlocal lingering
        on_notice()
        if lingering is not None or not linger_seconds or not server.started:
            stop()
        else:
            lingering = running.call_later(linger_seconds, stop)

    for number in processes.stop_signals():
        running.add_signal_handler(number, give_notice)
    # uvicorn's own handlers would come on top of these, and one signal be taken for two.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop.run(), name=loop.name) for loop in loops.values()]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()


def _connection(**given: Any) -> asyncio.Protocol:
    """uvicorn's own, with ways for routes to bound and to end it. Its transport comes later."""
    made: Any = None

    def abort() -> None:
        made.transport.abort()

    def bound(size_bytes: int) -> None:
        made.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)

    made = AutoHTTPProtocol(**{**given, "app_state": {**given["app_state"], ABORT: abort, SEND_BUFFER: bound}})
    connection: asyncio.Protocol = made
    return connection
