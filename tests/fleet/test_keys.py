"""Keys on two real frontends over one PostgreSQL: limits over both, revocation and expiry on both, usage of both."""

from __future__ import annotations

import http.client
import json
import threading
import time
from functools import partial
from typing import Any

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet, Frontend
from tests.fleet.engines import Serving, ask

LIMIT = 20
REVOKED_SECONDS = 1.0
# What one frontend may admit before it knows of the other: it decides by what was exchanged half a second ago.
EXCHANGE_SECONDS = 0.5
PER_SECOND = 20.0


def key(fleet: Fleet, name: str, **limits: object) -> dict[str, Any]:
    made: dict[str, Any] = fleet.first.post("/api/tokens", {"role": "user", "name": name, **limits})
    for frontend in fleet.frontends:
        wait_for(f"{frontend.name} to know the key", partial(is_known, frontend, made["token"]))
    return made


def is_known(frontend: Frontend, token: str) -> bool:
    return models_of(frontend, token)[0] == 200


def is_refused(frontend: Frontend, token: str, model: str) -> bool:
    return ask(frontend.port, token, model) == (401, "unauthenticated")


def models_of(frontend: Frontend, token: str) -> tuple[int, list[str]]:
    connection = http.client.HTTPConnection("127.0.0.1", frontend.port, timeout=10)
    try:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        told = json.loads(answer.read())
    finally:
        connection.close()
    return answer.status, [one["id"] for one in told.get("data", ())]


@pytest.fixture
def speaker(serving: Serving, name: str) -> str:
    model = f"speaker-{name}"
    serving.offer(name, "one")
    serving.add_model(model, name)
    serving.load(model, "worker-1")
    return model


def test_a_limit_holds_over_both_frontends_together(fleet: Fleet, speaker: str) -> None:
    token = key(fleet, f"limited-{speaker}", requests_per_minute=LIMIT)["token"]
    answers: list[int] = []

    def go_on(frontend: Frontend) -> None:
        for _ in range(LIMIT + 5):
            began = time.monotonic()
            answers.append(ask(frontend.port, token, speaker)[0])
            over.wait(max(0.0, 2 / PER_SECOND - (time.monotonic() - began)))

    over = threading.Event()  # never set: the pause of a client
    threads = [threading.Thread(target=go_on, args=(frontend,)) for frontend in fleet.frontends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    admitted = answers.count(200)
    assert set(answers) == {200, 429}
    # One alone would have admitted the limit, both without an exchange twice as much.
    assert LIMIT <= admitted <= LIMIT + 2 * EXCHANGE_SECONDS * PER_SECOND, admitted
    assert admitted < 2 * LIMIT
    # Both know it now, for the rest of the minute.
    for frontend in fleet.frontends:
        assert ask(frontend.port, token, speaker) == (429, "rate_limited")
    key_id = token_id(fleet, f"limited-{speaker}")

    def shared() -> bool:
        return fleet.rows("select sum(requests) from rate_counts where token_id = %s", key_id) == [(admitted,)]

    wait_for("both to have shared each request once", shared, 10)


def token_id(fleet: Fleet, name: str) -> str:
    (row,) = [one for one in fleet.first.get("/api/tokens") if one["name"] == name]
    return str(row["id"])


def test_a_revoked_key_is_refused_by_both_within_a_second(fleet: Fleet, speaker: str) -> None:
    made = key(fleet, f"revoked-{speaker}")
    for frontend in fleet.frontends:
        assert ask(frontend.port, made["token"], speaker)[0] == 200
    fleet.first.delete(f"/api/tokens/{made['id']}")
    began = time.monotonic()
    assert ask(fleet.first.port, made["token"], speaker)[0] == 401
    last_accepted = began
    while time.monotonic() < began + 3 * REVOKED_SECONDS:
        asked_at = time.monotonic()
        if ask(fleet.second.port, made["token"], speaker)[0] != 200:
            break
        last_accepted = asked_at
    assert last_accepted - began < REVOKED_SECONDS
    assert ask(fleet.second.port, made["token"], speaker) == (401, "unauthenticated")


def test_an_expired_key_is_refused_by_both(fleet: Fleet, speaker: str) -> None:
    made = key(fleet, f"short-{speaker}", ttl_seconds=3)
    for frontend in fleet.frontends:
        wait_for(f"{frontend.name} to refuse it", partial(is_refused, frontend, made["token"], speaker), 10)
    (row,) = [one for one in fleet.second.get("/api/tokens") if one["id"] == made["id"]]
    assert row["expired"] is True


def test_a_key_for_one_model_is_refused_others_by_both_and_its_use_is_summed(fleet: Fleet, speaker: str) -> None:
    made = key(fleet, f"narrow-{speaker}", models=[f"{speaker[:-1]}?"])
    for frontend in fleet.frontends:
        assert ask(frontend.port, made["token"], speaker)[0] == 200
        assert ask(frontend.port, made["token"], "tiny-chat") == (403, "forbidden")
        assert models_of(frontend, made["token"]) == (200, [speaker])

    def used() -> list[Any]:
        rows = fleet.second.get("/api/usage?by=token,model,node")["usage"]
        return [one for one in rows if one["token"] == made["name"] and one["requests"] == len(fleet.frontends)]

    (row,) = wait_for("both to write what was used", used, 15)
    assert (row["model"], row["node"], row["errors"]) == (speaker, "worker-1", 0)


def test_a_frontend_that_stops_writes_what_is_left(fleet: Fleet, speaker: str) -> None:
    made = key(fleet, f"last-{speaker}")
    assert ask(fleet.second.port, made["token"], speaker)[0] == 200
    assert fleet.second.stop() == 0
    rows = fleet.rows("select requests, model from usage_counts where token_id = %s", made["id"])
    assert rows == [(1, speaker)]
