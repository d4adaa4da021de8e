"""Requests for new versions: who is asked and who is not, and that what is done is offered no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet, Frontend, rows_of
from tests.fleet.engines import Serving, ask, ports, processes_of
from tests.fleet.guests import row_of
from tests.fleet.tap import tapped
from tests.fleet.warehouse import Warehouse

from enginehouse.core.errors import NotFound


def test_an_upgrade_of_one_node_changes_that_node_and_asks_no_other(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-016. Both nodes serve meanwhile, each a model of its own."""
    old = serving.offer(name, "one")
    models = {"worker-1": "first-speaker", "worker-2": "second-speaker"}
    for worker, model in models.items():
        serving.add_model(model, name)
        serving.load(model, worker)
    before = {worker: _answering(fleet, serving, name, worker, model) for worker, model in models.items()}
    assert {says for says, _ in before.values()} == {"one"}
    new = serving.offer(name, "two")
    _until_digests(fleet.first, name, {"worker-1": old.digest, "worker-2": old.digest})
    for frontend in fleet.frontends:
        offered = frontend.post("/backends/upgrades/check")[name]
        assert [one["node_name"] for one in offered["nodes"]] == ["worker-1", "worker-2"]
        assert {one["available_digest"] for one in offered["nodes"]} == {new.digest}
        assert _listed(frontend, name)["upgrade_available"] is True
    with tapped(fleet, warehouse) as tap:
        operation = fleet.done("upgrade", name, ["worker-1"], frontend=fleet.second)
        assert list(rows_of(operation)) == ["worker-1"]
        ids = {worker: fleet.node(worker)["id"] for worker in fleet.workers}
        sent = {worker: tap.sent_to(node_id) for worker, node_id in ids.items()}
    # The model that was loaded there comes back by itself, and that may be soon.
    assert sent.pop("worker-1") in (["backend.upgrade"], ["backend.upgrade", "backend.install"])
    assert set(map(tuple, sent.values())) == {()}
    for frontend in fleet.frontends:
        _until_digests(frontend, name, {"worker-1": new.digest, "worker-2": old.digest})
        offered = frontend.post("/backends/upgrades/check")[name]
        assert [one["node_name"] for one in offered["nodes"]] == ["worker-2"]
    # Its replica is replaced after the upgrade; until then the old one answers.
    wait_for("the new version to answer", lambda: _says(fleet, serving, models["worker-1"]) == {"two"}, 60)
    says, pid = _answering(fleet, serving, name, "worker-1", models["worker-1"])
    assert says == "two"
    assert pid != before["worker-1"][1]
    wait_for("the old one to end", lambda: not psutil.pid_exists(before["worker-1"][1]), 60)
    assert _answering(fleet, serving, name, "worker-2", models["worker-2"]) == before["worker-2"], "the same process"
    fleet.done("upgrade", name, ["worker-2"])
    _until_nothing_is_offered(fleet, name)


def _says(fleet: Fleet, serving: Serving, model: str) -> set[str]:
    """What a model says through either frontend."""
    return {ask(port, serving.token, model)[1].partition(" ")[0] for port in ports(fleet)}


def _answering(fleet: Fleet, serving: Serving, name: str, worker: str, model: str) -> tuple[str, int]:
    """What a model says through either frontend, and the process that says it, which runs from what is installed."""
    answers = {ask(port, serving.token, model) for port in ports(fleet)}
    ((status, said),) = answers
    assert status == 200, said
    says, _, pid = said.partition(" ")
    process = psutil.Process(int(pid))
    assert process in processes_of(fleet, worker)
    tree = fleet.backends_of(worker) / name
    # By its number: a directory that was replaced may have had the same name.
    assert Path(f"/proc/{pid}/cwd").stat().st_ino == tree.stat().st_ino
    assert str(tree / "run.sh") in process.cmdline()
    return says, int(pid)


def test_an_upgrade_of_all_goes_only_where_the_backend_is(
    fleet: Fleet, warehouse: Warehouse, name: str, other: str
) -> None:
    """F-020."""
    for each in (name, other):
        warehouse.publish(each, "one")
    fleet.done("install", name, ["worker-2"])
    new = warehouse.publish(name, "two")
    fleet.first.post("/backends/upgrades/check")
    with tapped(fleet, warehouse) as tap:
        operation = fleet.done("upgrade", name, frontend=fleet.first)
        ids = {worker: fleet.node(worker)["id"] for worker in fleet.workers}
        sent = {worker: tap.sent_to(node_id) for worker, node_id in ids.items()}
        before = fleet.rows("select count(*) from operations"), fleet.rows("select count(*) from intents")
        for frontend in fleet.frontends:
            with pytest.raises(NotFound, match=f"cannot upgrade {other}: no node has it"):
                fleet.request("upgrade", other, frontend=frontend)
        assert (fleet.rows("select count(*) from operations"), fleet.rows("select count(*) from intents")) == before
    assert list(rows_of(operation)) == ["worker-2"]
    excluded = {one["node_name"]: one["reason"] for one in operation["excluded"]}
    assert excluded == {worker: f"{name} is not installed there" for worker in fleet.workers if worker != "worker-2"}
    assert {worker: verbs for worker, verbs in sent.items() if verbs} == {"worker-2": ["backend.upgrade"]}
    _until_digests(fleet.second, name, {"worker-2": new.digest})


def test_nodes_with_another_version_are_named_and_an_upgrade_leaves_nothing_to_name(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-023."""
    old = warehouse.publish(name, "one")
    fleet.done("install", name, ["worker-1", "worker-3"])
    new = warehouse.publish(name, "two")
    fleet.done("install", name, ["worker-5"], uri=warehouse.proxy.reference(f"{name}@{new.digest}"))
    wanted = {"worker-1": old.digest, "worker-3": old.digest, "worker-5": new.digest}
    for frontend in fleet.frontends:
        _until_digests(frontend, name, wanted)
        offered = frontend.post("/backends/upgrades/check")[name]
        assert [one["node_name"] for one in offered["node_drift"]] == ["worker-5"]
        assert [one["node_name"] for one in offered["nodes"]] == ["worker-1", "worker-3"]
        drift = _listed(frontend, name)["drift"]
        assert [(one["node_name"], one["digest"]) for one in drift] == [("worker-5", new.digest)]
    done = fleet.done("upgrade", name)
    assert {row["status"] for row in rows_of(done).values()} == {"success"}
    for frontend in fleet.frontends:
        _until_digests(frontend, name, dict.fromkeys(wanted, new.digest))
        assert _listed(frontend, name)["drift"] == []
    _until_nothing_is_offered(fleet, name)
    # To ask for the same again finds nothing new either.
    assert row_of(fleet.done("upgrade", name), "worker-1")["status"] == "success"
    _until_nothing_is_offered(fleet, name)


def _listed(frontend: Frontend, name: str) -> dict[str, Any]:
    found: dict[str, Any] = next((one for one in frontend.get("/backends") if one["Name"] == name), {})
    return found


def _digests(frontend: Frontend, name: str) -> dict[str, str]:
    return {node["node_name"]: node["digest"] for node in _listed(frontend, name).get("nodes", ())}


def _until_digests(frontend: Frontend, name: str, wanted: dict[str, str]) -> None:
    wait_for(f"the reports of {', '.join(wanted)}", lambda: _digests(frontend, name) == wanted, 5)


def _until_nothing_is_offered(fleet: Fleet, name: str) -> None:
    """As soon as the reports are in; and then it stays so."""
    for frontend in fleet.frontends:

        def is_offered_no_more(frontend: Frontend = frontend) -> bool:
            return name not in frontend.post("/backends/upgrades/check")

        wait_for("nothing to be offered", is_offered_no_more, 5)
    for frontend in fleet.frontends:
        assert name not in frontend.get("/backends/upgrades")
        assert "upgrade_available" not in _listed(frontend, name)
