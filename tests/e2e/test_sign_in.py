"""Getting into the web page with real processes: the link that `up` prints, the cookie, and what is recorded."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from typing import Any

from tests.e2e.conftest import Cluster, wait_for

LIMIT_SECONDS = 20.0  # a stream says something every five


def ask(cluster: Cluster, method: str, path: str, body: object = None, cookie: str = "") -> tuple[int, Any, str]:
    """One request of a browser that has the page open: status, answer and cookie."""
    headers = {"origin": cluster.url, "content-type": "application/json", **({"cookie": cookie} if cookie else {})}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=20)
    try:
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        content = response.read()
        return response.status, json.loads(content or b"null"), response.headers.get("set-cookie", "")
    finally:
        connection.close()


def sign_in(cluster: Cluster, link: str) -> tuple[int, str]:
    status, _, cookie = ask(cluster, "POST", "/api/session", {"code": link.rpartition("/")[2]})
    return status, cookie.partition(";")[0]


def test_the_link_of_the_greeting_signs_in_once_and_it_is_recorded(cluster: Cluster) -> None:
    assert cluster.parent is not None
    found = re.search(rf"web page +({re.escape(cluster.url)}/#/login/[A-Za-z0-9_-]+) ", cluster.parent.output())
    assert found is not None, cluster.parent.output()
    status, cookie = sign_in(cluster, found[1])
    assert (status, cookie.partition("=")[0]) == (201, f"enginehouse_session_{cluster.port}")
    assert sign_in(cluster, found[1])[0] == 401
    status, present, _ = ask(cluster, "GET", "/api/session", cookie=cookie)
    assert (status, present["role"], present["name"]) == (200, "admin", "admin")

    link = cluster.cli("login-link", "--role", "viewer").stdout.strip()
    status, viewer = sign_in(cluster, link)
    assert status == 201
    assert ask(cluster, "GET", "/api/nodes", cookie=viewer)[0] == 200
    assert ask(cluster, "POST", "/api/nodes/first/drain", {}, cookie=viewer)[0] == 403
    assert ask(cluster, "POST", "/api/nodes/first/resume", {}, cookie=cookie)[0] == 200
    assert ask(cluster, "DELETE", "/api/session", cookie=viewer)[0] == 204
    assert ask(cluster, "GET", "/api/nodes", cookie=viewer)[0] == 401

    def recorded() -> list[tuple[str, str, int]]:
        listed = cluster.json("audit", "--limit", "500")["audit"]
        return [(one["method"], one["path"], one["status"]) for one in listed]

    wanted = [
        ("POST", "/api/session", 201),
        ("POST", "/api/session", 401),
        ("POST", "/api/nodes/first/drain", 403),
        ("POST", "/api/nodes/first/resume", 200),
        ("DELETE", "/api/session", 204),
    ]
    wait_for("all of it to be in the audit", lambda: set(wanted) <= set(recorded()))


def test_events_that_somebody_follows_end_with_the_session(cluster: Cluster) -> None:
    _, cookie = sign_in(cluster, cluster.cli("login-link").stdout.strip())
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=LIMIT_SECONDS)
    connection.request("GET", "/api/events", headers={"cookie": cookie})
    response = connection.getresponse()
    assert response.readline() == b"event: hello\n"
    assert ask(cluster, "DELETE", "/api/session", cookie=cookie)[0] == 204
    deadline = time.monotonic() + LIMIT_SECONDS
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while response.readline():
            assert time.monotonic() < deadline, "the stream goes on"
    connection.close()


def test_behind_up_the_settings_say_what_up_was_given(cluster: Cluster) -> None:
    found = {one["name"]: one for one in cluster._get("/api/settings")["settings"]}
    assert (found["stale"]["value"], found["stale"]["source"], found["stale"]["from"]) == ("3s", "flag", "--stale")
    assert (found["stall"]["source"], found["stall"]["from"]) == ("default", "")
    galleries = found["backend_galleries"]
    assert (galleries["source"], galleries["from"]) == ("variable", "ENGINEHOUSE_BACKEND_GALLERIES")
    assert (found["port"]["value"], found["port"]["from"]) == (str(cluster.port), "--port")
    assert (found["nats_url"]["value"], found["nats_url"]["source"]) == ("set", "up")
    assert (found["admin_token"]["value"], found["admin_token"]["from"]) == ("set", str(cluster.data / "admin.token"))
