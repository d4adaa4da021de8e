"""A node that nobody can reach for a while, and that serves on: what has become of it when it is back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import STALE_SECONDS, Fleet
from tests.fleet.engines import Serving, ask, ports
from tests.fleet.guests import guest_worker
from tests.fleet.proxies import Strait, strait
from tests.fleet.test_serving import lives
from tests.fleet.warehouse import Warehouse
from tests.worker.shelf import said_by

ISLAND = "island"
KEPT, GONE = "kept-speaker", "gone-speaker"


def status_of(fleet: Fleet, name: str) -> str:
    return str(fleet.node(name)["status"])


def replicas_of(fleet: Fleet, model: str) -> list[str]:
    query = "select nodes.name from replicas join nodes on nodes.id = node_id where model = %s order by 1"
    return [name for (name,) in fleet.rows(query, model)]


def said(fleet: Fleet, serving: Serving, model: str) -> set[tuple[int, str]]:
    """What both frontends answer for a model, often enough for each replica to have its turn."""
    return {ask(port, serving.token, model) for port in ports(fleet) for _ in range(4)}


class Island:
    """A worker that only straits lead to."""

    def __init__(self, fleet: Fleet, warehouse: Warehouse, straits: Sequence[Strait]) -> None:
        self._fleet = fleet
        self._warehouse = warehouse
        self._straits = straits

    def cut_off(self) -> None:
        for one in self._straits:
            self._warehouse.call(one.close)
        wait_for("it to be called offline", lambda: status_of(self._fleet, ISLAND) == "offline", 5 * STALE_SECONDS)

    def return_it(self) -> None:
        for one in self._straits:
            self._warehouse.call(one.open)
        self._fleet.until_healthy(ISLAND)


@pytest.fixture
def island(fleet: Fleet, warehouse: Warehouse) -> Iterator[Island]:
    with strait(warehouse, fleet.first.port) as way, strait(warehouse, fleet.nats_port) as bus_way:
        urls = ("--url", f"http://127.0.0.1:{way.port}", "--nats-url", f"nats://127.0.0.1:{bus_way.port}")
        with guest_worker(fleet, ISLAND, *urls):
            try:
                yield Island(fleet, warehouse, (way, bus_way))
            finally:
                for one in (way, bus_way):
                    warehouse.call(one.open)


def test_a_node_that_was_cut_off_kept_its_engines_and_gives_up_what_is_no_longer_wanted(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, island: Island, name: str, other: str
) -> None:
    """F-109. Nothing passes between it and the cluster for longer than it takes to be called offline, twice: two cores
    are not enough for everything at once.
    """
    serving.offer(name, "one")
    warehouse.publish(other, "new")
    pids: dict[str, int] = {}
    for model in (KEPT, GONE):
        serving.add_model(model, name)
        serving.load(model, ISLAND)
        pids[model] = int(ask(fleet.first.port, serving.token, model)[1].removeprefix("one "))
    island.cut_off()
    deleted = serving.delete_model(GONE)
    requested = fleet.request("install", other, [ISLAND])
    for operation in (deleted, requested):
        assert fleet.second.operation(operation["jobID"])["status"] == "queued"
    # The other frontend looks once a second.
    wait_for("nobody to be sent there", lambda: {status for status, _ in said(fleet, serving, GONE)} == {404})
    assert all(lives(pid) for pid in pids.values()), "it kept its processes"
    island.return_it()
    for operation in (deleted, requested):
        assert fleet.ended(operation)["status"] == "succeeded"
    assert not lives(pids[GONE])
    assert replicas_of(fleet, GONE) == []
    assert said(fleet, serving, KEPT) == {(200, f"one {pids[KEPT]}")}, "it is asked again as if nothing had been"
    island.cut_off()
    serving.load(KEPT, "worker-1")
    elsewhere = said(fleet, serving, KEPT)
    assert {status for status, _ in elsewhere} == {200}
    assert (200, f"one {pids[KEPT]}") not in elsewhere, "nobody is sent there"
    island.return_it()
    assert lives(pids[KEPT])
    assert replicas_of(fleet, KEPT) == [ISLAND, "worker-1"], "one on each"
    assert said(fleet, serving, KEPT) <= elsewhere | {(200, f"one {pids[KEPT]}")}
    log = fleet.log_of(ISLAND)
    assert [log.count(f"command.started action='start {model}'") for model in (KEPT, GONE)] == [1, 1], "nothing again"
    assert {status for status, _ in said(fleet, serving, GONE)} == {404}
    assert said_by(fleet.backends_of(ISLAND) / other) == "new"
