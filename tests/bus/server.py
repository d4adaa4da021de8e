"""A nats-server as others run it: anonymous, or with a user and a password."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from tests.ports import free_port

from enginehouse.bus import embedded


async def until_listening(port: int) -> None:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def plain_server(directory: Path, authorization: str = "") -> AsyncIterator[str]:
    """host:port of a server with these lines of `authorization` in its configuration."""
    port = free_port()
    config = directory / "nats.conf"
    allowed = f"authorization {{ {authorization} }}\n" if authorization else ""
    config.write_text(f'host: "127.0.0.1"\nport: {port}\n{allowed}')
    with (directory / "nats.log").open("wb") as log:
        # A child that the test kills, and must be able to kill without a running loop.
        process = subprocess.Popen([embedded.find_program(), "-c", str(config)], stderr=log)  # noqa: ASYNC220
    try:
        await until_listening(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
