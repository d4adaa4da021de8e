"""Replicas that are replaced under load: upgrades of their engine, changes of their model, drains of their node."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask, asking, ports, processes_of
from tests.fleet.test_wanted import on_so_many, schedule, where

LIMIT_SECONDS = 60.0
START_SECONDS = 2.0  # of an engine


def versions_of(fleet: Fleet, worker: str) -> list[int]:
    return [process.pid for process in processes_of(fleet, worker)]


def is_replaced(fleet: Fleet, before: dict[str, list[int]]) -> bool:
    """Whether each of these workers has one engine, and another one than before."""
    now = {worker: versions_of(fleet, worker) for worker in before}
    return all(len(pids) == 1 and pids != before[worker] for worker, pids in now.items())


def test_an_upgrade_replaces_two_replicas_in_turn_and_no_request_fails(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one", start_seconds=START_SECONDS)
    serving.add_model("speaker", name)
    serving.load("speaker", "worker-1")
    serving.load("speaker", "worker-2")
    before = {worker: versions_of(fleet, worker) for worker in ("worker-1", "worker-2")}
    serving.offer(name, "two", start_seconds=START_SECONDS)
    with asking(ports(fleet), serving.token, "speaker", rate=50.0) as load:
        assert fleet.done("upgrade", name, ["worker-1", "worker-2"])["status"] == "succeeded"
        wait_for("both to be replaced", partial(is_replaced, fleet, before), LIMIT_SECONDS)
        load.until_more(20)
    assert load.failures == []
    said = [text.split()[0] for _, text in load.answers]
    assert said[-1] == "two"
    assert {"one", "two"} == set(said)
    wait_for("both to be served", partial(on_so_many, fleet, "speaker", 2))
    assert where(fleet, "speaker") == {"worker-1", "worker-2"}


def test_an_upgrade_starts_the_only_replica_beside_the_old_one(fleet: Fleet, serving: Serving, name: str) -> None:
    serving.offer(name, "one", start_seconds=START_SECONDS)
    serving.add_model("lonely", name)
    serving.load("lonely", "worker-3")
    before = {"worker-3": versions_of(fleet, "worker-3")}
    serving.offer(name, "two", start_seconds=START_SECONDS)
    with asking(ports(fleet), serving.token, "lonely") as load:
        assert fleet.done("upgrade", name, ["worker-3"])["status"] == "succeeded"
        wait_for("it to be replaced", partial(is_replaced, fleet, before), LIMIT_SECONDS)
        load.until_more(20)
    assert load.failures == []
    assert load.slowest < START_SECONDS, "nobody waited for the start"
    assert load.answers[-1][1].split()[0] == "two"


def test_a_changed_model_is_loaded_anew_and_after_that_no_frontend_uses_the_old_one(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-055."""
    serving.offer(name, "one")
    serving.add_model("edited", name)
    serving.load("edited", "worker-4")
    serving.load("edited", "worker-5")
    before = {worker: versions_of(fleet, worker) for worker in ("worker-4", "worker-5")}
    with asking(ports(fleet), serving.token, "edited", rate=50.0) as load:
        changed = fleet.second.patch("/api/models/edited", {"config": {"context_size": 64}})
        assert "replaced" in changed["remarks"][0]
        wait_for("both to be replaced", partial(is_replaced, fleet, before), LIMIT_SECONDS)
        since = len(load.answers) + 16  # those under way
        load.until_more(60)
    assert load.failures == []
    old = {f"one {pid}" for pids in before.values() for pid in pids}
    assert not old & {text for _, text in load.answers[since:]}
    assert all(one["is_current"] for one in fleet.first.get("/api/models/edited")["running"])


def test_a_drain_moves_the_only_replica_first_and_says_when_the_machine_can_be_stopped(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one", start_seconds=START_SECONDS)
    serving.add_model("moving", name)
    serving.load("moving", "worker-1")
    with asking(ports(fleet), serving.token, "moving") as load:
        drain = fleet.first.post("/api/nodes/worker-1/drain")
        ended: dict[str, Any] = fleet.ended(drain)
        assert ended["status"] == "succeeded", ended["nodes"]
        assert ended["message"] == "safe to stop"
        assert versions_of(fleet, "worker-1") == []
        load.until_more(20)
    assert load.failures == []
    assert load.slowest < START_SECONDS, "nobody waited for the start"
    assert len(where(fleet, "moving") - {"worker-1"}) == 1
    fleet.first.post("/api/nodes/worker-1/resume")
    wait_for("it to be back where it was loaded", lambda: "worker-1" in where(fleet, "moving"), LIMIT_SECONDS)


def test_a_drain_of_the_only_node_that_fits_stops_what_cannot_be_moved(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("pinned", name)
    schedule(fleet, "pinned", min_replicas=1, node_selector={"node.name": "worker-2"})
    wait_for("it to be loaded", partial(on_so_many, fleet, "pinned", 1), LIMIT_SECONDS)
    ended = fleet.ended(fleet.first.post("/api/nodes/worker-2/drain"))
    assert ended["status"] == "succeeded", ended
    assert versions_of(fleet, "worker-2") == []
    fleet.first.post("/api/nodes/worker-2/resume")
    wait_for("it to be loaded again", partial(on_so_many, fleet, "pinned", 1), LIMIT_SECONDS)
    assert ask(fleet.first.port, serving.token, "pinned")[0] == 200
    fleet.first.delete("/api/nodes/scheduling/pinned")
