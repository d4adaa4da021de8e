"""A worker or a frontend stands still and holds its connections: what goes on without it, and when it is missed."""

from __future__ import annotations

import time

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import STALE_SECONDS, Fleet
from tests.fleet.engines import Serving, ask
from tests.fleet.warehouse import Warehouse


def health_of(fleet: Fleet, name: str) -> str:
    return str(next(one["health"] for one in fleet.nodes(fleet.second) if one["name"] == name))


def test_the_engines_of_a_frozen_worker_serve_until_its_node_is_offline_and_again_when_it_wakes(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("frozen-speaker", name)
    # All questions are alike here, and would stay with one replica.
    fleet.first.post("/api/nodes/scheduling", {"model_name": "frozen-speaker", "route_policy": "round_robin"})
    serving.load("frozen-speaker", "worker-1")
    said = ask(fleet.second.port, serving.token, "frozen-speaker")
    worker = fleet.workers["worker-1"]
    worker.pause()
    try:
        wait_for("it to be missed", lambda: health_of(fleet, "worker-1") == "unhealthy", 3 * STALE_SECONDS)
        assert ask(fleet.second.port, serving.token, "frozen-speaker") == said, "its engine is there"
        wait_for("it to be given up", lambda: health_of(fleet, "worker-1") == "offline", 4 * STALE_SECONDS)
        wait_for(
            "others to answer",
            lambda: (found := ask(fleet.second.port, serving.token, "frozen-speaker"))[0] == 200 and found != said,
        )
    finally:
        worker.resume()
    fleet.until_healthy("worker-1")
    wait_for(
        "its engine to be asked again", lambda: ask(fleet.second.port, serving.token, "frozen-speaker") == said, 20.0
    )


def test_a_frozen_frontend_takes_no_node_offline_that_knows_another(fleet: Fleet, warehouse: Warehouse) -> None:
    fleet.first.pause()
    try:
        deadline = time.monotonic() + 4 * STALE_SECONDS
        while time.monotonic() < deadline:
            assert "offline" not in {health_of(fleet, name) for name in fleet.workers}
        wait_for("all to be heard again", lambda: {health_of(fleet, name) for name in fleet.workers} == {"healthy"}, 10)
    finally:
        fleet.first.resume()
    fleet.until_ready()
