"""A peer that sends exactly the frames a test says, and a client of ours in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from enginehouse.engine.localai import frames, hpack
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.stream import GrpcStream, framed

LIMIT_SECONDS = 10.0
HEAD = hpack.encode([(b":status", b"200"), (b"content-type", b"application/grpc")])
END = hpack.encode([(b"grpc-status", b"0")])


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return frames.frame_head(kind, flags, stream, len(payload)) + payload


def head(stream: int = 1, block: bytes = HEAD) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS, stream, block)


def trailers(stream: int = 1, block: bytes = END) -> bytes:
    return frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, block)


def data(*messages: bytes, stream: int = 1, flags: int = 0) -> bytes:
    """One frame with these messages."""
    return frame(frames.DATA, flags, stream, b"".join(map(framed, messages)))


class Peer:
    """The server side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def greet(self, values: dict[int, int] | None = None) -> None:
        await self.reader.readexactly(len(frames.PREFACE))
        self.send(frames.settings(values or {}))

    def send(self, *pieces: bytes) -> None:
        self.writer.write(b"".join(pieces))

    async def next_frame(self, kind: int, stream: int | None = None) -> tuple[int, int, bytes]:
        """The next frame of a kind, as flags, stream and payload; others are skipped."""
        while True:
            found, flags, number, payload = await self.any_frame()
            if found == kind and stream in (None, number):
                return flags, number, payload

    async def any_frame(self) -> tuple[int, int, int, bytes]:
        """The next frame, as kind, flags, stream and payload."""
        start = await self.reader.readexactly(frames.HEADER_BYTES)
        payload = await self.reader.readexactly(int.from_bytes(start[:3], "big"))
        return start[3], start[4], int.from_bytes(start[5:], "big"), payload

    async def take_call(self) -> int:
        """Wait for a request that fits into one frame; its stream."""
        flags, number, _ = await self.next_frame(frames.DATA)
        assert flags & frames.END_STREAM
        return number

    async def told_code(self) -> int:
        """The error code of the GOAWAY that the client sends."""
        _, _, payload = await self.next_frame(frames.GOAWAY)
        return int.from_bytes(payload[4:8], "big")

    async def until_closed(self) -> None:
        while await self.reader.read(65536):
            pass


class Stage:
    """One scripted server and one client. The script gets each connection once; its failure is the test's."""

    def __init__(self, script: Callable[[Peer], Awaitable[None]]) -> None:
        self.client = GrpcClient()
        self.address = ""
        self.connections = 0
        self.running = 0  # scripts that have not ended
        self.failures: list[BaseException] = []
        self._script = script

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.running += 1
        try:
            async with asyncio.timeout(LIMIT_SECONDS):
                await self._script(Peer(reader, writer))
        except Exception as failure:
            self.failures.append(failure)
        finally:
            writer.close()
            self.running -= 1

    def call(self, message: bytes = b"hello", **more: object) -> GrpcCall:
        values: dict[str, object] = {"method": "PredictStream", "connect_seconds": 5.0, "deadline_seconds": 5.0}
        return GrpcCall(address=self.address, message=message, **(values | more))  # type: ignore[arg-type]

    async def start(self, message: bytes = b"hello", **more: object) -> GrpcStream:
        return await self.client.start(self.call(message, **more))

    async def ask(self, message: bytes = b"hello", **more: object) -> list[bytes]:
        return await rest_of(await self.start(message, **more))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while not holds():  # noqa: ASYNC110 - what it waits for is told by nobody
            await asyncio.sleep(0)


async def rest_of(stream: GrpcStream) -> list[bytes]:
    messages: list[bytes] = []
    while batch := await stream.next_messages():
        messages += batch
    return messages


@asynccontextmanager
async def staged(script: Callable[[Peer], Awaitable[None]]) -> AsyncIterator[Stage]:
    stage = Stage(script)
    server = await asyncio.start_server(stage.accept, "127.0.0.1", 0)
    stage.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield stage
    finally:
        await stage.client.close()
        server.close()
        await server.wait_closed()
    await until(lambda: not stage.running)
    assert not stage.failures, stage.failures
