"""Installs over a fleet: all nodes at once, once each, whoever dies on the way."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import LEASE_SECONDS, RECONCILE_SECONDS, Fleet, rows_of
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by


def test_an_install_reaches_all_nodes_and_any_frontend_tells_of_it(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    image = warehouse.publish(name, "one")
    operation = fleet.request("install", name, frontend=fleet.first)
    for frontend in fleet.frontends:
        ended = fleet.ended(operation, frontend)
        assert ended["status"] == "succeeded", ended
        assert list(rows_of(ended)) == sorted(fleet.workers)
    for worker in fleet.workers:
        assert said_by(fleet.backends_of(worker) / name) == "one"
        assert fleet.began(worker, f"install {name}") == 1

    def shown() -> dict[str, Any] | None:
        return next((one for one in fleet.second.get("/backends") if one["Name"] == name), None)

    # The reply ends the operation; what is installed is shown by the report, which follows it.
    listed = wait_for("the report of it", shown)
    assert {node["digest"] for node in listed["nodes"]} == {image.digest}


def test_the_frontend_that_accepted_dies_and_the_other_sends(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    """F-002."""
    warehouse.publish(name, "one")
    operation = fleet.request("install", name, ["worker-1"], frontend=fleet.first)
    fleet.first.kill()
    assert fleet.second.operation(operation["jobID"])["kind"] == "install"
    ended = fleet.ended(operation, fleet.second, LEASE_SECONDS + 5 * RECONCILE_SECONDS + 10)
    assert ended["status"] == "succeeded", ended
    assert fleet.began("worker-1", f"install {name}") == 1


def test_the_frontend_that_drives_dies_and_the_same_attempt_is_recorded(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-003."""
    image = warehouse.publish(name, "one", megabytes=6)
    warehouse.proxy.bytes_per_second = 2 * MEGABYTE
    operation = fleet.request("install", name, ["worker-1"], frontend=fleet.first)
    bulk = image.layers[0]
    wait_for("a third of the download", lambda: warehouse.proxy.bytes_sent(bulk.digest) > bulk.size_bytes // 3)
    fleet.first.kill()
    ended = fleet.ended(operation, fleet.second)
    assert ended["status"] == "succeeded", ended
    assert rows_of(ended)["worker-1"]["attempt"] == 1
    assert warehouse.proxy.bytes_sent(bulk.digest) == bulk.size_bytes
    assert fleet.began("worker-1", f"install {name}") == 1


def test_a_hundred_equal_requests_over_two_frontends_are_one_install(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-006."""
    image = warehouse.publish(name, "one", megabytes=1)
    warehouse.proxy.bytes_per_second = 1 * MEGABYTE
    made: list[dict[str, Any]] = []
    gate = threading.Barrier(20)

    def ask(number: int) -> None:
        gate.wait(10)
        frontend = fleet.frontends[number % 2]
        made.extend(fleet.request("install", name, ["worker-2"], frontend=frontend) for _ in range(5))

    askers = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(60)
    assert len(made) == 100
    for operation in made:
        assert fleet.ended(operation)["status"] == "succeeded"
    assert warehouse.proxy.bytes_sent(image.layers[0].digest) == image.layers[0].size_bytes
    log = [line for line in fleet.log_of("worker-2").splitlines() if repr(f"install {name}") in line]
    assert all("command.started" in line for line in log[::2]), "never two at work"
    assert all("command.done" in line for line in log[1::2])


def test_what_is_installed_costs_nothing_to_install_again(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    """F-009."""
    image = warehouse.publish(name, "one")
    fleet.done("install", name, ["worker-3"])
    inode = (fleet.backends_of("worker-3") / name).stat().st_ino
    before = warehouse.proxy.bytes_sent(image.layers[0].digest)
    began = time.monotonic()
    fleet.done("install", name, ["worker-3"])
    assert time.monotonic() - began < 1.0 + RECONCILE_SECONDS
    assert (fleet.backends_of("worker-3") / name).stat().st_ino == inode
    assert warehouse.proxy.bytes_sent(image.layers[0].digest) == before
