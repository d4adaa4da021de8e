"""What a token may use and what it has used, through the whole frontend and an HTTP engine that answers as told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api.inference import CHAT, plain, stream
from tests.api.whole_frontend import Answer, Site, site

from enginehouse.api.openai import _Exchange, _relay_events
from enginehouse.core.canary import ServedCount
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model
from enginehouse.core.replica import Replica
from enginehouse.core.usage import Used
from enginehouse.store import db, models, replicas, usage
from enginehouse.store.db import Connection

USAGE = b'{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}'
PLAIN = plain(b'{"object":"chat.completion","choices":[],"usage":%b}' % USAGE)
EVENT = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n'
LAST = b'data: {"choices":[],"usage":%b}\n\n' % USAGE
DONE = b"data: [DONE]\n\n"


class Served:
    """A site whose models are served by an engine that gives the answers of a list, the last one again and again."""

    def __init__(self, site: Site, answers: list[bytes]) -> None:
        self.answers = answers
        self.ask = site.ask
        self.open = site.open
        self.frontend = site.frontend
        self.store = site.store
        self.tokens = site.tokens

    async def token(self, **limits: object) -> str:
        made = await self.ask("POST", "/api/tokens", {"role": "user", **limits}, token=self.tokens["admin"])
        assert made.status == 201, made.body
        return str(made.json["token"])

    async def chat(self, token: str, model: str = "tiny") -> Answer:
        body = CHAT.replace(b'"tiny"', json.dumps(model).encode())
        return await self.ask("POST", "/v1/chat/completions", body, token=token, stays=True)

    async def usage(self, query: str = "", token: str = "") -> Any:
        await self.frontend.access.usage.step()
        answer = await self.ask("GET", f"/api/usage{query}", token=token or self.tokens["admin"])
        assert answer.status == 200, answer.body
        return answer.json

    async def figures(self) -> dict[str, float]:
        text = (await self.ask("GET", "/metrics", token=self.tokens["admin"])).body.decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, _, value in lines}


@asynccontextmanager
async def engine(answers: list[bytes]) -> AsyncIterator[int]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(length)
                writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Served]:
    answers = [PLAIN]
    async with engine(answers) as port, site(tmp_path) as made:
        node_id = NodeId(made.tokens["node id"])
        assert (await made.ask("POST", "/api/nodes/old/approve", token=made.tokens["admin"])).status == 200
        beat = await made.ask("POST", f"/api/node/{node_id}/heartbeat", {"total_ram": 8}, token=made.tokens["node"])
        assert beat.status == 200, beat.body

        def fill(connection: Connection) -> None:
            for name in ("tiny", "org/big"):
                models.insert(connection, Model(name=name, backend="b", files=()), db.now(connection))
                replica = Replica(
                    node_id=node_id,
                    model=name,
                    slot=0,
                    revision="",
                    address=f"127.0.0.1:{port}",
                    nonce=f"n-{name}",
                    backend="b",
                    key="k",
                )
                replicas.put(connection, replica, db.now(connection))

        await made.store.transaction(fill)
        await made.frontend.router.step()
        yield Served(made, answers)


async def test_a_token_for_some_models_is_refused_others_and_sees_only_its_own(here: Served) -> None:
    token = await here.token(models=["org/*"])
    assert (await here.chat(token, "org/big")).status == 200
    for model in ("tiny", "unheard-of"):
        refused = await here.chat(token, model)
        assert (refused.status, refused.error["code"], refused.error["param"]) == (403, "forbidden", "model")
        shown = await here.ask("GET", f"/v1/models/{model}", token=token)
        assert (shown.status, shown.error["code"]) == (403, "forbidden")
    listed = await here.ask("GET", "/v1/models", token=token)
    assert [one["id"] for one in listed.json["data"]] == ["org/big"]
    every = await here.ask("GET", "/v1/models", token=here.tokens["user"])
    assert {one["id"] for one in every.json["data"]} == {"tiny", "org/big"}
    assert (await here.ask("GET", "/v1/models/org/big", token=token)).status == 200
    # Every way to an engine has the same gate.
    for path in ("/v1/embeddings", "/completions", "/v1/audio/speech"):
        assert (await here.ask("POST", path, CHAT, token=token)).status == 403, path
    figures = await here.figures()
    assert figures['enginehouse_denied_total{code="forbidden"}'] >= 5


async def test_a_limited_token_is_told_how_its_limits_stand_and_refused_beyond(here: Served) -> None:
    token = await here.token(requests_per_minute=2, tokens_per_minute=1000)
    first, second, third = [await here.chat(token) for _ in range(3)]
    assert (first.status, second.status, third.status) == (200, 200, 429)
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    told = [one.headers["x-ratelimit-remaining-requests"] for one in (first, second, third)]
    assert told == ["1", "0", "0"]
    assert [one.headers["x-ratelimit-remaining-tokens"] for one in (first, second)] == ["1000", "988"]
    assert 60 <= int(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 65
    assert (third.error["code"], third.error["type"]) == ("rate_limited", "rate_limit_error")
    assert 60 <= int(third.headers["retry-after"]) <= 65
    assert f"retry in {third.headers['retry-after']} s" in third.error["message"]
    figures = await here.figures()
    limited = [name for name in figures if name.startswith("enginehouse_rate_limited_total{")]
    assert [figures[name] for name in limited] == [1.0]
    assert 'limit="requests"' in limited[0]
    # Others are not concerned.
    other = await here.chat(here.tokens["user"])
    assert other.status == 200
    assert not [name for name in other.headers if name.startswith("x-ratelimit")]


async def test_a_warm_request_waits_for_no_database_whether_its_token_is_limited_or_not(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = await here.token(requests_per_minute=3, tokens_per_minute=1000, models=["t*"])

    async def asked(_work: object) -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(here.store, "transaction", asked)
    assert [(await here.chat(token)).status for token in (here.tokens["user"], *[limited] * 4)] == [200] * 4 + [429]


async def test_tokens_per_minute_count_what_engines_say(here: Served) -> None:
    token = await here.token(tokens_per_minute=20)
    statuses = [(await here.chat(token)).status for _ in range(3)]
    assert statuses == [200, 200, 429]  # twelve, twenty-four
    refused = await here.chat(token)
    assert "20 tokens per minute" in refused.error["message"]
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
    assert "x-ratelimit-limit-requests" not in refused.headers


async def test_after_the_wait_a_token_is_admitted_again(here: Served) -> None:
    token = await here.token(requests_per_minute=1)
    assert (await here.chat(token)).status == 200
    refused = await here.chat(token)
    here.frontend.keys._ahead_seconds += float(refused.headers["retry-after"])
    assert (await here.chat(token)).status == 200


async def test_a_token_that_expired_is_refused_as_a_revoked_one(here: Served) -> None:
    token = await here.token(ttl_seconds=3600)
    assert (await here.chat(token)).status == 200
    here.frontend.keys._ahead_seconds += 3601
    # The store is asked once more for an unknown token, and its clock has not moved: it is moved too.
    await here.store.transaction(lambda c: c.exec_driver_sql("update tokens set expires_at = 1 where expires_at > 0"))
    refused = await here.chat(token)
    assert (refused.status, refused.error["code"]) == (401, "unauthenticated")
    assert "expired" in refused.error["message"]
    listed = (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).json
    (row,) = [one for one in listed if "expired" in one]
    assert row["expires_at"].startswith("1970")


async def test_limits_are_listed_and_wrong_ones_refused(here: Served) -> None:
    await here.token(name="app", models=["tiny", "org/*"], requests_per_minute=5, tokens_per_minute=6, ttl_seconds=60)
    rows = (await here.ask("GET", "/api/tokens", token=here.tokens["admin"])).json
    (row,) = [one for one in rows if one["name"] == "app"]
    assert (row["models"], row["requests_per_minute"], row["tokens_per_minute"]) == (["tiny", "org/*"], 5, 6)
    assert "expires_at" in row
    assert set(next(one for one in rows if one["name"] == "test")) == {"id", "role", "name", "created_at"}
    for wrong in (
        {"role": "user", "requests_per_minute": -1},
        {"role": "user", "models": [""]},
        {"role": "user", "ttl_seconds": -5},
        {"role": "admin", "models": ["tiny"]},
    ):
        answer = await here.ask("POST", "/api/tokens", wrong, token=here.tokens["admin"])
        assert answer.status == 422, wrong
        assert answer.error


async def test_usage_is_summed_by_token_model_and_node(here: Served) -> None:
    token = await here.token(name="app")
    for model in ("tiny", "tiny", "org/big", "unheard-of"):
        await here.chat(token, model)
    await here.chat(here.tokens["user"])
    found = await here.usage("?by=token,model,node")
    amounts = {
        (one["token"], one["model"], one["node"]): (one["requests"], one["errors"], one["prompt_tokens"])
        for one in found["usage"]
    }
    assert amounts == {
        ("app", "tiny", "old"): (2, 0, 14),
        ("app", "org/big", "old"): (1, 0, 7),
        ("app", "", ""): (1, 1, 0),
        ("test", "tiny", "old"): (1, 0, 7),
    }
    assert (found["total"]["requests"], found["total"]["completion_tokens"], found["truncated"]) == (5, 20, False)
    assert [one["model"] for one in (await here.usage("?by=model"))["usage"]] == ["tiny", "", "org/big"]
    # A user token sees what it used itself.
    own = await here.usage("?by=token", token=token)
    assert [(one["token"], one["requests"]) for one in own["usage"]] == [("app", 4)]
    assert own["total"]["requests"] == 4


async def test_what_is_refused_for_a_limit_is_not_used(here: Served) -> None:
    token = await here.token(name="app", requests_per_minute=1, models=["tiny"])
    for model in ("tiny", "tiny", "org/big"):
        await here.chat(token, model)
    (row,) = (await here.usage("?by=token"))["usage"]
    assert (row["requests"], row["errors"]) == (1, 0)


@pytest.mark.parametrize(
    ("raw", "tokens"),
    [
        (stream(EVENT, EVENT, EVENT, LAST, DONE), (7, 5)),
        (stream(EVENT * 3 + LAST + DONE), (7, 5)),
        (stream(*[EVENT] * 10, DONE), (0, 8)),  # an estimate: the engine does not say
    ],
)
async def test_the_tokens_of_a_stream_are_counted(here: Served, raw: bytes, tokens: tuple[int, int]) -> None:
    here.answers[:] = [raw]
    answer = await here.chat(here.tokens["user"])
    assert answer.body.endswith(DONE)
    (row,) = (await here.usage("?by=model"))["usage"]
    assert (row["prompt_tokens"], row["completion_tokens"]) == tokens


class Pieces:
    """The stream of an engine that writes its events one by one."""

    status = 200
    headers = ()

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece

    async def close(self) -> None:
        pass


async def test_the_usage_of_a_stream_is_found_in_an_event_of_its_own() -> None:
    async def send(_message: object) -> None:
        pass

    for end in ((LAST, DONE), (LAST, EVENT, DONE), (LAST,)):
        exchange = _Exchange("/v1/chat/completions", "id", send, None)
        await _relay_events(exchange, Pieces(*[EVENT] * 5, *end))
        assert exchange.used == Used(7, 5), end
        assert exchange.first_token_seconds is not None


async def test_an_engine_that_fails_is_an_error_in_the_usage(here: Served) -> None:
    here.answers[:] = [plain(b"{}", "500 Internal Server Error")]
    assert (await here.chat(here.tokens["user"])).status == 500
    (row,) = (await here.usage("?by=node"))["usage"]
    assert (row["node"], row["requests"], row["errors"]) == ("old", 1, 1)


@pytest.mark.parametrize(
    "query", ["?by=color", "?by=", "?from=yesterday", "?to=nan", "?from=2026-01-02&to=2026-01-01", "?from=-5"]
)
async def test_questions_about_usage_that_mean_nothing_are_refused(here: Served, query: str) -> None:
    answer = await here.ask("GET", f"/api/usage{query}", token=here.tokens["admin"])
    assert (answer.status, answer.error["code"]) == (422, "unsupported")


async def test_a_range_of_usage_is_given_in_several_ways(here: Served) -> None:
    await here.chat(here.tokens["user"])
    for since in ("2020-01-01", "2020-01-01T00:00:00Z", "0", "2020-01-01T00:00:00+02:00"):
        query = f"?from={since}&by=day"
        assert (await here.usage(query))["total"]["requests"] == 1, query
    past = await here.usage("?from=2020-01-01&to=2021-01-01")
    assert (past["total"]["requests"], past["from"]) == (0, "2020-01-01T00:00:00Z")


async def test_answers_from_500_on_and_broken_streams_count_as_failures_of_a_node_and_client_errors_do_not(
    here: Served,
) -> None:
    broken = stream(EVENT, ends=False) + b"no length\r\n"
    statuses = ("400 Bad Request", "404 Not Found", "501 Not Implemented", "500 Internal Server Error")
    here.answers[:] = [*(plain(b"{}", status) for status in statuses), broken, PLAIN]
    for _ in range(6):
        await here.chat(here.tokens["user"])
    await here.frontend.access.usage.step()
    counts = await here.store.transaction(lambda connection: usage.served(connection, 0.0, ["tiny"]))
    assert counts == {"old": ServedCount(6, 2)}
