"""A server that answers exactly what a test says, and a client of ours in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from enginehouse.engine.openai.client import HttpEngine
from enginehouse.ports import EngineCall, EngineResponse

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class World:
    """One scripted server and one client. The script gets each connection once."""

    def __init__(self, script: Script) -> None:
        self.engine = HttpEngine()
        self.connections = 0
        self.address = ""
        self._script = script

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._script(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def send(self, body: bytes = b"{}", *, head_seconds: float = 5.0) -> EngineResponse:
        call = EngineCall(address=self.address, key="k", method="POST", path="/v1/chat/completions", body=body)
        return await self.engine.send(call, connect_seconds=1, head_seconds=head_seconds)

    async def ask(self, body: bytes = b"{}", *, head_seconds: float = 5.0) -> bytes:
        response = await self.send(body, head_seconds=head_seconds)
        try:
            return b"".join([chunk async for chunk in response.chunks()])
        finally:
            await response.close()


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[World]:
    world = World(script)
    server = await asyncio.start_server(world.accept, "127.0.0.1", 0)
    world.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield world
    finally:
        await world.engine.close()
        server.close()
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
    return head + await reader.readexactly(length)


def noting(seen: list[bytes]) -> Script:
    """Every request is noted and answered."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            seen.append(await read_request(reader))
            writer.write(OK)

    return script


def answering(*raw: bytes, times: int = 1000) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await read_request(reader)
            for piece in raw:
                writer.write(piece)
                await writer.drain()

    return script
