"""People in browsers: login links, cookies, sign-ins that are refused, pages of other sites, and who may only look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from tests.api.test_routes import filled
from tests.api.whole_frontend import LOCAL, Answer, Site, site

from enginehouse import __version__
from enginehouse.api.routes import ApiRoute
from enginehouse.frontend.fleet.sign_in_limit import MOST_FAILURES
from enginehouse.store import db
from enginehouse.store.db import Connection

OWN = "http://127.0.0.1:8080"
SAME = (*LOCAL, ("origin", OWN))
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Site]:
    # A wrong token is answered after a pause, so that guessing costs no queries.
    monkeypatch.setattr("enginehouse.frontend.fleet.tokens.LOOK_AGAIN_SECONDS", 0.0)
    async with site(tmp_path) as made:
        yield made


async def code_of(here: Site, role: str = "admin") -> str:
    answer = await here.ask("POST", "/api/session/links", {"role": role}, token=here.tokens["admin"])
    assert answer.status == 201
    return str(answer.json["code"])


def cookie_in(answer: Answer) -> str:
    return answer.headers["set-cookie"].partition(";")[0]


async def signed_in(here: Site, role: str = "admin") -> str:
    """The cookie of a new session."""
    answer = await here.ask("POST", "/api/session", {"code": await code_of(here, role)}, headers=SAME)
    assert answer.status == 201, answer.body
    return cookie_in(answer)


def by(cookie: str, *more: tuple[str, str], own: bool = True) -> tuple[tuple[str, str], ...]:
    return (*(SAME if own else LOCAL), ("cookie", cookie), *more)


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    real = db.now

    def now(connection: Connection) -> float:
        return real(connection) + seconds

    monkeypatch.setattr(db, "now", now)


async def test_a_login_link_signs_in_once(here: Site) -> None:
    made = await here.ask("POST", "/api/session/links", token=here.tokens["admin"])
    assert set(made.json) == {"url", "code", "expires_at"}
    assert made.json["url"] == f"{OWN}/#/login/{made.json['code']}"
    assert made.headers["cache-control"] == "no-store"
    answer = await here.ask("POST", "/api/session", {"code": made.json["code"]}, headers=SAME)
    assert (answer.status, answer.headers["cache-control"]) == (201, "no-store")
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name.startswith("enginehouse_session_8080=")
    assert attributes[:3] == ["HttpOnly", "SameSite=Strict", "Path=/"]
    assert attributes[3] in ("Max-Age=604800", "Max-Age=604799")
    secret = name.partition("=")[2]
    assert secret.encode() not in answer.body
    shown = answer.json
    assert set(shown) == {"name", "role", "expires_at", "version", "frontend", "session_id"}
    assert (shown["name"], shown["role"], shown["version"]) == ("test", "admin", __version__)
    present = await here.ask("GET", "/api/session", headers=by(name))
    assert (present.status, present.json) == (200, shown)
    again = await here.ask("POST", "/api/session", {"code": made.json["code"]}, headers=SAME)
    assert (again.status, again.error["code"]) == (401, "unauthenticated")
    # The secret of a session is good in a cookie only, and the code is no credential at all.
    for token in (secret, made.json["code"]):
        assert (await here.ask("GET", "/api/session", token=token)).status == 401
    misplaced = by(f"enginehouse_session_8080={here.tokens['admin']}")
    assert (await here.ask("GET", "/api/session", headers=misplaced)).status == 401


async def test_all_refused_sign_ins_look_alike(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    used = await code_of(here)
    assert (await here.ask("POST", "/api/session", {"code": used})).status == 201
    old = await code_of(here)
    short = {"role": "admin", "name": "short", "ttl_seconds": 30}
    expired = (await here.ask("POST", "/api/tokens", short, token=here.tokens["admin"])).json["token"]
    gone = (await here.ask("POST", "/api/tokens", {"role": "admin", "name": "gone"}, token=here.tokens["admin"])).json
    assert (await here.ask("DELETE", f"/api/tokens/{gone['id']}", token=here.tokens["admin"])).status == 200
    later(monkeypatch, 601)
    await here.frontend.keys.step()
    bodies = [{"code": "x" * 24}, {"code": used}, {"code": old}]
    bodies += [{"token": "x" * 40}, {"token": expired}, {"token": gone["token"]}]
    answers = [await here.ask("POST", "/api/session", body, client=f"10.0.1.{n}") for n, body in enumerate(bodies)]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.error["message"] for answer in answers}) == 1
    assert not any("set-cookie" in answer.headers for answer in answers)


@pytest.mark.parametrize("role", ["user", "join", "node"])
async def test_a_token_that_is_not_for_people_is_refused_with_the_one_that_is_needed(here: Site, role: str) -> None:
    answer = await here.ask("POST", "/api/session", {"token": here.tokens[role]})
    assert (answer.status, answer.error["code"]) == (403, "forbidden")
    assert f"a {role} token" in answer.error["message"]
    assert "admin token" in answer.error["message"]


@pytest.mark.parametrize("role", ["admin", "viewer"])
async def test_a_typed_token_signs_in_with_its_role(here: Site, role: str) -> None:
    answer = await here.ask("POST", "/api/session", {"token": here.tokens[role]})
    assert (answer.status, answer.json["role"]) == (201, role)
    held = await here.ask("GET", "/api/session", headers=by(cookie_in(answer), own=False))
    assert (held.status, held.json["role"]) == (200, role)


async def test_a_token_is_shown_as_the_caller_that_it_is(here: Site) -> None:
    answer = await here.ask("GET", "/api/session", token=here.tokens["viewer"])
    assert (answer.status, answer.json["role"], answer.json["expires_at"]) == (200, "viewer", None)
    assert answer.json["session_id"] == ""
    assert (await here.ask("GET", "/api/session", token=here.tokens["user"])).status == 403
    assert (await here.ask("GET", "/api/session")).status == 401
    assert (await here.ask("DELETE", "/api/session", token=here.tokens["admin"])).status == 409


@pytest.mark.parametrize(
    "body", [{}, {"code": "a", "token": "b"}, {"code": 1}, {"password": "x"}, b"code=x", {"code": "a\x00"}]
)
async def test_a_sign_in_that_says_nothing_or_too_much_is_refused(here: Site, body: object) -> None:
    assert (await here.ask("POST", "/api/session", body)).status in (400, 422)


async def test_too_many_failures_from_one_address_are_stopped_for_a_while(here: Site) -> None:
    for _ in range(MOST_FAILURES):
        assert (await here.ask("POST", "/api/session", {"code": "wrong"})).status == 401
    good = {"code": await code_of(here)}
    refused = await here.ask("POST", "/api/session", good)
    assert (refused.status, refused.error["code"]) == (429, "rate_limited")
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert (await here.ask("POST", "/api/session", good, client="10.0.0.10")).status == 201


async def test_signing_in_right_is_no_failure(here: Site) -> None:
    for _ in range(2 * MOST_FAILURES):
        assert (await here.ask("POST", "/api/session", {"token": here.tokens["admin"]})).status == 201


async def test_signing_out_ends_the_session_and_removes_the_cookie(here: Site) -> None:
    cookie, other = await signed_in(here), await signed_in(here)
    answer = await here.ask("DELETE", "/api/session", headers=by(cookie))
    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["set-cookie"] == "enginehouse_session_8080=; HttpOnly; SameSite=Strict; Path=/; Max-Age=0"
    assert (await here.ask("GET", "/api/session", headers=by(cookie))).status == 401
    assert (await here.ask("GET", "/api/session", headers=by(other))).status == 200


async def test_signing_in_again_replaces_the_session_of_this_browser(here: Site) -> None:
    cookie = await signed_in(here)
    answer = await here.ask("POST", "/api/session", {"code": await code_of(here)}, headers=by(cookie))
    assert answer.status == 201
    assert (await here.ask("GET", "/api/session", headers=by(cookie))).status == 401
    # An old cookie does not keep anybody from signing in.
    assert (await here.ask("POST", "/api/session", {"code": await code_of(here)}, headers=by(cookie))).status == 201


async def test_over_https_the_cookie_and_the_link_are_for_https(here: Site) -> None:
    https = (("host", "box.example"), ("x-forwarded-proto", "https"), ("x-forwarded-for", "10.9.8.7"))
    made = await here.ask("POST", "/api/session/links", token=here.tokens["admin"], headers=https, client="127.0.0.1")
    assert made.json["url"].startswith("https://box.example/#/login/")
    page = (*https, ("origin", "https://box.example"))
    answer = await here.ask("POST", "/api/session", {"code": made.json["code"]}, headers=page, client="127.0.0.1")
    assert answer.headers["set-cookie"].startswith("enginehouse_session=")
    assert answer.headers["set-cookie"].endswith("; Secure")
    cookie = (*page, ("cookie", cookie_in(answer)))
    for path, body in (("/backends/upgrades/check", {}), ("/v1/chat/completions", CHAT)):
        found = await here.ask("POST", path, body, headers=cookie, client="127.0.0.1")
        assert found.status not in (401, 403), (path, found.body)
    (session,) = (await here.ask("GET", "/api/sessions", headers=cookie, client="127.0.0.1")).json
    assert session["address"] == "10.9.8.7"
    # Only a proxy that is trusted is believed.
    assert (await here.ask("POST", "/backends/upgrades/check", {}, headers=cookie)).error["code"] == "cross_site"


async def test_sessions_are_listed_and_ended_by_admins_and_are_no_tokens(here: Site) -> None:
    admin, viewer = await signed_in(here), await signed_in(here, "viewer")
    listed = (await here.ask("GET", "/api/sessions", headers=by(admin))).json
    assert [(one["role"], one["is_current"]) for one in listed] == [("admin", True), ("viewer", False)]
    assert set(listed[0]) == {"id", "name", "role", "created_at", "expires_at", "address", "is_current"}
    assert {one["address"] for one in listed} == {"10.0.0.9"}
    tokens = (await here.ask("GET", "/api/tokens", headers=by(admin))).json
    assert {one["role"] for one in tokens} == {"admin", "viewer", "user", "join"}
    assert len(tokens) == 4
    assert (await here.ask("GET", "/api/sessions", headers=by(viewer))).status == 403
    assert (await here.ask("DELETE", f"/api/sessions/{listed[0]['id']}", headers=by(viewer))).status == 403
    assert (await here.ask("DELETE", f"/api/sessions/{listed[1]['id']}", headers=by(admin))).status == 204
    assert (await here.ask("GET", "/api/session", headers=by(viewer))).status == 401
    assert (await here.ask("DELETE", f"/api/sessions/{listed[1]['id']}", headers=by(admin))).status == 404
    # A session cannot be revoked as a token, nor a token ended as a session.
    assert (await here.ask("DELETE", f"/api/tokens/{listed[0]['id']}", headers=by(admin))).status == 404
    assert (await here.ask("DELETE", f"/api/sessions/{tokens[0]['id']}", headers=by(admin))).status == 404


async def test_a_session_ends_with_the_token_it_came_from(here: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"role": "admin", "name": "laptop", "ttl_seconds": 7200}
    token = (await here.ask("POST", "/api/tokens", asked, token=here.tokens["admin"])).json
    typed = await here.ask("POST", "/api/session", {"token": token["token"]})
    assert typed.json["expires_at"] <= token["expires_at"]
    link = (await here.ask("POST", "/api/session/links", {"role": "viewer"}, headers=by(cookie_in(typed)))).json
    linked = await here.ask("POST", "/api/session", {"code": link["code"]})
    unused = (await here.ask("POST", "/api/session/links", headers=by(cookie_in(typed)))).json["code"]
    for answer in (typed, linked):
        assert (await here.ask("GET", "/api/nodes", headers=by(cookie_in(answer)))).status == 200
    assert (await here.ask("DELETE", "/api/tokens/laptop", token=here.tokens["admin"])).status == 200
    for answer in (typed, linked):
        assert (await here.ask("GET", "/api/nodes", headers=by(cookie_in(answer)))).status == 401
    assert (await here.ask("POST", "/api/session", {"code": unused})).status == 401


async def test_a_session_ends_by_itself_before_anything_is_read_again(here: Site) -> None:
    cookie = await signed_in(here)
    here.frontend.keys._ahead_seconds += 7 * 86400 - 60
    assert (await here.ask("GET", "/api/nodes", headers=by(cookie))).status == 200
    here.frontend.keys._ahead_seconds += 61
    assert here.frontend.keys.identify_session(cookie.partition("=")[2]) is None


@pytest.mark.parametrize("way", ["sign out", "revoke"])
async def test_who_follows_something_gets_nothing_more_once_the_credential_has_ended(here: Site, way: str) -> None:
    cookie = await signed_in(here)
    admin = here.tokens["admin"]
    token = (await here.ask("POST", "/api/tokens", {"role": "viewer", "name": "eye"}, token=admin)).json["token"]

    async def follow(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"before ", "more_body": True})
        if way == "revoke":
            await here.ask("DELETE", "/api/tokens/eye", token=admin)
        else:
            await here.ask("DELETE", "/api/session", headers=by(cookie))
        await send({"type": "http.response.body", "body": b"after", "more_body": True})

    app = here.app(is_loopback=False, extra=[ApiRoute("GET", "/follow", "viewer", "Follow.", raw=follow)])
    held = {"token": token} if way == "revoke" else {"headers": by(cookie)}
    answer = await here.ask("GET", "/follow", app=app, **held)
    assert (answer.status, answer.body) == (200, b"before ")


# Pages of other sites ------------------------------------------------------------------------------------------------

FOREIGN = [
    (("origin", "http://evil.example"),),
    (("origin", "null"),),
    (("origin", "http://127.0.0.1:3000"),),  # another program on this machine; browsers send it the cookie too
    (("origin", "http://127.0.0.1"),),
    (("origin", "https://127.0.0.1:8080"),),
    (("origin", "http://localhost:8080"),),
    (("origin", "http://["),),
    (("origin", ""),),
    (("sec-fetch-site", "cross-site"),),
    (("sec-fetch-site", "same-site"),),
    (("sec-fetch-site", "none"),),
    (("origin", "http://evil.example"), ("sec-fetch-site", "same-origin")),
    (),
]
CHANGES = [
    ("POST", "/backends/upgrades/check", {}),
    ("POST", "/api/tokens", {"role": "admin"}),
    ("PUT", "/api/models/tiny", {}),
    ("PATCH", "/api/nodes/old/labels", {}),
    ("DELETE", "/api/nodes/nobody", None),
    ("DELETE", "/api/session", None),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/chat/completions", CHAT),
    ("POST", "/v1/audio/speech", CHAT),
    ("POST", "/api/engines/tiny/Status", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), CHANGES)
async def test_a_page_of_another_site_changes_nothing_by_cookie(
    here: Site, method: str, path: str, body: object
) -> None:
    cookie = await signed_in(here)
    for app in (here.open, here.app(is_loopback=True)):
        for more in FOREIGN:
            answer = await here.ask(method, path, body, headers=by(cookie, *more, own=False), app=app)
            assert (answer.status, answer.error["code"]) == (403, "cross_site"), more
            # A token counts before the cookie, and no browser adds it by itself.
            if path != "/api/session":
                headers = by(cookie, *more, own=False)
                with_token = await here.ask(method, path, body, headers=headers, token=here.tokens["admin"], app=app)
                assert with_token.status != 403, more
    own = [by(cookie), by(cookie, ("sec-fetch-site", "same-origin"), own=False)]
    for headers in own[: 1 if path == "/api/session" else 2]:
        answer = await here.ask(method, path, body, headers=headers)
        assert answer.status not in (401, 403), (headers, answer.body)


async def test_an_own_page_is_recognized_however_its_address_is_written(here: Site) -> None:
    code = await code_of(here)
    plain = (("host", "Box.Example"), ("origin", "http://box.example"))
    answer = await here.ask("POST", "/api/session", {"code": code}, headers=plain)
    cookie = ("cookie", cookie_in(answer))
    for host, origin in (("Box.Example", "http://box.example"), ("box.example:80", "http://box.example")):
        named = ("cookie", f"enginehouse_session_80={cookie[1].partition('=')[2]}") if ":" in host else cookie
        answer = await here.ask(
            "POST", "/backends/upgrades/check", {}, headers=(("host", host), ("origin", origin), named)
        )
        assert answer.status not in (401, 403), host


async def test_a_page_of_another_site_reads_nothing_by_cookie(here: Site) -> None:
    cookie = await signed_in(here)
    for path in ("/api/nodes", "/api/session", "/v1/models"):
        answer = await here.ask("GET", path, headers=by(cookie, ("sec-fetch-site", "cross-site"), own=False))
        assert answer.error["code"] == "cross_site"
        for site_of in ("same-origin", "none", "same-site"):
            headers = by(cookie, ("sec-fetch-site", site_of), own=False)
            assert (await here.ask("GET", path, headers=headers)).status == 200
        foreign = (*LOCAL, ("sec-fetch-site", "cross-site"))
        assert (await here.ask("GET", path, headers=foreign, token=here.tokens["admin"])).status == 200


@pytest.mark.parametrize(
    "more", [one for one in FOREIGN if one not in ((), (("origin", ""),), (("sec-fetch-site", "none"),))]
)
async def test_a_page_of_another_site_signs_nobody_in(here: Site, more: tuple[tuple[str, str], ...]) -> None:
    answer = await here.ask("POST", "/api/session", {"code": await code_of(here)}, headers=(*LOCAL, *more))
    assert (answer.status, answer.error["code"]) == (403, "cross_site")
    assert "set-cookie" not in answer.headers


async def test_a_proxy_that_loses_the_port_or_the_scheme_is_told_what_arrived(here: Site) -> None:
    code = await code_of(here)
    for host, origin in (("box.example", "https://box.example:8443"), ("box.example", "https://box.example")):
        answer = await here.ask("POST", "/api/session", {"code": code}, headers=(("host", host), ("origin", origin)))
        assert answer.error["code"] == "cross_site"
        assert f"it is at {origin}, and this server was asked as http://box.example)" in answer.error["message"]


async def test_the_cookie_of_another_port_counts_for_nothing(here: Site) -> None:
    cookie = await signed_in(here)
    elsewhere = cookie.replace("_8080=", "_9090=")
    assert (await here.ask("GET", "/api/nodes", headers=by(elsewhere))).status == 401
    assert (await here.ask("GET", "/api/nodes", headers=(("host", "127.0.0.1:9090"), ("cookie", cookie)))).status == 401


async def test_an_ended_session_is_refused_and_local_callers_without_cookie_are_not(here: Site) -> None:
    local = here.app(is_loopback=True)
    old = by("enginehouse_session_8080=" + "x" * 43)
    for path in ("/v1/models", "/api/nodes"):
        assert (await here.ask("GET", path, headers=old, app=local)).status == 401
    assert (await here.ask("POST", "/v1/chat/completions", CHAT, headers=old, app=local)).status == 401
    assert (await here.ask("GET", "/healthz", headers=old, app=local)).status == 200
    assert (await here.ask("GET", "/v1/models", headers=(*LOCAL, ("cookie", "theme=dark")), app=local)).status == 200


# Who may only look ---------------------------------------------------------------------------------------------------

CHANGES_NOTHING = {("POST", "/api/operations/plan"), ("POST", "/models/plan")}
OWN_SESSION = {("POST", "/api/session"), ("DELETE", "/api/session")}


@pytest.mark.parametrize("way", ["token", "cookie"])
async def test_a_viewer_changes_nothing_on_any_route(here: Site, way: str) -> None:
    cookie = await signed_in(here, "viewer")
    token = here.tokens["viewer"] if way == "token" else ""
    headers = by(cookie) if way == "cookie" else LOCAL
    seen: dict[bool, int] = {True: 0, False: 0}
    for route in here.routes:
        key = (route.method, route.path)
        if key in OWN_SESSION:
            continue
        answer = await here.ask(route.method, filled(route.path, here), {}, token=token, headers=headers)
        is_open = (route.method == "GET" and route.role in ("public", "viewer", "reader")) or key in CHANGES_NOTHING
        seen[is_open] += 1
        if is_open:
            assert answer.status not in (401, 403), (key, answer.body)
        else:
            assert (answer.status, answer.error["code"]) == (403, "forbidden"), key
    assert min(seen.values()) > 30


async def test_a_viewer_sees_no_secret_of_a_model(here: Site) -> None:
    admin, viewer = here.tokens["admin"], here.tokens["viewer"]
    made = await here.ask("POST", "/api/models/tiny-chat/copy", {"name": "own"}, token=admin)
    assert made.status == 201, made.body
    config = {"config": {"options": ["api_key:hush"]}}
    assert (await here.ask("PATCH", "/api/models/own", config, token=admin)).status == 200
    assert b"hush" in (await here.ask("GET", "/api/models/own", token=admin)).body
    shown: Any = await here.ask("GET", "/api/models/own", token=viewer)
    assert (shown.status, b"hush" in shown.body) == (200, False)
    assert shown.json["config"]["options"] == ["api_key:(hidden)"]
    assert (await here.ask("GET", "/api/models/own/export", token=viewer)).status == 403
