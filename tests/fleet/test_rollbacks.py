"""A rollback of an upgraded engine on real workers: no download, no failed request, and it can be undone."""

from __future__ import annotations

from functools import partial

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, asking, ports
from tests.fleet.test_rolling import is_replaced, versions_of
from tests.fleet.test_wanted import on_so_many

LIMIT_SECONDS = 60.0
NODES = ("worker-1", "worker-2")


def previous_of(fleet: Fleet, backend: str) -> dict[str, bool]:
    """Per node that has the backend, whether it reports a previous version."""
    return {
        node["name"]: bool(one.get("previous_digest"))
        for node in fleet.first.get("/api/nodes")
        for one in node["backends"]
        if one["name"] == backend
    }


def test_a_rollback_returns_running_engines_and_leaves_out_who_has_nothing_to_return_to(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("returning", name)
    for worker in NODES:
        serving.load("returning", worker)
    assert fleet.done("install", name, ["worker-3"])["status"] == "succeeded"
    serving.offer(name, "two")
    before = {worker: versions_of(fleet, worker) for worker in NODES}
    assert fleet.done("upgrade", name, list(NODES))["status"] == "succeeded"
    wait_for("both to be replaced", partial(is_replaced, fleet, before), LIMIT_SECONDS)
    wait_for("reports", lambda: previous_of(fleet, name) == {**dict.fromkeys(NODES, True), "worker-3": False})
    for expected in ("one", "two"):  # the second one undoes the first
        before = {worker: versions_of(fleet, worker) for worker in NODES}
        with asking(ports(fleet), serving.token, "returning") as load:
            ended = fleet.done("rollback", name, [*NODES, "worker-3"])
            assert ended["status"] == "succeeded", ended
            assert [row["node_name"] for row in ended["nodes"]] == list(NODES)
            reasons = {one["node_name"]: one["reason"] for one in ended["excluded"]}
            assert reasons == {"worker-3": f"it has kept no previous version of {name}"}
            wait_for("both to be replaced", partial(is_replaced, fleet, before), LIMIT_SECONDS)
            load.until_more(20)
        assert load.failures == []
        assert load.answers[-1][1].split()[0] == expected
    wait_for("both to be served", partial(on_so_many, fleet, "returning", 2))
