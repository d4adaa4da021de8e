"""Serves the application on a socket and runs the loops of the frontend beside it. `warm` has its connections.

The loops end after the server, because answers in progress may need them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

import uvicorn

from enginehouse.api.app import Application
from enginehouse.api.warm import WarmConnection
from enginehouse.host import processes
from enginehouse.loop import Loop

STOP_SECONDS = 10  # for answers in progress when a frontend is asked to stop
SHORT_STOP_SECONDS = 1  # for answers that take no time
TICK_SECONDS = 0.1  # as uvicorn's; every tenth writes the date that answers have
KEEP_ALIVE_SECONDS = 5.0  # an idle connection costs little, and clients reconnect
LINGER_SECONDS = 1.0  # load balancers check several times a second, and an operator hardly notices the delay


class _InterimServer(uvicorn.Server):
    """A server that ends when it is told to. uvicorn looks ten times a second, and then waits for connections that are
    not there: together that was a third of a frontend's start.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        counter = 0
        while not self.ending.is_set():
            await self.on_tick(counter)
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self.ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.server_state.connections:
            await super().shutdown(sockets)
            return
        for server in self.servers:
            server.close()
        for one in sockets or ():
            one.close()


@contextlib.asynccontextmanager
async def answering(app: object, listener: socket.socket) -> AsyncIterator[None]:
    """Answer with `app` inside this context, on a copy of the listening socket. Later connections wait in the socket's
    queue until the next server accepts them.
    """
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # an ASGI application
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",  # no route speaks WebSocket, and a library for it would be imported where there is one
        timeout_graceful_shutdown=SHORT_STOP_SECONDS,
        server_header=False,
    )
    server = _InterimServer(config)
    # A signal may end the program at once: it has done nothing yet.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve(sockets=[listener.dup()]))
        try:
            yield
        finally:
            server.ending.set()


async def serve(
    app: Application,
    listener: socket.socket,
    loops: dict[str, Loop],
    *,
    on_notice: Callable[[], None],
    on_stop: Callable[[], None],
    linger_seconds: float,
) -> None:
    """Serve until a signal to stop. The first signal calls `on_notice` and the server goes on for `linger_seconds`, so
    that load balancers learn of it; then it accepts no more requests. A second signal ends the lingering.
    """
    config = uvicorn.Config(
        app,
        http=partial(WarmConnection, endpoints=app.endpoints),  # type: ignore[arg-type]  # only ever called
        proxy_headers=False,  # the application reads them where they matter
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=STOP_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,  # type: ignore[arg-type]  # fractions work too
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
    # uvicorn's own handlers would run in addition, and one signal would count as two.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(loop.run(), name=loop.name) for loop in loops.values()]
        await server.serve(sockets=[listener])
        for task in tasks:
            task.cancel()
