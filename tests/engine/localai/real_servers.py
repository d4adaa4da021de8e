"""gRPC servers of three makers, as real processes: grpcio, grpc-js and grpc-go.

All take the same orders, as JSON in the first message of `PredictStream`; `Predict` answers with its request. Go and
JavaScript are built or installed once, in a cache outside the repository, under a name made of their sources. A machine
without go or node skips their tests; continuous integration fails there.

    {"do": "stream", "count": 3, "size": 10}     messages          {"do": "stream", "count": 3, "text": "…"}
    {"do": "fail", "count": 1, "size": 10, "status": 5, "text": "…"}
    {"do": "wait"}       until cancelled         {"do": "cancelled"}     how many were
    {"do": "deadline"}   milliseconds left       {"do": "metadata", "name": "authorization"}
    {"do": "headers", "size": 20000}             {"do": "collect", "pause_ms": 5}     {"do": "echo"}
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from tests.outside import cached_place, npm_place, run, tool

SERVERS = Path(__file__).parent / "servers"
MAKERS = ("grpcio", "grpc-js", "grpc-go")
START_SECONDS = 30.0


class RealServer:
    """A running server; stopped by closing its stdin."""

    def __init__(self, maker: str, process: asyncio.subprocess.Process, port: int) -> None:
        self.maker = maker
        self.address = f"127.0.0.1:{port}"
        self.process = process

    def kill(self) -> None:
        self.process.kill()

    def leave(self) -> None:
        """Ask for an orderly end: calls that run are completed, and GOAWAY is sent."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"x")


@contextlib.asynccontextmanager
async def running_server(maker: str, *, max_age_ms: int = 0, max_streams: int = 0) -> AsyncIterator[RealServer]:
    command = [*program(maker), "--max-age-ms", str(max_age_ms), "--max-streams", str(max_streams)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_SECONDS):
            port = int(await process.stdout.readline())
        yield RealServer(maker, process, port)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def order(**values: object) -> bytes:
    return msgspec.json.encode(values)


def program(maker: str) -> list[str]:
    """The command that starts a server, built if need be."""
    if maker == "grpcio":
        return [sys.executable, str(SERVERS / "server.py")]
    if maker == "grpc-go":
        return [str(go_server())]
    return [tool("node"), str(npm_place(SERVERS / "js") / "server.js")]


def go_server() -> Path:
    """The server of grpc-go, built. Without go the calling test is skipped, or fails in continuous integration."""
    go = tool("go", "/usr/local/go/bin")
    source = SERVERS / "go"
    with cached_place(source) as place:
        built = place / "server"
        if not built.exists():
            run([go, "build", "-trimpath", "-buildvcs=false", "-o", str(place / "unfinished"), "."], source)
            (place / "unfinished").rename(built)
    return built
