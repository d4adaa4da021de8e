"""The control routes: bad input, one error shape, lists, events, figures, readiness."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from tests.api.whole_frontend import Answer, Site, site

from enginehouse.api.events import EventRoutes
from enginehouse.api.requests import MAX_CONTROL_BYTES
from enginehouse.api.routes import ApiRoute
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import OperationId
from enginehouse.frontend.watching.events import LOG_LENGTH
from enginehouse.loop import Loop


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


async def admin(here: Site, method: str, path: str, body: object = None) -> Answer:
    return await here.ask(method, path, body, token=here.tokens["admin"])


async def approve_old(here: Site) -> None:
    assert (await admin(here, "POST", "/api/nodes/old/approve")).status == 200


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/api/operations", b"{", 400, "invalid_json"),
        ("POST", "/api/operations", b"", 400, "invalid_json"),
        ("POST", "/api/operations", b"\xff", 400, "invalid_json"),
        ("POST", "/api/operations", b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/api/operations", b'{"kind":"install","name":"x","force":NaN}', 400, "invalid_json"),
        ("POST", "/api/operations", {"kind": "install", "name": 5}, 400, "invalid_json"),
        ("POST", "/api/operations", {"kind": "explode", "name": "x"}, 400, "invalid_json"),
        ("POST", "/api/operations", {"kind": "install", "name": "x", "unknown": 1}, 400, "invalid_json"),
        ("POST", "/api/operations", {"kind": "install", "name": "a b"}, 422, "invalid_name"),
        ("POST", "/api/operations", {"kind": "install", "name": "llama-cpp", "nodes": []}, 422, "invalid_name"),
        ("POST", "/api/operations", {"kind": "install", "name": "llama-cpp"}, 409, "node_not_approved"),
        ("POST", "/api/operations", {"kind": "install", "name": "llama-cpp", "nodes": ["x"]}, 404, "not_found"),
        ("POST", "/api/operations", b" " * (MAX_CONTROL_BYTES + 1), 413, "too_large"),
        ("POST", "/api/tokens", {"role": "root"}, 422, "invalid_name"),
        ("POST", "/api/tokens", {"role": "user", "name": "*"}, 422, "invalid_name"),
        ("POST", "/api/tokens", {"role": "user", "name": "test"}, 409, "conflict"),
        ("POST", "/api/tokens", {"role": "user", "secret": "x"}, 400, "invalid_json"),
        ("POST", "/api/models/nobody/load", {}, 404, "model_not_found"),
        ("POST", "/api/models/tiny-chat/load", {"node": "nobody"}, 404, "not_found"),
        ("POST", "/api/models/tiny-chat/unload", {}, 404, "not_found"),
        ("GET", "/api/operations/nobody", None, 404, "not_found"),
        ("GET", "/api/events?operation=nobody", None, 404, "not_found"),
        ("GET", "/api/operations?limit=0", None, 422, "invalid_name"),
        ("GET", "/api/operations?limit=501", None, 422, "invalid_name"),
        ("GET", "/api/operations?limit=-1", None, 422, "invalid_name"),
        ("GET", "/api/operations?limit=" + "9" * 5000, None, 422, "invalid_name"),
        ("GET", "/api/operations?all=maybe", None, 422, "invalid_name"),
        ("GET", "/api/operations/" + "x" * 5000, None, 404, "not_found"),
        ("GET", "/api/nodes/nobody", None, 404, "not_found"),
        ("POST", "/api/nodes/nobody/approve", None, 404, "not_found"),
        ("GET", "/nowhere", None, 404, "not_found"),
        ("GET", "/api/nodes/", None, 404, "not_found"),
        ("GET", "/healthz/", None, 404, "not_found"),
        ("DELETE", "/api/operations", None, 405, "not_found"),
        ("POST", "/healthz", None, 405, "not_found"),
    ],
)
async def test_what_cannot_be_done_is_one_sentence_in_one_shape(
    here: Site, method: str, path: str, body: object, status: int, code: str
) -> None:
    answer = await admin(here, method, path, body)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert len(answer.body) < 1000


async def test_a_name_that_no_database_can_be_asked_for_is_refused_on_every_route(
    tmp_path: Path, postgres: Callable[[], str]
) -> None:
    body = {"kind": "install", "name": "llama-cpp", "nodes": ["\x00"]}
    async with site(tmp_path, postgres()) as here:
        with_names = [one for one in here.routes if "{" in one.path]
        roles = {(one.method, re.sub(r"{[^}]*}", "a\x00b", one.path)): one.role for one in with_names}
        named: list[tuple[str, str, object]] = [
            (one.method, re.sub(r"{[^}]*}", "a\x00b", one.path), {}) for one in with_names
        ]
        assert len(named) > 20
        for method, path, asked in (
            *named,
            ("GET", "/api/events?operation=%00", None),
            ("GET", "/api/operations?all=true&before=%00", None),
            ("POST", "/api/operations", body),
            ("POST", "/api/operations", {"kind": "install", "name": "a\x00b"}),
            ("POST", "/api/tokens", {"role": "user", "name": "a\x00b"}),
            ("POST", "/v1/chat/completions", {"model": "a\x00b", "messages": []}),
            ("POST", "/v1/completions", {"model": "\x00"}),
        ):
            role = roles.get((method, path), "admin")
            token = here.tokens[role if role in ("node", "user") else "admin"]
            answer = await here.ask(method, path, asked, token=token)
            assert (answer.status, answer.error["code"]) == (400, "invalid_json"), (path, answer.body)


async def test_a_wrong_method_names_the_right_ones(here: Site) -> None:
    answer = await admin(here, "DELETE", "/api/operations")
    assert answer.headers["allow"] == "GET, HEAD, POST"
    assert answer.error["message"].endswith("it takes GET, HEAD, POST")


async def test_a_fault_of_our_own_tells_nothing_but_where_to_look(here: Site) -> None:
    async def broken(_request: Request) -> Response:
        raise RuntimeError("secret detail")

    extra = ApiRoute("GET", "/broken", "public", "Breaks.", broken)
    answer = await here.ask("GET", "/broken", app=here.app(is_loopback=False, extra=[extra]))
    assert (answer.status, answer.error["code"]) == (500, "internal")
    assert b"secret" not in answer.body


async def test_a_request_keeps_the_id_that_it_came_with(here: Site) -> None:
    answer = await here.ask("GET", "/nowhere", headers=[("x-request-id", "abc")])
    assert answer.error["request_id"] == "abc"
    answer = await here.ask("GET", "/healthz", headers=[("x-correlation-id", "x" * 200)])
    assert len(answer.headers["x-request-id"]) == 32


async def test_workers_may_say_more_than_we_know(here: Site) -> None:
    asked = {"name": "newer", "invented_later": {"a": [1]}}
    answer = await here.ask("POST", "/api/node/register", asked, token=here.tokens["join"])
    assert (answer.status, answer.json["status"]) == (201, "pending")
    assert "nats_jwt" not in answer.json
    path = f"/api/node/{answer.json['id']}/heartbeat"
    said = {"x": 1, "report": {"boot_id": "b", "y": 2}}
    assert (await here.ask("POST", path, said, token=answer.json["node_token"])).status == 200


async def test_null_is_what_is_absent(here: Site) -> None:
    """As in Go, whose programs write it for a map or a list that was never made."""
    asked = {"name": "nil", "node_type": "agent", "labels": None, "total_vram": None}
    answer = await here.ask("POST", "/api/node/register", asked, token=here.tokens["join"])
    assert (answer.status, answer.json["node_type"]) == (201, "agent")
    node = await admin(here, "GET", "/api/nodes/nil")
    assert (node.json["labels"], node.json["total_vram"]) == ({}, 0)
    for body in ({"name": None}, {"name": "x", "labels": 5, "node_type": None}):
        answer = await here.ask("POST", "/api/node/register", body, token=here.tokens["join"])
        assert (answer.status, answer.error["code"]) == (400, "invalid_json")
    path = f"/api/nodes/{here.tokens['node id']}/backends/install"
    wanted = {"backend": "llama-cpp", "uri": None, "name": None}
    assert (await admin(here, "POST", path, wanted)).error["code"] == "node_not_approved"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"report":{"mark":NaN}}', 400),
        (b'{"report":{"mark":1e999}}', 400),
        (b'{"report":{"mark":1e300,"sequence":%s}}' % (b"9" * 300), 200),
        (b'{"available_ram":%s}' % (b"9" * 300), 200),
        (b'{"report":{"results":[{"intent":"x","attempt":1,"outcome":{"message":"\\u0000"}}]}}', 200),
        (b'{"report":{"running":[%s]}}' % b",".join(b'"%d"' % number for number in range(20_000)), 200),
        (b'{"report":5}', 400),
        (b'{"report":{"version":"' + b"x" * MAX_CONTROL_BYTES + b'"}}', 413),
    ],
)
async def test_absurd_heartbeats_are_refused_or_harmless(here: Site, body: bytes, status: int) -> None:
    path = f"/api/node/{here.tokens['node id']}/heartbeat"
    assert (await here.ask("POST", path, body, token=here.tokens["node"])).status == status
    assert (await admin(here, "GET", "/api/nodes")).status == 200
    assert (await here.ask("POST", path, {}, token=here.tokens["node"])).status == 200


async def test_an_operation_is_accepted_shown_and_listed(here: Site) -> None:
    await approve_old(here)
    body = {"kind": "install", "name": "llama-cpp", "nodes": ["old"]}
    accepted = await admin(here, "POST", "/api/operations", body)
    assert accepted.status == 202
    assert (await admin(here, "GET", f"/api/operations/{accepted.json['jobID']}")).json["kind"] == "install"
    listed = (await admin(here, "GET", "/api/operations?all=true&limit=1")).json["operations"]
    assert [one["jobID"] for one in listed] == [accepted.json["jobID"]]


async def test_approving_twice_is_a_conflict(here: Site) -> None:
    await approve_old(here)
    assert (await admin(here, "POST", "/api/nodes/old/approve")).error["code"] == "already_approved"


async def test_a_token_is_shown_once_and_never_listed(here: Site) -> None:
    made = await admin(here, "POST", "/api/tokens", {"role": "user"})
    assert made.status == 201
    assert (await here.ask("GET", "/v1/models", token=made.json["token"])).status == 200
    listed = await admin(here, "GET", "/api/tokens")
    assert made.json["name"] in [one["name"] for one in listed.json]
    assert b"eh-" not in listed.body


def _events(here: Site) -> EventRoutes:
    return EventRoutes(here.frontend.board, here.frontend.models, here.frontend.events, here.frontend.pulse)


async def test_the_stream_begins_with_hello_and_the_operation_that_is_followed(here: Site) -> None:
    await approve_old(here)
    assert (await admin(here, "POST", "/api/models/tiny-chat/load", {})).status == 202
    job = (await admin(here, "GET", "/api/operations?all=true")).json["operations"][0]["jobID"]
    streamed: list[bytes] = []
    async for chunk in _events(here).stream(job, None):
        streamed.append(chunk)
        if b"event: operation" in chunk:
            here.frontend.events.close()
    assert streamed[0].startswith(b"event: hello")
    assert job.encode() in streamed[1]
    assert not here.frontend.events.is_watched


async def test_a_stream_that_missed_something_ends(here: Site) -> None:
    count = 0
    async for _ in _events(here).stream(OperationId(""), None):
        if count == 0:
            for _ in range(LOG_LENGTH + 1):
                here.frontend.events.publish("node", "n", b"{}")
        count += 1
    assert count < 5


async def test_the_first_figures_are_there(here: Site) -> None:
    await approve_old(here)
    await here.ask("GET", "/api/nodes")
    text = (await admin(here, "GET", "/metrics")).body.decode()
    for figure in (
        'enginehouse_build{version="',
        'enginehouse_nodes{health="offline"} 1.0',
        'enginehouse_intents{state="running"} 0.0',
        "enginehouse_in_flight 0.0",
        'enginehouse_denied_total{code="unauthenticated"} 1.0',
        "# TYPE enginehouse_requests_total counter",
        "# TYPE enginehouse_request_seconds histogram",
    ):
        assert figure in text, figure


@pytest.mark.parametrize(
    ("error", "is_traced"), [(Unavailable("cannot use the database now"), False), (ValueError("a bug"), True)]
)
async def test_a_loop_traces_bugs_and_only_tells_what_may_heal(
    caplog: pytest.LogCaptureFixture, error: Exception, is_traced: bool
) -> None:
    async def failing() -> None:
        raise error

    loop = Loop("any", failing, 60.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):  # it fails before it waits for the first time
            await loop.run()
    assert str(error) in caplog.text
    assert ("Traceback" in caplog.text) is is_traced


async def test_a_machine_that_waits_for_approval_is_seen_to_be_there(here: Site) -> None:
    async def seen() -> str:
        return str((await admin(here, "GET", "/api/nodes/old")).json["last_heartbeat"])

    first = await seen()
    machine = {"name": "old", "platform": "linux/amd64", "capability": "default"}
    assert (await here.ask("POST", "/api/node/register", machine, token=here.tokens["join"])).status == 201
    assert await seen() > first


async def test_ready_says_why_not(here: Site) -> None:
    assert (await here.ask("GET", "/readyz")).status == 200
    here.bus.is_connected = False
    answer = await here.ask("GET", "/readyz")
    assert (answer.status, answer.json["reasons"]) == (503, ["the bus is not connected"])
    assert (await here.ask("GET", "/healthz")).status == 200
    here.bus.is_connected = True
    loop = Loop("dispatch", here.frontend.dispatcher.step, 1.0)
    loop.failures = 3
    here.wakes.loops = {"dispatch": loop}
    assert (await here.ask("GET", "/readyz")).json["reasons"] == ["the loop dispatch keeps failing"]
    here.wakes.loops = {}
    here.wakes.stop_with(here.frontend.events.close)()
    assert (await here.ask("GET", "/readyz")).json["reasons"] == ["this frontend is stopping"]
