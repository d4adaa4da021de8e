"""Warm requests at a steady pace, in a process of their own: `warm_requests.py PORT ENGINE-PORT TOKEN MODEL`.

They alternate between the frontend and the engine itself, so that what the busy machine adds to both is known. A line
on standard input asks for the times since the last one; they are answered as JSON, in milliseconds. Not in the process
of the stubs, whose loop would delay the clock.
"""

from __future__ import annotations

import asyncio
import json
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

PER_SECOND = 50.0
LIMIT_SECONDS = 20.0


class Percentiles(NamedTuple):
    """In milliseconds. `direct` is without the frontend."""

    requests: int
    median: float
    p99: float
    direct_p99: float
    failures: int


class Requests:
    def __init__(self, port: int, token: str, model: str) -> None:
        self._port = port
        body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}]}).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
            f"content-type: application/json\r\nauthorization: Bearer {token}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._socket: socket.socket | None = None
        self.times: list[float] = []
        self.failures = 0

    def one(self) -> None:
        began = time.perf_counter()
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), LIMIT_SECONDS)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(self._request)
            answer = b""
            while not _is_whole(answer):
                piece = self._socket.recv(65536)
                if not piece:
                    raise ConnectionResetError
                answer += piece
            if not answer.startswith(b"HTTP/1.1 200"):
                self.failures += 1
        except OSError:
            self._socket = None
            self.failures += 1
        self.times.append((time.perf_counter() - began) * 1000)


def _is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if not found:
        return False
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return len(body) >= int(value)
    return body.endswith(b"0\r\n\r\n")


def percentile(times: list[float], part: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


def main() -> None:
    port, engine_port, token, model = sys.argv[1:]
    through, direct = Requests(int(port), token, model), Requests(int(engine_port), token, model)
    due = time.monotonic()
    while True:
        asked, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if asked:
            if not sys.stdin.readline():
                return
            answer = Percentiles(
                len(through.times),
                percentile(through.times, 0.5),
                percentile(through.times, 0.99),
                percentile(direct.times, 0.99),
                through.failures + direct.failures,
            )
            print(json.dumps(answer), flush=True)
            for one in (through, direct):
                one.times, one.failures = [], 0
            continue
        through.one()
        direct.one()
        due = max(due + 1 / PER_SECOND, time.monotonic() - 1.0)


class WarmRequests:
    """That process, as the benchmark has it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int, engine_port: int, token: str, model: str) -> WarmRequests:
        words = [str(Path(__file__)), str(port), str(engine_port), token, model]
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe))

    async def since_last(self) -> Percentiles:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        async with asyncio.timeout(3 * LIMIT_SECONDS):
            return Percentiles(*json.loads(await self._process.stdout.readline()))

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        async with asyncio.timeout(3 * LIMIT_SECONDS):
            await self._process.wait()


if __name__ == "__main__":
    main()
