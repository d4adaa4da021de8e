"""The short path of a warm request and the ways off it, over real sockets: the same answer on every way."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.api.inference import CHAT, EVENTS, Script, World, answering, plain, serving, stream
from tests.api.whole_frontend import site
from tests.worker.world import until

from enginehouse.api import intake
from enginehouse.api import serving as server
from enginehouse.api.routes import ApiRoute
from enginehouse.api.serving import serve

PATH = "/test/chat"
ANSWER = b'{"choices": [ 1.50 ]}'
LIMIT_SECONDS = 20.0


class Wire:
    """A frontend that serves, its scripted engine, and connections to it."""

    def __init__(self, address: tuple[str, int], token: str, world: World) -> None:
        self._address = address
        self.token = token
        self.world = world

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._address)

    def head(self, *more: str, path: str = PATH, method: str = "POST", version: str = "1.1") -> bytes:
        lines = [f"{method} {path} HTTP/{version}", "Host: 127.0.0.1", f"Authorization: Bearer {self.token}", *more]
        return "\r\n".join([*lines, "", ""]).encode()

    def chat(self, *more: str, path: str = PATH, version: str = "1.1") -> bytes:
        return self.head(f"Content-Length: {len(CHAT)}", *more, path=path, version=version) + CHAT


@asynccontextmanager
async def wire(tmp_path: Path, script: Script) -> AsyncIterator[Wire]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    async with site(tmp_path) as made, serving(script) as world, asyncio.timeout(LIMIT_SECONDS):
        route = ApiRoute("POST", PATH, "user", "A chat.", raw=world.api.at("/v1/chat/completions"))
        app = made.app(is_loopback=False, extra=[route])
        async with asyncio.TaskGroup() as group:
            group.create_task(
                serve(app, listener, {}, on_notice=lambda: None, on_stop=lambda: None, linger_seconds=0.0)
            )
            try:
                yield Wire(address, made.tokens["user"], world)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the next answer on a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    if "content-length" in headers:
        return int(first.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return int(first.split()[1]), headers, body


async def test_requests_on_one_connection_are_answered_one_after_the_other(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        for number in range(3):
            writer.write(made.chat(f"X-Request-Id: number-{number}"))
            status, headers, body = await answer_of(reader)
            assert (status, body, headers["x-request-id"]) == (200, ANSWER, f"number-{number}")
            assert "transfer-encoding" not in headers
        assert made.world.requests[-1].endswith(CHAT)
        writer.close()


async def test_a_stream_passes_in_chunks_and_the_connection_is_kept(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(stream(EVENTS[:30], EVENTS[30:]))) as made:
        reader, writer = await made.connect()
        for _ in range(2):
            writer.write(made.chat())
            status, headers, body = await answer_of(reader)
            assert (status, headers["transfer-encoding"], body) == (200, "chunked", EVENTS)
        writer.close()


async def test_a_body_that_comes_after_its_head_or_in_pieces_is_waited_for(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        whole = made.chat()
        for cut in (len(whole) - len(CHAT), len(whole) - 5, 20):
            writer.write(whole[:cut])
            await writer.drain()
            # The next connection is served after this one's first part was read.
            await ask_alone(made)
            writer.write(whole[cut:])
            assert (await answer_of(reader))[::2] == (200, ANSWER)
            assert made.world.requests[-1].endswith(b"\r\n\r\n" + CHAT)
        writer.close()


async def test_a_body_that_does_not_come_is_given_up_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.2)
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(made.chat()[:-5])
        status, _, body = await answer_of(reader)
        assert (status, b"did not arrive" in body) == (400, True)
        writer.close()


async def ask_alone(made: Wire) -> None:
    reader, writer = await made.connect()
    writer.write(made.chat("Connection: close"))
    status, headers, _ = await answer_of(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert await reader.read() == b""
    writer.close()


async def test_requests_that_follow_before_an_answer_are_answered_in_their_order(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(b"".join(made.chat(f"X-Request-Id: number-{number}") for number in range(4)))
        ids = [(await answer_of(reader))[1]["x-request-id"] for _ in range(4)]
        assert ids == [f"number-{number}" for number in range(4)]
        writer.close()


async def test_a_body_in_chunks_and_one_that_waits_for_a_sign_arrive_too(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(made.head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT))
        assert (await answer_of(reader))[::2] == (200, ANSWER)
        writer.write(made.head(f"Content-Length: {len(CHAT)}", "Expect: 100-continue"))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(CHAT)
        assert (await answer_of(reader))[::2] == (200, ANSWER)
        assert all(request.endswith(b"\r\n\r\n" + CHAT) for request in made.world.requests)
        writer.close()


@pytest.mark.parametrize("path", [PATH, PATH + "?a=b", "/test/ch%61t", "/test%2Fchat"])
async def test_a_path_leads_to_its_route_however_it_is_written(tmp_path: Path, path: str) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(made.chat(path=path))
        assert (await answer_of(reader))[::2] == (200, ANSWER)
        writer.close()


async def test_a_client_of_the_old_version_gets_an_answer_and_the_end_of_its_connection(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(made.chat(version="1.0"))
        status, headers, body = await answer_of(reader)
        assert (status, headers["connection"], body) == (200, "close", ANSWER)
        assert await reader.read() == b""
        writer.close()


async def test_the_short_path_asks_for_a_token_and_refuses_other_methods_and_no_http(tmp_path: Path) -> None:
    async with wire(tmp_path, answering(plain(ANSWER))) as made:
        reader, writer = await made.connect()
        writer.write(made.chat().replace(made.token.encode(), b"wrong"))
        status, headers, body = await answer_of(reader)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert b"cannot accept this token" in body
        writer.write(made.head(method="GET"))
        status, headers, _ = await answer_of(reader)
        assert (status, headers["allow"]) == (405, "POST")
        writer.write(b"this is not HTTP\r\n\r\n")
        assert (await answer_of(reader))[0] == 400
        assert await reader.read() == b""
        assert made.world.requests == []
        writer.close()


@pytest.mark.parametrize("is_long", [False, True])
async def test_a_client_that_leaves_stops_its_engine_at_once_on_both_paths(tmp_path: Path, is_long: bool) -> None:
    stopped = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(EVENTS)[:-5])  # without its last chunk
        assert await reader.read(1) == b""
        stopped.set()

    async with wire(tmp_path, script) as made:
        reader, writer = await made.connect()
        writer.write(made.chat(path=PATH + ("?long" if is_long else "")))
        await reader.readuntil(b"[DONE]")
        writer.close()
        await stopped.wait()
        await until(lambda: bool(made.world.seen.requests))
        assert made.world.seen.requests[0]["status"] == 499
        assert made.world.routing.held == 0


async def test_a_client_that_does_not_read_holds_its_engine_back(tmp_path: Path) -> None:
    stalled, sent = asyncio.Event(), 0
    event = b"data: " + b"x" * 65536 + b"\n\n"

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(stream()[:-5])
        while not stalled.is_set():
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            sent += 1
            try:
                async with asyncio.timeout(0.5):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
        writer.write(b"0\r\n\r\n")

    async with wire(tmp_path, script) as made:
        reader, writer = await made.connect()
        writer.write(made.chat())
        await stalled.wait()
        assert (await answer_of(reader))[2] == event * sent
        writer.close()


async def test_an_idle_connection_is_closed_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.3)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await go_on.wait()
        writer.write(plain(ANSWER))

    async with wire(tmp_path, script) as made:
        idle, idle_writer = await made.connect()
        busy, busy_writer = await made.connect()
        go_on.set()
        idle_writer.write(made.chat())
        busy_writer.write(made.chat())
        assert (await answer_of(idle))[0] == (await answer_of(busy))[0] == 200
        go_on.clear()
        begun.clear()
        busy_writer.write(made.chat())
        await begun.wait()
        assert await idle.read() == b""  # which takes longer than a connection may be idle
        go_on.set()
        assert (await answer_of(busy))[::2] == (200, ANSWER)
        assert await busy.read() == b""
        idle_writer.close()
        busy_writer.close()
