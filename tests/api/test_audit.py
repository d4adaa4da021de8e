"""What requests leave in the audit: who, from where, what, with which result; and never a secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.test_routes import filled
from tests.api.test_sessions import SAME, by, code_of, signed_in
from tests.api.whole_frontend import Site, site


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    monkeypatch.setattr("enginehouse.frontend.fleet.tokens.LOOK_AGAIN_SECONDS", 0.0)
    async with site(tmp_path) as made:
        yield made


async def audit(here: Site, query: str = "") -> list[dict[str, Any]]:
    """The records, oldest first."""
    await here.frontend.access.audit.step()
    answer = await here.ask("GET", f"/api/audit?limit=500{query}", token=here.tokens["admin"])
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["audit"]
    return found[::-1]


async def test_a_change_is_recorded_with_who_from_where_and_what(here: Site) -> None:
    cookie = await signed_in(here)
    await audit(here)
    made = await here.ask("POST", "/api/tokens", {"role": "user", "name": "laptop"}, headers=by(cookie))
    await here.ask("DELETE", "/api/tokens/laptop", token=here.tokens["admin"], client="10.1.2.3")
    first, second = (await audit(here))[-2:]
    session = (await here.ask("GET", "/api/session", headers=by(cookie))).json
    assert set(first) == {
        *("id", "at", "who", "role", "token_id", "session_id", "address", "method", "path", "summary"),
        *("target", "status", "error", "operation_id", "count"),
    }
    assert (first["who"], first["role"], first["session_id"]) == ("test", "admin", session["session_id"])
    assert (first["method"], first["path"], first["summary"]) == ("POST", "/api/tokens", "Create a token.")
    assert (first["target"], first["status"], first["error"], first["count"]) == ("laptop", 201, "", 1)
    assert (second["session_id"], second["address"], second["target"]) == ("", "10.1.2.3", "laptop")
    assert first["token_id"] == second["token_id"]
    assert made.json["token"] not in str(await audit(here))


async def test_an_operation_is_named_by_its_id(here: Site) -> None:
    admin = here.tokens["admin"]
    await here.ask("POST", "/api/nodes/old/approve", {}, token=admin)
    asked = await here.ask("POST", "/api/nodes/old/drain", {}, token=admin)
    assert asked.status == 202, asked.body
    job = asked.json["jobID"]
    await here.ask("POST", f"/api/operations/{job}/cancel", {}, token=admin)
    drained, cancelled = (await audit(here, "&path=/api/"))[-2:]
    assert (drained["operation_id"], drained["target"]) == (job, "old")
    assert cancelled["target"] == job


async def test_signing_in_and_out_and_refusals_are_recorded(here: Site) -> None:
    code = await code_of(here, "viewer")
    answer = await here.ask("POST", "/api/session", {"code": code}, headers=SAME)
    cookie = answer.headers["set-cookie"].partition(";")[0]
    await here.ask("POST", "/api/session", {"code": code}, headers=SAME)
    await here.ask("POST", "/api/session", {"token": here.tokens["user"]}, headers=SAME)
    await here.ask("POST", "/api/tokens", {}, headers=by(cookie))
    await here.ask("POST", "/api/tokens", {}, headers=by(cookie, own=False))
    await here.ask("POST", "/api/tokens", {}, token=here.tokens["join"])
    await here.ask("POST", "/api/tokens", {}, token="wrong")
    await here.ask("DELETE", "/api/session", headers=by(cookie))
    found = await audit(here)
    shown = [(one["method"], one["path"], one["role"], one["status"], one["error"]) for one in found]
    assert shown == [
        ("POST", "/api/session/links", "admin", 201, ""),
        ("POST", "/api/session", "viewer", 201, ""),
        ("POST", "/api/session", "", 401, "unauthenticated"),
        ("POST", "/api/session", "", 403, "forbidden"),
        ("POST", "/api/tokens", "viewer", 403, "forbidden"),
        ("POST", "/api/tokens", "join", 403, "forbidden"),
        ("POST", "/api/tokens", "", 401, "unauthenticated"),
        ("DELETE", "/api/session", "viewer", 204, ""),
    ]
    assert [one["count"] for one in found] == [1, 1, 1, 1, 2, 1, 1, 1], "alike in a row"
    assert found[1]["session_id"] == found[-1]["session_id"] == answer.json["session_id"]
    everything = str(found)
    for secret in (code, cookie.partition("=")[2], *(here.tokens[role] for role in ("admin", "user", "join"))):
        assert secret not in everything


async def test_looking_planning_inference_and_workers_leave_no_record_and_every_change_does(here: Site) -> None:
    await audit(here)
    for route in here.routes:
        known = len(await audit(here))
        answer = await here.ask(route.method, filled(route.path, here), {}, token=here.tokens["admin"])
        is_change = (
            route.method not in ("GET", "HEAD")
            and route.raw is None
            and route.role in ("public", "viewer", "admin")
            and route.path not in ("/api/operations/plan", "/models/plan")
        )
        after = await audit(here)
        assert len(after) - known == (1 if is_change else 0), (route.method, route.path)
        if is_change:
            assert after[-1]["summary"] == route.summary
            assert after[-1]["status"] == answer.status


async def test_only_admins_read_it_and_pages_follow_each_other(here: Site) -> None:
    for role in ("viewer", "user", "join", "node"):
        assert (await here.ask("GET", "/api/audit", token=here.tokens[role])).status == 403
    admin = here.tokens["admin"]
    for number in range(5):
        await here.ask("DELETE", f"/api/tokens/no-{number}", token=admin)
    await audit(here)
    first = (await here.ask("GET", "/api/audit?limit=3", token=admin)).json
    second = (await here.ask("GET", f"/api/audit?limit=3&before={first['next']}", token=admin)).json
    assert [one["target"] for one in first["audit"] + second["audit"]] == [f"no-{n}" for n in (4, 3, 2, 1, 0)]
    assert "next" not in second
    for query in ("limit=0", "limit=501", "limit=x"):
        assert (await here.ask("GET", f"/api/audit?{query}", token=admin)).status == 422
    for query in ("before=nothing", "before=" + "x" * 65, "before=%0a"):
        assert (await here.ask("GET", f"/api/audit?{query}", token=admin)).status == 404
    assert (await here.ask("GET", "/api/audit?who=%0a", token=admin)).json == {"audit": []}
