"""Installs in processes that may be killed: one process that has everything imported forks a child per install.

Run as a program it reads jobs from its input, one per line; the child tells its id and that of the one thread that
does all steps on the disk, and waits until `go` comes, so that a tracer can be attached first; then its exit status is
told. Importing everything anew for each of a hundred kills would take longer than the installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.artifact.blobs import download as fetching
from enginehouse.artifact.blobs import partial
from enginehouse.build_worker import make_installation
from enginehouse.core.backend import Resolved
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.installer import InstallRequest

LIMIT_SECONDS = 60.0


class Job(Struct, frozen=True, kw_only=True):
    backends: str
    resolved: Resolved
    work: Literal["install", "roll_back", "remove"] = "install"
    can_exchange: bool = True
    scale: int = 1  # parts and writes of blobs are so many times smaller


def options(backends: Path, **more: object) -> InstallerOptions:
    known = InstallerOptions(backends=backends, allowed_hosts=("127.0.0.1",), patience=RetryPolicy(factor=0.01))
    return msgspec.structs.replace(known, **more)


async def nothing() -> None:
    """Nobody runs from the tree that is replaced."""


async def perform(job: Job, gate: int) -> None:
    loop = asyncio.get_running_loop()
    # One thread for all steps on the disk, so that their calls have one order and one count.
    loop.set_default_executor(ThreadPoolExecutor(1))
    print(os.getpid(), await in_thread(threading.get_native_id), flush=True)
    os.read(gate, 1)
    if not job.can_exchange:
        disk.exchange = lambda first, second: False
    partial.PART_BYTES //= job.scale
    fetching.WRITE_BYTES //= job.scale
    assembled = make_installation(options(Path(job.backends)), os.environ)
    await in_thread(assembled.installer.recover)
    match job.work:
        case "install":
            request = InstallRequest(resolved=job.resolved, upgrade=True)
            await assembled.installer.install(request, lambda *_: None, nothing)
        case "roll_back":
            await assembled.installer.roll_back(job.resolved.directory, nothing)
        case "remove":
            await assembled.installer.remove(job.resolved.directory)
    await assembled.close()


def serve() -> None:
    for line in sys.stdin.buffer:
        gate, open_gate = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(open_gate)
            code = 1
            try:
                asyncio.run(perform(msgspec.json.decode(line, type=Job), gate))
                code = 0
            finally:
                os._exit(code)
        os.close(gate)
        sys.stdin.buffer.readline()
        os.close(open_gate)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Forks:
    """The other side of `serve`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def prepare(self, job: Job) -> tuple[int, int]:
        """A child that waits: its process id, and the id of its thread for the disk."""
        process, thread = (await self._ask(msgspec.json.encode(job))).split()
        return int(process), int(thread)

    async def go(self) -> int:
        """The exit code of the child, negative for the signal that ended it."""
        return int(await self._ask(b"go"))

    async def _ask(self, line: bytes) -> bytes:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self._process.stdout.readline()


@contextlib.asynccontextmanager
async def forks() -> AsyncIterator[Forks]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Forks(process)
    finally:
        if process.returncode is None:
            process.kill()
        # Both, or their transports outlive the loop.
        await process.communicate()


if __name__ == "__main__":
    serve()
