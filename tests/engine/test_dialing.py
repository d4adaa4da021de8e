"""Opening a connection to an engine: whose fault a failure is, and how a lost machine is noticed."""

from __future__ import annotations

import asyncio
import errno
import resource
import socket

import pytest

from enginehouse.core.errors import Unavailable, Upstream
from enginehouse.engine.dialing import dial, watch


async def test_a_limit_of_this_machine_is_not_the_fault_of_the_engine() -> None:
    """The real limit of open files: another replica would fail too."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[socket.socket] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        with pytest.raises(OSError) as full:
            fill(held)
        assert full.value.errno == errno.EMFILE
        with pytest.raises(Unavailable) as caught:
            await dial(address, 5, asyncio.Protocol)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held:
            each.close()
        server.close()
        await server.wait_closed()
    assert caught.value.code == "resource_exhausted"
    assert not isinstance(caught.value, Upstream)


def fill(held: list[socket.socket]) -> None:
    for _ in range(1000):
        held.append(socket.socket())  # noqa: PERF401 - those before the failure must be closed


async def test_an_address_that_does_not_answer_is_unreachable_after_the_limit() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for each in waiting:  # they fill the queue of a listener that accepts nobody
            each.setblocking(False)
            each.connect_ex(address)
        with pytest.raises(Unavailable) as caught:
            await dial(f"127.0.0.1:{address[1]}", 0.1, asyncio.Protocol)
        for each in waiting:
            each.close()
    assert caught.value.code == "replica_unreachable"


def test_the_system_watches_a_connection() -> None:
    with socket.socket() as raw:
        watch(raw)
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    watch(None)
