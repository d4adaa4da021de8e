"""The live figures over HTTP: a watcher of the real application, the last hour, and two frontends on a real bus."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.inference import stream
from tests.api.test_accounts import DONE, EVENT, LAST, Served
from tests.api.test_accounts import here as here  # the fixture
from tests.bus.test_nats import running, until
from tests.frontend.world import MODEL, Time

from enginehouse.build_frontend import Frontend, make_frontend
from enginehouse.build_outside import make_outside
from enginehouse.core.pulse import History, PulseEvent
from enginehouse.frontend.watching import pulse
from enginehouse.loop import Wakes
from enginehouse.ports import Bus
from enginehouse.settings.programs import FrontendSettings
from enginehouse.store.db import Store

LIMIT_SECONDS = 10


@contextlib.asynccontextmanager
async def watching(served: Served, query: str = "") -> AsyncIterator[asyncio.Queue[tuple[str, Any]]]:
    """The events of a stream, as a client reads them from the application."""
    events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
    rest = b""

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal rest
        rest += message.get("body", b"")
        while b"\n\n" in rest:
            text, _, rest = rest.partition(b"\n\n")
            fields = dict(line.split(": ", 1) for line in text.decode().splitlines() if not line.startswith(":"))
            if fields:
                events.put_nowait((fields["event"], json.loads(fields["data"])))

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/api/events",
        "raw_path": b"/api/events",
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {served.tokens['admin']}".encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8080),
        "root_path": "",
    }
    async with asyncio.TaskGroup() as group:
        task = group.create_task(served.open(scope, receive, send))
        yield events
        task.cancel()


async def next_pulse(events: asyncio.Queue[tuple[str, Any]]) -> Any:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            kind, told = await events.get()
            if kind == "pulse":
                msgspec.convert(told, PulseEvent)
                return told


async def test_a_watcher_gets_the_figures_at_once_and_then_what_changed(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "SHORTEST_SECONDS", 0.0)
    node_id = here.tokens["node id"]
    async with watching(here) as events:
        assert (await events.get())[0] == "hello"
        first = await next_pulse(events)
        assert first["nodes"].keys() == {node_id}
        here.answers[:] = [stream(EVENT, EVENT, LAST, DONE)]
        answer = await here.chat(here.tokens["user"])
        assert (answer.status, answer.headers["x-enginehouse-node"]) == (200, "old")
        await here.frontend.pulse.step()
        told = await next_pulse(events)
        assert told["at"] >= first["at"]
        assert told["traffic"]["requests_per_second"] > 0
        assert told["traffic"]["tokens_per_second"] > told["traffic"]["requests_per_second"]
        assert told["traffic"]["time_to_first_token_seconds"] > 0
        assert told["traffic"]["errors_per_second"] == 0
        assert told["models"].keys() == {"tiny"}
        assert told["nodes"][node_id]["requests_per_second"] > 0
    assert not here.frontend.events.is_watched


async def test_who_follows_one_operation_gets_no_pulse(here: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SHORTEST_SECONDS", 0.0)
    drain = await here.ask("POST", "/api/nodes/old/drain", token=here.tokens["admin"])
    operation_id = drain.json["jobID"]
    async with watching(here, f"operation={operation_id}") as events:
        kinds = [(await events.get())[0] for _ in range(2)]
        await here.frontend.pulse.step()
        here.frontend.events.close()
        async with asyncio.timeout(LIMIT_SECONDS):
            while kinds[-1] != "bye":
                kinds.append((await events.get())[0])
    assert set(kinds) == {"hello", "operation", "bye"}


async def test_refused_and_failed_requests_are_errors_and_those_that_were_not_permitted_are_no_traffic(
    here: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulse, "SHORTEST_SECONDS", 0.0)
    limited = await here.token(models=["org/*"])
    statuses = [
        (await here.chat(here.tokens["user"])).status,
        (await here.chat(here.tokens["user"], "unheard-of")).status,
        (await here.chat(limited)).status,
    ]
    assert statuses == [200, 404, 403]
    taken = here.frontend.traffic.take()
    assert {place: (one.requests, one.errors) for place, one in taken.items()} == {
        ("tiny", here.tokens["node id"]): (1, 0),
        ("", ""): (1, 1),
    }


async def test_an_answer_without_a_node_names_none(here: Served) -> None:
    answer = await here.chat(here.tokens["user"], "unheard-of")
    assert "x-enginehouse-node" not in answer.headers


async def test_the_last_hour_is_shown_with_the_nodes_that_are_asked_for(here: Served) -> None:
    async def history(query: str = "") -> Any:
        answer = await here.ask("GET", f"/api/history{query}", token=here.tokens["admin"])
        assert answer.status == 200
        msgspec.json.decode(answer.body, type=History)
        return answer.json

    node_id = here.tokens["node id"]
    past = here.frontend.pulse.past
    await here.chat(here.tokens["user"])
    past.add(here.frontend.traffic.take())
    await here.frontend.pulse._look()
    past.end_step(past._began + 10.0, None, here.frontend.counts.occupancy(), here.frontend.pulse._rows)
    found = await history()
    assert found["step_seconds"] == 10.0
    assert found["series"]["requests_per_second"][-2:] == [None, 0.1]
    assert found["nodes"].keys() == {node_id}
    assert found["models"].keys() == {"tiny"}
    assert (await history(f"?nodes={node_id},other"))["nodes"].keys() == {node_id}
    assert (await history("?nodes=none"))["nodes"] == {}
    refused = await here.ask("GET", "/api/history", token=here.tokens["user"])
    assert refused.status == 403


@contextlib.asynccontextmanager
async def frontend_on(bus: Bus, store: Store, time: Time, data: Path) -> AsyncIterator[Frontend]:
    settings = FrontendSettings(data=data, nats_url="nats://127.0.0.1:4222", backend_galleries=())
    outside = msgspec.structs.replace(make_outside(settings, store, bus), clock=time)
    made = make_frontend(settings, outside, Wakes())
    await made.counts.listen()
    yield made


async def test_two_frontends_on_one_bus_show_the_traffic_of_both(tmp_path: Path, sqlite_url: str) -> None:
    time = Time()
    store = await Store.open(sqlite_url)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(store.close)
        nats = await stack.enter_async_context(running(tmp_path))
        first, second = [
            await stack.enter_async_context(frontend_on(await nats.frontend(), store, time, tmp_path)) for _ in range(2)
        ]
        first.traffic.count(MODEL.name, "", tokens=30, is_error=False, first_token_seconds=0.5)
        second.traffic.count(MODEL.name, "", tokens=20, is_error=True, first_token_seconds=0.3)
        for one in (first, second):
            await one.counts.step()
        for one in (first, second):
            await until(lambda one=one: len(one.counts._heard) == 1)  # type: ignore[misc]
        time.passed += 5.0
        for one in (first, second):
            await one.pulse.step()
            told = json.loads(await one.pulse.beginning())
            assert told["traffic"] == {
                "requests_per_second": 0.4,
                "tokens_per_second": 10.0,
                "time_to_first_token_seconds": 0.4,
                "errors_per_second": 0.2,
                "in_flight": 0,
                "queued": 0,
            }
            assert told["models"][MODEL.name]["requests_per_second"] == 0.4
        first.router._in_flight["n/tiny#0/process"] = 1
        await first.counts.step()
        await until(lambda: second.counts.occupancy().in_flight == 1)
        time.passed += 5.0
        await second.counts.step()
        assert second.counts.occupancy().in_flight == 0, "the first has vanished"
