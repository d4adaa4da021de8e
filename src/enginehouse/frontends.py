"""`frontend --processes N`: a small parent of N equal frontends behind one port, for machines with many cores.

It only starts them, restarts one that ends, with backoff, and stops all together. Each is a complete frontend with its
own leases; the kernel spreads connections over them. Each listens only when it is ready, so the port never leads to a
process that is starting or gone; this parent holds the port without listening. The first is started alone: it creates
the tables and the tokens that the others find. The kernel kills the children when the parent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.host import disk, listen, processes
from enginehouse.host.children import Child, ChildProgram, Ending, keep_short, say
from enginehouse.host.inherited import PORT_VARIABLE
from enginehouse.link.client import FrontendClient
from enginehouse.settings.programs import FrontendSettings

LOOK_SECONDS = 2.0  # timeout of one readiness check
PAUSE_SECONDS = 0.1  # between two


def check(settings: FrontendSettings) -> None:
    if not settings.database_url.startswith("postgres"):
        # SQLite lets one process write at a time and the others wait for it, in every frontend and on every change.
        raise Invalid(
            f"cannot run {settings.processes} frontends over SQLite: give a PostgreSQL database with --database-url, "
            "or leave out --processes",
            code="invalid_setting",
            param="processes",
        )


async def run(settings: FrontendSettings) -> int:
    """Run until stopped."""
    check(settings)
    disk.make_usable(settings.data)
    logs = settings.data / "logs"
    with disk.naming_the_file(settings.data):
        logs.mkdir(exist_ok=True)
    with contextlib.closing(listen.reserve(settings.host, settings.port)) as reserved:
        port = reserved.getsockname()[1]
        children = [_child(number, logs, port) for number in range(1, settings.processes + 1)]
        await _keep_running(settings, children, port)
    for child in children:
        if child.refusal is not None:
            raise child.refusal
    return 0


def _child(number: int, logs: Path, port: int) -> Child:
    # The same command line in the same directory and environment, so that every setting is the same.
    argv = (sys.executable, "-m", "enginehouse", *sys.argv[1:])
    environment = {**os.environ, PORT_VARIABLE: str(port), "PYTHONUNBUFFERED": "1"}
    name = f"frontend-{number}"
    return Child(ChildProgram(name, argv, environment), Path.cwd(), logs / f"{name}.log")


async def _keep_running(settings: FrontendSettings, children: list[Child], port: int) -> None:
    ending = Ending()
    for number in processes.stop_signals():
        on_signal = ending.interrupt if number == signal.SIGINT else ending.ask
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    logs = settings.data / "logs"
    say(f"starting {len(children)} frontends on port {port}; their logs are in {logs}")
    async with asyncio.TaskGroup() as group:
        first, *others = children
        group.create_task(first.run(ending.ask))
        trimming = group.create_task(keep_short([logs / f"{child.program.name}.log" for child in children]))
        started = [first]
        try:
            if await _until_ready(settings.host, port, ending.asked):
                first.was_ready = True
                for child in others:
                    # What the first could do, the others can; if they end, it is for a reason that may pass.
                    child.was_ready = True
                    group.create_task(child.run(ending.ask))
                    started.append(child)
                say(f"serving on port {port}")
            await ending.asked.wait()
        finally:
            say("stopping the frontends")
            await _stop(started, ending)
            trimming.cancel()


async def _stop(children: list[Child], ending: Ending) -> None:
    """All at once: each tells its load balancers and finishes its answers, which takes as long for one as for all."""
    for child in children:
        child.retire()
    async with asyncio.TaskGroup() as group:
        for child in children:
            group.create_task(child.stop(ending))


async def _until_ready(host: str, port: int, stopping: asyncio.Event) -> bool:
    """Wait until a frontend answers that it is ready; False if stopped. It reports itself what it waits for."""
    here = "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host
    url = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    client = FrontendClient(url, "", user_agent="enginehouse-frontends")
    while not stopping.is_set():
        try:
            await asyncio.to_thread(
                client.request, "GET", "/readyz", None, dict[str, object], timeout_seconds=LOOK_SECONDS
            )
        except EnginehouseError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await stopping.wait()
        else:
            return True
    return False
