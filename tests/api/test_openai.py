"""The inference routes, driven as ASGI with a real engine client and a real HTTP upstream behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest
from tests.api.inference import CHAT, EVENTS, Client, World, answering, plain, serving, stream

from enginehouse.api import intake, openai
from enginehouse.api.relay import EventPasser
from enginehouse.core.errors import NotFound, Unavailable


async def test_a_plain_answer_passes_byte_for_byte_with_only_its_own_headers() -> None:
    async with serving(answering(plain(b'{"choices": [ 1.50 ]}'))) as world:
        client = await world.ask(Client(CHAT, [(b"x-request-id", b"abc-1")]))
        assert (client.status, client.body, client.is_ended) == (200, b'{"choices": [ 1.50 ]}', True)
        assert client.headers == {
            b"content-type": b"application/json; charset=utf-8",
            b"content-length": b"21",
            b"x-request-id": b"abc-1",
            b"x-correlation-id": b"abc-1",
            b"x-enginehouse-node": b"node-0",
        }
        assert world.requests[0].endswith(b"\r\n\r\n" + CHAT)
        assert world.requests[0].startswith(b"POST /v1/chat/completions ")
        figures = world.seen.requests[0]
        assert (figures["model"], figures["node"], figures["status"]) == ("tiny", "node-0", 200)


async def test_a_stream_passes_as_it_comes() -> None:
    async with serving(answering(stream(EVENTS[:30], EVENTS[30:]))) as world:
        client = await world.ask(Client(CHAT))
        assert (client.status, client.body, client.is_ended) == (200, EVENTS, True)
        assert client.headers[b"content-type"] == b"text/event-stream"
        assert client.headers[b"cache-control"] == b"no-cache"
        assert client.headers[b"x-accel-buffering"] == b"no"
        assert b"content-length" not in client.headers


async def test_the_other_route_asks_the_engine_for_the_same_path() -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(CHAT)
        await world.api.at("/v1/completions")(client.scope, client.receive, client.send)
        assert world.requests[0].startswith(b"POST /v1/completions ")


@pytest.mark.parametrize("given", [b"", b"with space", b"x" * 129, b"caf\xc3\xa9", b"a\x00b"])
async def test_an_id_that_is_not_safe_to_repeat_is_replaced(given: bytes) -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = await world.ask(Client(CHAT, [(b"x-correlation-id", given)]))
        assert len(client.headers[b"x-request-id"]) == 32
        assert client.headers[b"x-request-id"] != given


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_json", None),
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_json", None),
        (b"\xff\xfe", 400, "invalid_json", None),
        (b'{"x":' * 5000, 400, "invalid_json", None),
        (b"{}", 422, "invalid_name", "model"),
        (b'{"model":""}', 422, "invalid_name", "model"),
        (b'{"model":null}', 422, "invalid_name", "model"),
        (b'{"model":7}', 422, "unsupported", "model"),
        (b'{"model":"tiny","stream":"yes"}', 422, "unsupported", "stream"),
        (b'{"model":"other"}', 404, "model_not_found", "model"),
    ],
)
async def test_what_cannot_be_served_is_refused_in_one_shape(
    body: bytes, status: int, code: str, param: str | None
) -> None:
    world = World()
    client = await world.ask(Client(body))
    assert (client.status, client.error["code"], client.error.get("param")) == (status, code, param)
    assert str(client.error["message"]).startswith("cannot ")
    assert client.error["request_id"] == client.headers[b"x-request-id"].decode()
    # The client's invention must not become a label of the figures.
    assert world.seen.requests[0]["model"] == ""


async def test_a_body_over_the_limit_is_refused_before_and_while_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_BODY_BYTES", 1000)
    announced = await World().ask(Client(b"", [(b"content-length", b"1001")]))
    assert (announced.status, announced.error["code"]) == (413, "too_large")
    whole = await World().ask(Client(b"x" * 1001))
    assert whole.status == 413
    growing = Client(b"")
    growing.messages = [{"type": "http.request", "body": b"x" * 600, "more_body": True} for _ in range(100)]
    assert (await World().ask(growing)).status == 413
    assert len(growing.messages) > 90


async def test_a_body_in_pieces_is_put_together() -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(b"")
        client.messages = [
            {"type": "http.request", "body": CHAT[:10], "more_body": True},
            {"type": "http.request", "body": CHAT[10:], "more_body": False},
        ]
        assert (await world.ask(client)).status == 200
        assert world.requests[0].endswith(CHAT)


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "BODY_SECONDS", 0.02)
    client = Client(b"")
    client.messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    assert (await World().ask(client)).status == 400


async def test_a_client_that_leaves_before_its_body_is_whole_gets_nothing() -> None:
    client = Client(b"")
    client.messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]
    assert (await World().ask(client)).sent == []


async def test_a_model_that_loads_is_told_with_its_loading_object() -> None:
    """F-073."""
    world = World()
    world.routing.error = Unavailable("cannot answer yet: tiny is loading", code="model_loading")
    world.routing.error.retry_after_seconds = 4.2
    world.routing.error.details["loading"] = {"state": "installing"}
    client = await world.ask(Client(b'{"model":"tiny","stream":true}'))
    assert (client.status, client.headers[b"retry-after"]) == (503, b"5")
    assert json.loads(client.body)["loading"] == {"state": "installing"}
    assert world.seen.requests[0]["model"] == "tiny"


async def test_a_replica_that_cannot_be_reached_is_dropped_and_another_one_answers() -> None:
    """F-075."""
    async with serving(answering(plain(b"{}")), before=(1, 1)) as world:
        client = await world.ask(Client(CHAT))
        assert client.status == 200
        assert [route.slot for route in world.routing.dropped] == [0, 1]
        assert world.seen.requests[0]["node"] == "node-2"


async def test_after_three_dead_replicas_the_client_is_asked_to_come_again() -> None:
    world = World(1, 1, 1, 1)
    client = await world.ask(Client(CHAT))
    assert (client.status, client.error["code"], client.headers[b"retry-after"]) == (503, "replica_unreachable", b"1")
    assert "127.0.0.1" not in str(client.error["message"])
    assert world.routing.acquired == openai.ROUTES_TRIED


async def test_a_process_that_does_not_know_the_key_is_not_the_replica() -> None:
    async with serving(answering(plain(b'{"error":{"message":"Invalid API Key"}}', "401 Unauthorized"))) as world:
        client = await world.ask(Client(CHAT))
        assert len(world.routing.dropped) == 1
        assert client.status == 404  # the only replica is gone, and the router says what it has


async def test_a_stream_that_breaks_ends_with_an_error_event_and_without_an_end_marker() -> None:
    whole, half = b'data: {"n":1}\n\n', b'data: {"n":2'
    async with serving(answering(stream(whole, half, ends=False), closes=True)) as world:
        client = await world.ask(Client(CHAT))
        assert client.status == 200
        assert client.is_ended
        first, second, rest = client.body.split(b"\n\n")
        assert (first + b"\n\n", rest) == (whole, b"")
        error = json.loads(second.removeprefix(b"data: "))["error"]
        assert (error["code"], error["type"]) == ("upstream_error", "server_error")
        assert b"[DONE]" not in client.body
        assert b"127.0.0.1" not in client.body
        assert not world.routing.dropped


@pytest.mark.parametrize(
    "raw",
    [
        plain(b'{"choices":[]}')[:-3],
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}",
        b"",
    ],
)
async def test_a_short_plain_answer_is_a_502_and_is_not_sent_to_another_replica(raw: bytes) -> None:
    async with serving(answering(raw, closes=True)) as world:
        client = await world.ask(Client(CHAT))
        assert (client.status, client.error["code"]) == (502, "upstream_error")
        assert world.routing.acquired == 1


async def test_a_client_that_leaves_stops_its_engine_at_once() -> None:
    stopped = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(stream(b"data: 1\n\n", ends=False))
        await reader.read(1)
        stopped.set()
        raise ConnectionError

    async with serving(script) as world:
        client = Client(CHAT)
        async with asyncio.TaskGroup() as group:
            group.create_task(world.ask(client))
            await asyncio.wait_for(client.got_bytes.wait(), 5)
            client.left.set()
            await asyncio.wait_for(stopped.wait(), 5)
        assert not client.is_ended
        assert world.seen.requests[0]["status"] == openai.CLIENT_GONE


async def test_a_client_that_leaves_while_the_engine_thinks_stops_it_too() -> None:
    began, stopped = asyncio.Event(), asyncio.Event()

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        began.set()
        await reader.read(1)
        stopped.set()
        raise ConnectionError

    async with serving(script) as world:
        client = Client(CHAT)
        async with asyncio.TaskGroup() as group:
            group.create_task(world.ask(client))
            await asyncio.wait_for(began.wait(), 5)
            client.left.set()
            await asyncio.wait_for(stopped.wait(), 5)
        assert client.sent == []


async def test_a_server_that_raises_for_a_client_that_left_ends_quietly() -> None:
    async with serving(answering(stream(EVENTS))) as world:
        client = Client(CHAT)

        async def gone(_: MutableMapping[str, Any]) -> None:
            raise BrokenPipeError

        await world.api.at("/v1/chat/completions")(client.scope, client.receive, gone)
        assert world.routing.held == 0


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (
            "400 Bad Request",
            b'{"error":{"code":400,"message":"too long","type":"exceed_context_size_error"}}',
            (400, "too long", "exceed_context_size_error", "exceed_context_size_error"),
        ),
        (
            "422 Unprocessable",
            b'{"detail":[{"loc":["n"]}]}',
            (422, '[{"loc":["n"]}]', "invalid_request_error", "unsupported"),
        ),
        ("404 Not Found", b'{"message":"no"}', (404, "no", "not_found_error", "not_found")),
        ("500 Oops", b"<b>Traceback</b>", (500, "<b>Traceback</b>", "server_error", "upstream_error")),
        ("503 Busy", b'{"error":"Loading model"}', (503, "Loading model", "server_error", "resource_exhausted")),
    ],
)
async def test_an_engines_error_keeps_its_words_in_our_shape(
    status: str, body: bytes, expected: tuple[int, str, str, str]
) -> None:
    async with serving(answering(plain(body, status, "text/html"))) as world:
        client = await world.ask(Client(CHAT))
        error = client.error
        assert (client.status, error["message"], error["type"], error["code"]) == expected
        assert error["request_id"] == client.headers[b"x-request-id"].decode()
        assert client.headers[b"content-type"] == b"application/json"
        assert client.headers[b"content-length"] == str(len(client.body)).encode()


async def test_an_engines_error_that_has_our_shape_passes_unchanged() -> None:
    body = b'{"error": {"message": "m", "type": "t", "code": "c", "param": null}}'
    async with serving(answering(plain(body, "400 Bad Request"))) as world:
        assert (await world.ask(Client(CHAT))).body == body


def test_only_whole_events_pass_whatever_line_ends_they_use() -> None:
    passer = EventPasser()
    assert passer.feed(b"data: 1\n") == b""
    assert passer.feed(b"\ndata: 2\r\n\r\nda") == b"data: 1\n\ndata: 2\r\n\r\n"
    assert passer.feed(b"ta: 3\r\n\r") == b""
    assert passer.feed(b"\n") == b"data: 3\r\n\r\n"
    assert passer.feed(b"rest") == b""
    assert passer.finish() == b"rest"
    assert EventPasser().feed(b"x" * 2_000_000) == b"x" * 2_000_000


@pytest.mark.parametrize(
    "path", ["../metrics", "..", "a/../../slots", "a b", "a\r\nx: y", "a?b", "a//b", ".hidden", "a%2f", "ä"]
)
async def test_a_passed_path_cannot_leave_the_routes_of_the_api(path: str) -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(CHAT)
        client.scope["path_params"] = {"path": path}
        with pytest.raises(NotFound):
            await world.api.passed(client.scope, client.receive, client.send)
        assert world.requests == []


async def test_any_other_plain_path_is_passed_to_the_engine() -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(CHAT)
        client.scope["path_params"] = {"path": "audio/speech"}
        await world.api.passed(client.scope, client.receive, client.send)
        assert world.requests[0].startswith(b"POST /v1/audio/speech ")


FORM = b'--edge\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n--edge--\r\n'


async def test_a_form_is_passed_unchanged_to_the_engine_of_its_model() -> None:
    sound = b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff\r\n'
    body = sound + FORM % b"tiny"
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(body, [(b"content-type", b"multipart/form-data; boundary=edge")])
        client.scope["path_params"] = {"path": "audio/transcriptions"}
        await world.api.passed(client.scope, client.receive, client.send)
        assert client.status == 200
        head, _, sent = world.requests[0].partition(b"\r\n\r\n")
        assert b"content-type: multipart/form-data; boundary=edge" in head
        assert sent == body


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (FORM % b"", b"multipart/form-data; boundary=edge"),
        (FORM % b"tiny", b"multipart/form-data; boundary=other"),
        (FORM % b"tiny", b"multipart/form-data"),
        (FORM % b"tiny\x00", b"multipart/form-data; boundary=edge"),
        (b"{}", b"multipart/form-data; boundary=edge"),
    ],
)
async def test_a_form_without_a_model_is_refused_before_any_engine(body: bytes, content_type: bytes) -> None:
    async with serving(answering(plain(b"{}"))) as world:
        client = Client(body, [(b"content-type", content_type)])
        client.scope["path_params"] = {"path": "audio/transcriptions"}
        await world.api.passed(client.scope, client.receive, client.send)
        assert client.status in (400, 422)
        assert world.requests == []
