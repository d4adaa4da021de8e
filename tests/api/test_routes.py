"""Every route against every role: closed by default, and the table is the whole truth."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.whole_frontend import LOCAL, Site, site

from enginehouse.api.late_route import LateRoute

# The published table. A new route fails here until somebody has said who may call it.
TABLE = {
    ("GET", "/"): "public",
    ("GET", "/web/{path:path}"): "public",
    ("GET", "/join.sh"): "public",
    ("GET", "/join/{name}"): "public",
    ("GET", "/healthz"): "public",
    ("GET", "/readyz"): "public",
    ("GET", "/version"): "reader",
    ("GET", "/metrics"): "viewer",
    ("GET", "/api/settings"): "viewer",
    ("GET", "/openapi.json"): "viewer",
    ("GET", "/api/doctor"): "viewer",
    ("GET", "/api/node/{id}/reach"): "node",
    ("GET", "/api/logs/{program}"): "admin",
    ("GET", "/api/nodes/{id}/worker-log"): "admin",
    ("POST", "/api/node/challenge"): "machine",
    ("POST", "/api/node/register"): "machine",
    ("POST", "/api/node/{id}/heartbeat"): "node",
    ("POST", "/api/node/{id}/deregister"): "node",
    ("DELETE", "/api/node/{id}"): "node",
    ("POST", "/api/node/{id}/drain"): "node",
    ("POST", "/api/node/{id}/resume"): "node",
    ("GET", "/api/node/{id}/models"): "node",
    ("GET", "/api/nodes"): "viewer",
    ("DELETE", "/api/nodes/{id}"): "admin",
    ("POST", "/api/nodes/{id}/drain"): "admin",
    ("POST", "/api/nodes/{id}/resume"): "admin",
    ("GET", "/api/nodes/{id}/backends"): "viewer",
    ("GET", "/api/nodes/{id}/logs/{model:path}"): "viewer",
    ("POST", "/api/nodes/{id}/backends/install"): "admin",
    ("POST", "/api/nodes/{id}/backends/upgrade"): "admin",
    ("POST", "/api/nodes/{id}/backends/delete"): "admin",
    ("GET", "/api/nodes/{id}"): "viewer",
    ("POST", "/api/nodes/{id}/approve"): "admin",
    ("POST", "/api/operations"): "admin",
    ("GET", "/api/operations"): "viewer",
    ("POST", "/api/operations/plan"): "viewer",
    ("GET", "/api/operations/history"): "viewer",
    ("GET", "/api/operations/{id}"): "viewer",
    ("POST", "/api/operations/{id}/cancel"): "admin",
    ("POST", "/api/operations/{id}/retry"): "admin",
    ("POST", "/api/operations/{id}/release"): "admin",
    ("POST", "/api/operations/{id}/dismiss"): "admin",
    ("GET", "/api/events"): "viewer",
    ("GET", "/api/history"): "viewer",
    ("GET", "/backends"): "viewer",
    ("GET", "/backends/available"): "viewer",
    ("GET", "/backends/galleries"): "viewer",
    ("GET", "/backends/upgrades"): "viewer",
    ("POST", "/backends/upgrades/check"): "admin",
    ("POST", "/backends/apply"): "admin",
    ("POST", "/backends/upgrade/{name}"): "admin",
    ("POST", "/backends/delete/{name}"): "admin",
    ("GET", "/backends/jobs/{id}"): "viewer",
    ("GET", "/api/models"): "viewer",
    ("GET", "/api/replicas"): "viewer",
    ("DELETE", "/api/models/{name:path}"): "admin",
    ("POST", "/api/models"): "admin",
    ("GET", "/api/models/{name:path}"): "viewer",
    ("PUT", "/api/models/{name:path}"): "admin",
    ("PATCH", "/api/models/{name:path}"): "admin",
    ("GET", "/api/nodes/scheduling"): "viewer",
    ("POST", "/api/nodes/scheduling"): "admin",
    ("GET", "/api/nodes/scheduling/{model:path}"): "viewer",
    ("DELETE", "/api/nodes/scheduling/{model:path}"): "admin",
    ("GET", "/api/nodes/{id}/labels"): "viewer",
    ("PUT", "/api/nodes/{id}/labels"): "admin",
    ("PATCH", "/api/nodes/{id}/labels"): "admin",
    ("DELETE", "/api/nodes/{id}/labels/{key}"): "admin",
    ("GET", "/api/models/{name:path}/explain"): "viewer",
    ("GET", "/api/models/{name:path}/load-status"): "viewer",
    ("POST", "/api/models/{name:path}/copy"): "admin",
    ("GET", "/api/models/{name:path}/export"): "admin",
    ("POST", "/models/import"): "admin",
    ("POST", "/models/apply"): "admin",
    ("POST", "/models/plan"): "viewer",
    ("GET", "/models/jobs/{id}"): "viewer",
    ("POST", "/models/delete/{name:path}"): "admin",
    ("GET", "/models/available"): "viewer",
    ("GET", "/models/galleries"): "viewer",
    ("HEAD", "/api/uploads/{sha256}"): "admin",
    ("PUT", "/api/uploads/{sha256}"): "admin",
    ("GET", "/api/uploads/{sha256}"): "node",
    ("POST", "/api/models/{name:path}/load"): "admin",
    ("POST", "/api/models/{name:path}/unload"): "admin",
    ("GET", "/v1/models"): "reader",
    ("GET", "/v1/models/{name:path}"): "reader",
    ("POST", "/api/session"): "public",
    ("GET", "/api/session"): "viewer",
    ("DELETE", "/api/session"): "viewer",
    ("POST", "/api/session/links"): "admin",
    ("GET", "/api/sessions"): "admin",
    ("GET", "/api/audit"): "admin",
    ("DELETE", "/api/sessions/{id}"): "admin",
    ("POST", "/api/tokens"): "admin",
    ("GET", "/api/tokens"): "viewer",
    ("DELETE", "/api/tokens/{id}"): "admin",
    ("POST", "/api/tokens/{id}/rotate"): "admin",
    ("GET", "/api/nodes/rejected"): "viewer",
    ("DELETE", "/api/nodes/rejected/{id}"): "admin",
    ("POST", "/api/nodes/{id}/reject"): "admin",
    ("GET", "/api/usage"): "reader",
    **{
        ("POST", f"{prefix}/{name}"): "user"
        for prefix in ("/v1", "")
        for name in ("chat/completions", "completions", "embeddings", "rerank", "tokenize", "detokenize")
    },
    ("POST", "/v1/{path:path}"): "user",
    ("POST", "/api/engines/{model:path}/{call}"): "admin",
}
OPENED_BY = {
    "public": {"", "admin", "viewer", "user", "join", "node"},
    "user": {"admin", "user"},
    "reader": {"admin", "viewer", "user"},
    "node": {"node", "join"},
    "machine": {"", "join", "admin"},
    "viewer": {"admin", "viewer"},
    "admin": {"admin"},
}
ROUTES = sorted(TABLE)
FOREIGN = [
    (("host", "evil.example"),),
    (("host", "127.0.0.1.evil.example:8080"),),
    (*LOCAL, ("origin", "http://evil.example")),
    (*LOCAL, ("origin", "null")),
    (("host", "["),),
    (*LOCAL, ("origin", "http://[")),
    (),
]


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # A wrong token is answered after a pause, so that guessing costs no queries; here every route gets four of them.
    monkeypatch.setattr("enginehouse.frontend.fleet.tokens.LOOK_AGAIN_SECONDS", 0.0)
    async with site(tmp_path) as made:
        yield made


def filled(path: str, here: Site) -> str:
    values = {"{name:path}": "tiny", "{name}": "llama-cpp", "{path:path}": "audio/speech", "{model:path}": "tiny"}
    for name, value in {**values, "{call}": "Status", "{sha256}": "0" * 64, "{id}": here.tokens["node id"]}.items():
        path = path.replace(name, value)
    return path


async def test_the_table_is_exactly_what_is_routed_and_described(here: Site) -> None:
    assert {(route.method, route.path): route.role for route in here.routes} == TABLE
    routed = {
        (method, route.path) for route in here.open.routes if isinstance(route, LateRoute) for method in route.methods
    }
    assert routed - {("HEAD", path) for _, path in routed if ("HEAD", path) not in TABLE} == set(TABLE)
    described = (await here.ask("GET", "/openapi.json", token=here.tokens["admin"])).json
    found = {
        (method.upper(), path): operation["x-role"]
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    }
    assert found == {(method, path.replace(":path", "")): role for (method, path), role in TABLE.items()}


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_route_opens_to_its_roles_and_to_nobody_else(here: Site, method: str, path: str) -> None:
    role = TABLE[method, path]
    for held in ("", "user", "join", "node", "viewer", "admin"):
        answer = await here.ask(method, filled(path, here), {}, token=here.tokens[held])
        if held in OPENED_BY[role]:
            assert answer.status not in (401, 403), (held, answer.body)
        elif held:
            assert (answer.status, answer.error["code"]) == (403, "forbidden"), held
        else:
            assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_token_that_is_shown_must_be_right_everywhere(here: Site, method: str, path: str) -> None:
    for app in (here.open, here.app(is_loopback=True)):
        answer = await here.ask(method, filled(path, here), {}, token="eh-user-wrong", app=app)
        assert (answer.status, answer.error["code"]) == (401, "unauthenticated")
        headers = (*LOCAL, ("x-api-key", "eh-user-wrong"))
        assert (await here.ask(method, filled(path, here), {}, headers=headers, app=app)).status == 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_a_key_of_another_program_is_ignored_by_inference_on_loopback_alone(
    here: Site, method: str, path: str
) -> None:
    local, key = here.app(is_loopback=True), ("authorization", "Bearer sk-of-another-program")
    answer = await here.ask(method, filled(path, here), {}, headers=(*LOCAL, key), app=local)
    assert (answer.status == 401) == (TABLE[method, path] not in ("user", "reader"))
    for headers in ((*page, key) for page in (*FOREIGN, (*LOCAL, ("x-forwarded-for", "203.0.113.9")))):
        assert (await here.ask(method, filled(path, here), {}, headers=headers, app=local)).status == 401, headers
    assert (await here.ask(method, filled(path, here), {}, headers=(*LOCAL, key))).status == 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_on_loopback_only_inference_answers_without_a_token_and_no_foreign_page(
    here: Site, method: str, path: str
) -> None:
    local = here.app(is_loopback=True)
    role = TABLE[method, path]
    answer = await here.ask(method, filled(path, here), {}, app=local)
    assert (answer.status == 401) == (role not in ("public", "user", "reader", "machine"))
    for headers in FOREIGN:
        answer = await here.ask(method, filled(path, here), {}, headers=headers, app=local)
        assert (answer.status == 401) == (role not in ("public", "machine")), headers
    for passed_on in ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "x-real-ip", "forwarded", "via"):
        headers = (*LOCAL, (passed_on, "203.0.113.9"))
        answer = await here.ask(method, filled(path, here), {}, headers=headers, app=local)
        assert (answer.status == 401) == (role not in ("public", "machine")), headers
    for headers in ((("host", "localhost"),), (("host", "[::1]:80"),), (*LOCAL, ("origin", "http://localhost:3000"))):
        answer = await here.ask(method, filled(path, here), {}, headers=headers, app=local)
        assert (answer.status == 401) == (role not in ("public", "user", "reader", "machine")), headers


async def test_a_node_speaks_for_itself_only(here: Site) -> None:
    other = (await here.ask("POST", "/api/node/register", {"name": "second"}, token=here.tokens["join"])).json
    for path in ("heartbeat", "deregister"):
        answer = await here.ask("POST", f"/api/node/{other['id']}/{path}", {}, token=here.tokens["node"])
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert (await here.ask("POST", f"/api/node/{other['id']}/{path}", {}, token=other["node_token"])).status == 200
        answer = await here.ask("POST", f"/api/node/second/{path}", {}, token=other["node_token"])
        assert answer.status == 403


async def test_a_join_token_does_not_speak_for_a_node_that_has_a_key(here: Site) -> None:
    from nacl.signing import SigningKey
    from tests.frontend.world import signed

    challenge = (await here.ask("POST", "/api/node/challenge", token=here.tokens["join"])).json["challenge"]
    registered = await here.frontend.nodes.register(signed("keyed", SigningKey(b"1" * 32), challenge=challenge))
    answer = await here.ask("POST", f"/api/node/{registered.node.id}/heartbeat", {}, token=here.tokens["join"])
    assert answer.status == 403
    answer = await here.ask("POST", "/api/node/keyed/heartbeat", {}, token=here.tokens["join"])
    assert answer.status == 403
    answer = await here.ask("POST", "/api/node/nobody/heartbeat", {}, token=here.tokens["join"])
    assert answer.status == 404


async def test_the_own_token_of_a_node_ends_with_the_next_registration(here: Site) -> None:
    path = f"/api/node/{here.tokens['node id']}/heartbeat"
    again = (await here.ask("POST", "/api/node/register", {"name": "old"}, token=here.tokens["join"])).json
    assert again["id"] == here.tokens["node id"]
    assert (await here.ask("POST", path, {}, token=here.tokens["node"])).status == 401
    assert (await here.ask("POST", path, {}, token=again["node_token"])).status == 200


async def test_a_browser_is_told_what_this_is(here: Site) -> None:
    answer = await here.ask("GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"OpenAI-compatible inference service" in answer.body
    assert b"enginehouse" in answer.body


async def test_the_page_can_only_load_its_own_files(here: Site) -> None:
    for path in ("/", "/web/main.js"):
        policy = (await here.ask("GET", path)).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
    body = (await here.ask("GET", "/")).body
    assert re.findall(rb"<script(?![^>]*src=)", body) == []
    assert re.findall(rb"(?:src|href)=\"(?!/web/)", body) == []


async def test_a_file_of_the_page_is_sent_again_only_when_it_changed(here: Site) -> None:
    first = await here.ask("GET", "/web/dom.js")
    assert (first.status, first.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert (await here.ask("GET", "/web/dom.js", headers=[("if-none-match", first.headers["etag"])])).status == 304
    assert (await here.ask("GET", "/web/dom.js", headers=[("if-none-match", '"other"')])).status == 200


@pytest.mark.parametrize("path", ["/web/../app.py", "/web/%2e%2e/app.py", "/web/", "/web/dom.js/", "/web/styles"])
async def test_nothing_but_the_files_of_the_page_is_served(here: Site, path: str) -> None:
    answer = await here.ask("GET", path)
    assert answer.status == 404
    assert answer.json["error"]["code"] == "not_found"


async def test_the_head_of_the_event_stream_is_an_answer_that_ends(here: Site) -> None:
    async with asyncio.timeout(10):
        answer = await here.ask("HEAD", "/api/events", token=here.tokens["admin"])
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
