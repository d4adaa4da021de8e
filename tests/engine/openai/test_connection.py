"""The engine's client: connections that are kept, lost, raced, cut, stalled or never made."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.engine.openai.scripted import OK, answering, read_request, serving

from enginehouse.core.errors import Unavailable, Upstream
from enginehouse.engine.openai import client as http
from enginehouse.engine.openai.client import IDLE_SECONDS, HttpEngine
from enginehouse.engine.openai.connection import HIGH_WATER_BYTES
from enginehouse.ports import EngineCall


async def test_closing_in_the_middle_cuts_the_connection_so_that_the_engine_stops() -> None:
    stopped = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        try:
            assert await reader.read(1) == b""
        finally:
            stopped.set()

    async with serving(script) as world:
        response = await world.send()
        chunks = response.chunks()
        assert await anext(chunks) == b"x"
        await response.close()
        await asyncio.wait_for(stopped.wait(), 5)
        with pytest.raises(Upstream):
            await anext(chunks)


async def test_a_request_that_is_cancelled_cuts_the_connection() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        began.set()
        await reader.read(1)
        stopped.set()

    async with serving(script) as world:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(world.send())
            await asyncio.wait_for(began.wait(), 5)
            task.cancel()
        await asyncio.wait_for(stopped.wait(), 5)


async def test_a_kept_connection_that_the_engine_closed_is_replaced_without_the_caller_noticing() -> None:
    async with serving(answering(OK, times=1)) as world:
        for number in range(1, 4):
            assert await world.ask() == b"ok"
            assert world.connections == number


async def test_a_request_lost_in_the_race_with_a_closing_engine_is_sent_once_more() -> None:
    requests = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1
        writer.write(OK)
        if requests == 1:
            await read_request(reader)  # read and never answered: the end comes after the request, as in the race

    async with serving(script) as world:
        assert await world.ask() == b"ok"
        assert await world.ask() == b"ok"
        assert (world.connections, requests) == (2, 2)


async def test_a_fresh_connection_that_dies_is_never_tried_again() -> None:
    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)

    async with serving(script) as world:
        with pytest.raises(Upstream):
            await world.ask()
        assert world.connections == 1


async def test_a_request_that_may_have_killed_its_engine_does_not_move_on() -> None:
    server: asyncio.Server | None = None

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await read_request(reader)
        assert server is not None
        server.close()
        writer.close()

    server = await asyncio.start_server(script, "127.0.0.1", 0)
    engine = HttpEngine()
    call = EngineCall(
        address=f"127.0.0.1:{server.sockets[0].getsockname()[1]}", key="", method="POST", path="/", body=b"{}"
    )
    response = await engine.send(call, connect_seconds=1, head_seconds=5)
    assert [chunk async for chunk in response.chunks()] == [b"ok"]
    await response.close()
    with pytest.raises(Upstream):  # not `replica_unreachable`, which would send it to the next replica
        await engine.send(call, connect_seconds=1, head_seconds=5)
    await engine.close()


@pytest.mark.parametrize("raw", [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", OK + b"more"])
async def test_a_connection_that_must_not_be_kept_is_not(raw: bytes) -> None:
    async with serving(answering(raw, times=1)) as world:
        assert await world.ask() == b"ok"
        assert await world.ask() == b"ok"
        assert world.connections == 2


async def test_idle_connections_are_closed_before_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "IDLE_SECONDS", 0.02)
    closed = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await reader.read(1)
        closed.set()

    async with serving(script) as world:
        await world.ask()
        await asyncio.wait_for(closed.wait(), 5)


async def test_a_client_that_does_not_read_stops_the_engine_from_sending() -> None:
    sent = 0
    piece = b"x" * 65536

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (1024 * len(piece)))
        for _ in range(1024):
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async with serving(script) as world:
        response = await world.send()
        connection = response._connection  # type: ignore[attr-defined]
        async with asyncio.timeout(10):
            while not connection._is_paused:  # noqa: ASYNC110 - the pause is the transport's, there is no event for it
                await asyncio.sleep(0)
        assert connection._held_bytes < HIGH_WATER_BYTES + 1024 * 1024
        assert sent < 1024 * len(piece)
        received = 0
        async for chunk in response.chunks():
            received += len(chunk)
        assert received == 1024 * len(piece)
        await response.close()


async def test_nothing_listening_is_a_replica_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    engine = HttpEngine()
    for bad in (address, "127.0.0.1", "127.0.0.1:x", "", "127.0.0.1:99999"):
        with pytest.raises(Unavailable) as caught:
            await engine.send(
                EngineCall(address=bad, key="", method="GET", path="/"), connect_seconds=1, head_seconds=1
            )
        assert caught.value.code == "replica_unreachable"
        assert type(caught.value) is Unavailable


async def test_a_machine_that_does_not_answer_is_given_up_after_the_connect_limit() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        call = EngineCall(address=f"127.0.0.1:{address[1]}", key="", method="GET", path="/")
        with pytest.raises(Unavailable) as caught:
            await HttpEngine().send(call, connect_seconds=0.1, head_seconds=1)
        assert caught.value.code == "replica_unreachable"
        for filler in fillers:
            filler.close()


async def test_idle_connections_do_not_starve_an_engine_that_gives_each_a_thread() -> None:
    """llama.cpp's server has a fixed number of threads and keeps one for every open connection, busy or not."""
    threads = asyncio.Semaphore(6)
    answer = OK.replace(b"\r\n", b"\r\nKeep-Alive: timeout=5, max=100\r\n", 1)

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with threads:
            while True:
                await read_request(reader)
                writer.write(answer)

    async with serving(script) as world, asyncio.timeout(IDLE_SECONDS / 2), asyncio.TaskGroup() as group:
        for _ in range(40):
            group.create_task(world.ask())


async def test_as_many_connections_are_kept_as_an_engine_without_such_threads_had_requests() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(OK)

    async with serving(script) as world:
        for _ in range(3):
            async with asyncio.timeout(5), asyncio.TaskGroup() as group:
                for _ in range(40):
                    group.create_task(world.ask())
        assert world.connections == 40
