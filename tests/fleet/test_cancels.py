"""Changing one's mind: what is cancelled ends everywhere and stays ended, and what was refused never began."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import RECONCILE_SECONDS, Fleet, rows_of
from tests.fleet.guests import guest_worker, registered, restart, row_of
from tests.fleet.tap import tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by, tree_of

from enginehouse.core.errors import Conflict, Invalid, NotFound


def test_a_cancel_on_the_other_frontend_ends_a_download_and_keeps_what_was_there(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-011."""
    before = warehouse.publish(name, "one")
    fleet.done("install", name, ["worker-1"])
    tree = tree_of(fleet.backends_of("worker-1") / name)
    bulk = warehouse.publish(name, "two", megabytes=5).layers[0]
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    fleet.first.post("/backends/upgrades/check")
    operation = fleet.request("upgrade", name, ["worker-1"], frontend=fleet.first)
    wait_for("the download", lambda: warehouse.proxy.bytes_sent(bulk.digest) > 0.1 * MEGABYTE)
    assert _is_sending(warehouse, bulk.digest)

    cancelled = fleet.second.post(f"/api/operations/{operation['jobID']}/cancel", {})
    assert cancelled["operation"]["status"] == "cancelled"
    wait_for("the socket to be closed", lambda: not _is_sending(warehouse, bulk.digest), 5)
    sent = warehouse.proxy.bytes_sent(bulk.digest)
    assert sent < bulk.size_bytes
    wait_for("staging to be empty", lambda: fleet.residue_of("worker-1") == [], 5)

    def shown() -> list[tuple[object, ...]]:
        found = [frontend.operation(operation["jobID"]) for frontend in fleet.frontends]
        rows = [row_of(one, "worker-1") for one in found]
        return [
            (one["status"], one["cancellable"], row["status"], row["reason"], row["attempt"])
            for one, row in zip(found, rows, strict=True)
        ]

    assert shown() == [("cancelled", False, "cancelled", "cancelled", 1)] * 2
    restart(*fleet.frontends)
    assert shown() == [("cancelled", False, "cancelled", "cancelled", 1)] * 2
    fleet.until_healthy("worker-1")
    listed = next(one for one in fleet.first.get("/backends") if one["Name"] == name)
    assert [node["digest"] for node in listed["nodes"]] == [before.digest]
    assert tree_of(fleet.backends_of("worker-1") / name) == tree
    assert said_by(fleet.backends_of("worker-1") / name) == "one"
    assert fleet.began("worker-1", f"upgrade {name}") == 1
    assert warehouse.proxy.bytes_sent(bulk.digest) == sent, "nothing was fetched after the cancel"


def test_what_is_still_queued_is_cancelled_at_once_and_never_sent(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-012."""
    warehouse.publish(name, "one", megabytes=1)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    with tapped(fleet, warehouse) as tap:
        operation = fleet.request("install", name, ["worker-1", "worker-2"], max_parallel=1, frontend=fleet.first)

        def running() -> dict[str, Any] | None:
            rows = fleet.second.operation(operation["jobID"])["nodes"]
            return next((row for row in rows if row["state"] == "running"), None)

        first = wait_for("one of them to run", running)
        rows = rows_of(fleet.second.operation(operation["jobID"]))
        queued = next(row for row in rows.values() if row["node_id"] != first["node_id"])
        assert (queued["state"], queued["attempt"]) == ("accepted", 0)
        began = time.monotonic()
        fleet.second.post(f"/api/operations/{operation['jobID']}/cancel", {"node": queued["node_name"]})
        for frontend in fleet.frontends:
            row = row_of(frontend.operation(operation["jobID"]), queued["node_name"])
            assert (row["status"], row["attempt"]) == ("cancelled", 0)
        assert time.monotonic() - began <= 1.0
        ended = fleet.ended(operation)
        assert row_of(ended, first["node_name"])["status"] == "success"
        assert tap.sent_to(first["node_id"]) == ["backend.install"]
        assert tap.sent_to(queued["node_id"]) == []
    assert fleet.began(queued["node_name"], f"install {name}") == 0
    assert not (fleet.backends_of(queued["node_name"]) / name).exists()


def test_what_no_node_can_be_asked_for_is_refused_without_a_trace(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-013."""
    warehouse.publish(name, "one")
    with (
        tapped(fleet, warehouse) as tap,
        registered(fleet, "stranger", "backend") as stranger,
        registered(fleet, "assistant", "agent") as assistant,
    ):
        before = fleet.rows("select count(*) from operations")
        refused: dict[str, type[Exception]] = {"stranger": Conflict, "nobody": NotFound, "assistant": Invalid}
        codes = {}
        for frontend in fleet.frontends:
            for node, kind in refused.items():
                with pytest.raises(kind) as caught:
                    fleet.request("install", name, [node], frontend=frontend)
                codes[node] = getattr(caught.value, "code", "")
                with pytest.raises(kind):
                    # One that cannot be asked spoils the whole request: nothing of it is done.
                    fleet.request("install", name, ["worker-1", node], frontend=frontend)
        assert codes == {"stranger": "node_not_approved", "nobody": "not_found", "assistant": "unsupported"}
        assert fleet.rows("select count(*) from operations") == before
        assert fleet.rows("select count(*) from intents where node_id in (%s, %s)", stranger, assistant) == [(0,)]
        # A request that is accepted is heard, so what was not heard was not said.
        fleet.done("install", name, ["worker-2"])
        assert tap.sent_to(fleet.node("worker-2")["id"]) == ["backend.install"]
        for node_id in (stranger, assistant, fleet.node("worker-1")["id"]):
            assert tap.sent_to(node_id) == []


def test_what_waits_for_a_node_ends_when_the_node_is_removed(
    fleet: Fleet, warehouse: Warehouse, name: str, other: str
) -> None:
    """F-028."""
    warehouse.publish(name, "one")
    warehouse.publish(other, "one")
    with guest_worker(fleet, "worker-leaving") as leaving:
        fleet.done("install", name, ["worker-leaving"])
        leaving.stop()
        wait_for("it to be away", lambda: fleet.node("worker-leaving")["status"] != "healthy")
        waiting = [
            fleet.request("delete", name, ["worker-leaving"], frontend=fleet.first),
            fleet.request("install", other, ["worker-leaving"], frontend=fleet.second),
            fleet.request("install", "family", ["worker-leaving"], frontend=fleet.first),
        ]
        for operation in waiting:
            row = row_of(fleet.second.operation(operation["jobID"]), "worker-leaving")
            assert (row["status"], row["reason"], row["attempt"]) == ("queued", "node_away", 0)
        node_id = fleet.node("worker-leaving")["id"]
        fleet.second.delete("/api/nodes/worker-leaving?force=true")
        removed = time.monotonic()
        for frontend in fleet.frontends:
            for operation in waiting:
                found = frontend.operation(operation["jobID"])
                assert (found["status"], found["nodes"][0]["reason"]) == ("cancelled", "node_removed")
                assert "worker-leaving was removed" in found["nodes"][0]["error"]
            shown = frontend.get("/api/operations?limit=500")["operations"]
            assert not {one["jobID"] for one in shown} & {one["jobID"] for one in waiting}
            assert node_id not in [node["id"] for node in fleet.nodes(frontend)]
        assert time.monotonic() - removed <= RECONCILE_SECONDS
        assert fleet.rows("select count(*) from intents where node_id = %s and state = 'waiting'", node_id) == [(0,)]


def _is_sending(warehouse: Warehouse, digest: str) -> bool:
    """Whether the proxy has an open connection on which it sends this blob."""
    return any(not request.is_over for request in warehouse.proxy.asked(digest))
