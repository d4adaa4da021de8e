"""The engine's client: requests and answers, whole, cut and broken."""

from __future__ import annotations

import asyncio

import pytest
from tests.engine.openai.scripted import OK, answering, noting, read_request, serving

from enginehouse.core.errors import Invalid, Upstream
from enginehouse.engine.openai import client as http
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.ports import EngineCall, EngineTarget


async def test_a_request_goes_out_as_it_is_and_the_connection_is_kept() -> None:
    seen: list[bytes] = []
    async with serving(noting(seen)) as world:
        response = await world.send(b'{"a":1}')
        assert (response.status, list(response.headers)) == (200, [(b"content-length", b"2")])
        assert [chunk async for chunk in response.chunks()] == [b"ok"]
        await response.close()
        await response.close()
        assert await world.ask(b"x" * 300_000) == b"ok"
        assert world.connections == 1
        head, _, body = seen[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"\r\nauthorization: Bearer k" in head
        assert b"\r\ncontent-type: application/json" in head
        assert body == b'{"a":1}'
        assert seen[1].endswith(b"x" * 300_000)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_a_chunked_answer_is_whole_however_it_is_cut(size: int) -> None:
    pieces = [b"data: %d\n\n" % number for number in range(50)]
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw += b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\ntrailer: x\r\n\r\n"
    cuts = [raw[start : start + size] for start in range(0, len(raw), size)]
    async with serving(answering(*cuts)) as world:
        for _ in range(3):
            assert await world.ask() == b"".join(pieces)
        assert world.connections == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\nhalf",
    ],
)
async def test_a_body_that_ends_early_is_an_error_after_what_came(raw: bytes) -> None:
    async with serving(answering(raw, times=1)) as world:
        response = await world.send()
        chunks = response.chunks()
        received = await anext(chunks)
        with pytest.raises(Upstream) as caught:
            await anext(chunks)
        await response.close()
        assert received == b"half"
        assert caught.value.code == "upstream_error"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 O",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nno end announced",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 200 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000 + b"\r\ncontent-length: 0\r\n\r\n",
    ],
)
async def test_an_answer_without_a_proper_head_is_an_error(raw: bytes) -> None:
    async with serving(answering(raw, times=1)) as world:
        with pytest.raises(Upstream) as caught:
            await world.ask()
        assert caught.value.code == "upstream_error"
        assert world.connections == 1


async def test_a_head_that_does_not_come_in_time_is_a_timeout_and_the_engine_is_told() -> None:
    told = asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await read_request(reader)
        assert await reader.read(1) == b""
        told.set()

    async with serving(script) as world:
        with pytest.raises(Upstream) as caught:
            await world.send(head_seconds=0.05)
        assert caught.value.code == "upstream_timeout"
        await asyncio.wait_for(told.wait(), 5)


async def test_a_line_break_cannot_be_smuggled_into_the_head() -> None:
    call = EngineCall(address="127.0.0.1:1", key="k\r\nx: y", method="GET", path="/")
    with pytest.raises(Invalid):
        await HttpEngine().send(call, connect_seconds=1, head_seconds=1)


@pytest.mark.parametrize(
    ("raw", "is_ready"),
    [(OK, True), (b"HTTP/1.1 503 Loading\r\ncontent-length: 0\r\n\r\n", False), (b"", False), (OK[:-1], False)],
)
async def test_ready_is_a_yes_to_the_health_question_and_nothing_else(raw: bytes, is_ready: bool) -> None:
    async with serving(answering(raw, times=1)) as world:
        assert await world.engine.is_ready(EngineTarget(address=world.address, key="k")) is is_ready


async def test_an_engine_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "READY_SECONDS", 0.05)

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(script) as world:
        assert await world.engine.is_ready(EngineTarget(address=world.address, key="k")) is False
    assert await HttpEngine().is_ready(EngineTarget(address="127.0.0.1:1", key="k")) is False


REFUSED = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("without_key", "wrong_key", "checks"),
    [
        (REFUSED, REFUSED, True),
        (REFUSED.replace(b"401", b"403"), REFUSED, True),
        (OK, OK, False),
        # Some look whether there is one, and not which.
        (REFUSED, OK, False),
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n", REFUSED, False),
        (b"", REFUSED, False),
    ],
)
async def test_an_engine_checks_its_key_where_it_refuses_none_and_another(
    without_key: bytes, wrong_key: bytes, checks: bool
) -> None:
    heads: list[bytes] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await read_request(reader))
        writer.write(wrong_key if b"authorization: Bearer" in heads[-1] else without_key)
        await writer.drain()

    async with serving(script) as world:
        assert await world.engine.checks_key(EngineTarget(address=world.address)) is checks
    assert heads[0].startswith(b"POST /v1/chat/completions ")
    assert heads[0].endswith(b"\r\n\r\n{}")


async def test_tokens_are_asked_for_where_engines_have_that_route() -> None:
    seen: list[bytes] = []
    async with serving(noting(seen)) as world:
        for path in ("/v1/tokenize", "/v1/detokenize", "/v1/tokenizers"):
            call = EngineCall(address=world.address, key="k", method="POST", path=path, body=b"{}")
            response = await world.engine.send(call, connect_seconds=5.0, head_seconds=5.0)
            assert [chunk async for chunk in response.chunks()] == [b"ok"]
            await response.close()
    assert [head.split(b" ")[1] for head in seen] == [b"/tokenize", b"/detokenize", b"/v1/tokenizers"]
