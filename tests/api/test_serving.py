"""The server itself: what a client that does not read costs, and what answers before a frontend is ready."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from tests.api.whole_frontend import site
from tests.worker.world import until

from enginehouse.api import events, serving
from enginehouse.api.serving import answering, serve
from enginehouse.api.waiting import Waiting

TOLD_BYTES = 1024 * 1024  # the kernel alone would keep more than this for one connection on this machine


async def test_a_watcher_that_does_not_read_is_dropped_after_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "WRITE_SECONDS", 0.2)
    listener = socket.create_server(("127.0.0.1", 0))
    async with site(tmp_path) as made, asyncio.timeout(30):
        told = made.frontend.events
        async with asyncio.TaskGroup() as group:
            group.create_task(
                serve(made.open, listener, {}, on_notice=lambda: None, on_stop=told.close, linger_seconds=0.0)
            )
            deaf = socket.socket()
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            try:
                loop = asyncio.get_running_loop()
                await loop.sock_connect(deaf, listener.getsockname())
                key = made.tokens["admin"]
                head = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n\r\n"
                await loop.sock_sendall(deaf, head.encode())
                await until(lambda: told.is_watched)
                for number in range(TOLD_BYTES // 4096):
                    told.publish("operation", str(number), b"." * 4096)
                    await asyncio.sleep(0)
                await until(lambda: not told.is_watched)
            finally:
                deaf.close()
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("is_kept", [False, True])
async def test_what_answers_before_a_frontend_is_ready_ends_when_it_is(
    monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    monkeypatch.setattr(serving, "TICK_SECONDS", 3600.0)
    waiting = Waiting()
    waiting.reason = "the bus is not connected yet"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with asyncio.timeout(30):
            async with answering(waiting, listener):
                reader, writer = await asyncio.open_connection(*listener.getsockname())
                if not is_kept:
                    writer.write(b"GET /readyz HTTP/1.1\r\nhost: here\r\n\r\n")
                    answer = await reader.read()
                    assert answer.startswith(b"HTTP/1.1 503")
                    assert b"the bus is not connected yet" in answer
            writer.close()
        # The socket itself still listens, for the server that comes next.
        socket.create_connection(listener.getsockname()).close()
