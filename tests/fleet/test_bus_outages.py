"""The bus is away for longer than silence would take to call every node offline: gone, and frozen.

Warm requests go on without a failure, the nodes are shown as what they are, and commands wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import STALE_SECONDS, Fleet, Frontend
from tests.fleet.engines import Serving, asking, ports
from tests.fleet.warehouse import Warehouse
from tests.worker.shelf import said_by

NOTICE_SECONDS = 30.0  # until a half-open link is noticed


def is_degraded(fleet: Fleet) -> bool:
    nodes = fleet.nodes()
    return all((one["status"], one["degraded"]) == ("unhealthy", True) for one in nodes)


def reconnects(frontend: Frontend) -> float:
    shown = frontend.client.request_bytes("GET", "/metrics").decode()
    (line,) = [line for line in shown.splitlines() if line.startswith("enginehouse_bus_reconnects_total ")]
    return float(line.split()[1])


@pytest.mark.parametrize("how", ["gone", "frozen"])
def test_a_bus_that_is_away_stops_no_warm_request_and_takes_no_node_offline(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, names: Callable[[int], list[str]], how: str
) -> None:
    """F-093, for the whole fleet."""
    name, other = names(2)
    serving.offer(name, "one")
    warehouse.publish(other, "later")
    serving.add_model("speaker", name)
    serving.load("speaker", "worker-1")
    with asking(ports(fleet), serving.token, "speaker") as load:
        (fleet.nats.kill if how == "gone" else fleet.nats.pause)()
        wait_for("all to be known to be without a bus", lambda: is_degraded(fleet), NOTICE_SECONDS + 10.0)
        for frontend in fleet.frontends:
            wait_for("a balancer to be told to send requests", frontend.is_ready, 10.0)
        requested = fleet.request("install", other, ["worker-1"], frontend=fleet.second)
        deadline = time.monotonic() + 3 * STALE_SECONDS  # offline is at twice that
        while time.monotonic() < deadline:
            assert {one["health"] for one in fleet.nodes()} == {"unhealthy"}
        (row,) = fleet.first.operation(requested["jobID"])["nodes"]
        assert (row["status"], row["reason"], "NATS" in row["error"]) == ("queued", "node_away", True)
        if how == "gone":
            fleet.nats.start()
        else:
            fleet.nats.resume()
        assert fleet.ended(requested)["status"] == "succeeded"
    assert load.failures == []
    fleet.until_healthy()
    fleet.until_ready()
    assert not any(one["degraded"] for one in fleet.nodes())
    for frontend in fleet.frontends:
        assert reconnects(frontend) >= 1
    assert said_by(fleet.backends_of("worker-1") / other) == "later"
