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
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

SERVERS = Path(__file__).parent / "servers"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginehouse-tests"
MAKERS = ("grpcio", "grpc-js", "grpc-go")
BUILD_SECONDS = 400.0  # cold, with downloads, beside other tests
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
    node, npm = _tool("node"), _tool("npm")
    source = SERVERS / "js"
    with _place(source) as place:
        if not (place / "done").exists():
            for file in source.iterdir():
                shutil.copy(file, place)
            _run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], place)
            (place / "done").touch()
    return [node, str(place / "server.js")]


def go_server() -> Path:
    """The server of grpc-go, built. Without go the calling test is skipped, or fails in continuous integration."""
    go = _tool("go", "/usr/local/go/bin")
    source = SERVERS / "go"
    with _place(source) as place:
        built = place / "server"
        if not built.exists():
            _run([go, "build", "-trimpath", "-buildvcs=false", "-o", str(place / "unfinished"), "."], source)
            (place / "unfinished").rename(built)
    return built


def _tool(name: str, elsewhere: str = "") -> str:
    found = shutil.which(name) or shutil.which(name, path=elsewhere)
    if found is None:
        sentence = f"there is no {name} here: install it to test against servers that need it"
        if os.environ.get("CI"):
            pytest.fail(sentence)
        pytest.skip(sentence)
    return found


@contextlib.contextmanager
def _place(source: Path) -> Iterator[Path]:
    """A directory of the cache for these sources; one process at a time fills it."""
    digest = hashlib.sha256()
    for file in sorted(source.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    place = CACHE / f"{source.name}-{digest.hexdigest()[:16]}"
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


def _run(command: list[str], directory: Path) -> None:
    ended = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=BUILD_SECONDS)
    if ended.returncode:
        pytest.fail(f"{' '.join(command)} failed: {ended.stdout}{ended.stderr}")
