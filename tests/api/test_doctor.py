"""What a frontend finds about itself and its nodes, with what to do: for viewers, and for a node about itself."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.test_node_logs import join
from tests.api.whole_frontend import Site, site
from tests.worker.http_server import door
from tests.worker.http_server.door import Door

from enginehouse.core.node_api import HeartbeatRequest
from enginehouse.frontend import diagnosis


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Door]:
    async with door.opened(tmp_path / "worker") as made:
        yield made


async def alive(here: Site, worker: Door) -> None:
    """It has joined, and sends heartbeats."""
    await join(here, worker)
    node, _ = await here.frontend.nodes.get("attic")
    await here.frontend.reports.heartbeat(node.id, HeartbeatRequest())


async def looked(here: Site) -> dict[str, Any]:
    answer = await here.ask("GET", "/api/doctor", token=here.tokens["viewer"])
    assert answer.status == 200
    found: dict[str, Any] = answer.json
    return found


def about(found: dict[str, Any], area: str, name: str = "") -> list[tuple[str, str]]:
    listed = [one for one in found["findings"] if one["area"] == area and name in one["message"]]
    return [(one["level"], one["advice"]) for one in listed]


async def test_every_part_is_looked_at_and_only_viewers_may(here: Site, worker: Door) -> None:
    await alive(here, worker)
    found = await looked(here)
    areas = {one["area"] for one in found["findings"]}
    assert {"database", "clock", "nats", "disk", "node", "reach"} <= areas
    assert about(found, "reach", "attic") == [("ok", "")]
    assert about(found, "database") == [("ok", "")]
    for role in ("user", "join", ""):
        assert (await here.ask("GET", "/api/doctor", token=here.tokens[role])).status in (401, 403)


async def test_a_node_whose_ports_are_shut_is_a_problem_with_advice(here: Site, worker: Door) -> None:
    await alive(here, worker)
    await worker.server.close()
    found = await looked(here)
    assert found["needs_person"] is True
    ((level, advice),) = about(found, "reach", "attic")
    assert (level, "--advertise-host" in advice) == ("problem", True)


async def test_a_worker_that_accepts_and_never_answers_is_not_reached(
    here: Site, worker: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process: the kernel still accepts its connections."""
    monkeypatch.setattr(diagnosis, "CONNECT_SECONDS", 0.2)
    await alive(here, worker)
    await worker.server.close()
    with socket.create_server(("127.0.0.1", worker.port)):
        found = await looked(here)
    assert about(found, "reach", "no answer from 127.0.0.1")[0][0] == "problem"


async def test_who_asks_to_join_or_has_gone_needs_somebody(here: Site, worker: Door) -> None:
    await join(here, worker)
    node, _ = await here.frontend.nodes.get("attic")
    await here.frontend.nodes.set_health(node.id, "offline")
    found = await looked(here)
    ((level, advice),) = about(found, "node", "attic is offline")
    assert (level, "enginehouse nodes remove attic" in advice) == ("problem", True)
    assert about(found, "reach", "attic") == [], "a node that is offline is not tried"


async def test_a_bus_that_is_away_is_a_problem(here: Site) -> None:
    here.bus.is_connected = False
    assert about(await looked(here), "nats")[0][0] == "problem"


async def test_a_node_may_ask_about_itself_alone(here: Site, worker: Door) -> None:
    await join(here, worker)
    node, _ = await here.frontend.nodes.get("attic")
    token = worker.server._options.token.current
    await here.frontend.keys.read_node(node.id)
    answer = await here.ask("GET", f"/api/node/{node.id}/reach", token=token)
    assert (answer.status, answer.json["level"]) == (200, "ok")
    assert (await here.ask("GET", "/api/node/another/reach", token=token)).status == 403
    assert (await here.ask("GET", f"/api/node/{node.id}/reach", token=here.tokens["join"])).status == 403
