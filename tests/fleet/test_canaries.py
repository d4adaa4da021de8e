"""Upgrades that begin with one node, on real processes: what does not work there is never seen by anybody else."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, asking, ports
from tests.fleet.test_rolling import versions_of
from tests.fleet.warehouse import Warehouse

BROKEN = b"#!/bin/sh\necho 'the new version does not work here' >&2\nexit 3\n"
LIMIT_SECONDS = 60.0
TWO = ["worker-1", "worker-2"]


def digests(fleet: Fleet, name: str) -> dict[str, str]:
    listed = next(one for one in fleet.second.get("/backends") if one["Name"] == name)
    return {str(node["node_name"]): str(node["digest"]) for node in listed["nodes"]}


def loaded(serving: Serving, model: str, name: str) -> None:
    serving.add_model(model, name)
    for worker in TWO:
        serving.load(model, worker)


def test_a_version_that_does_not_start_is_taken_back_and_the_second_node_is_never_touched(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    old = serving.offer(name, "one")
    loaded(serving, "guarded", name)
    before = {worker: versions_of(fleet, worker) for worker in TWO}
    new = warehouse.publish(name, "two", run=BROKEN)
    fetched = warehouse.proxy.bytes_sent(old.layers[1].digest)
    with asking(ports(fleet), serving.token, "guarded") as load:
        ended: dict[str, Any] = fleet.ended(fleet.request("upgrade", name, TWO))
        load.until_more(20)
    assert load.failures == []
    assert {text.split()[0] for _, text in load.answers} == {"one"}
    assert (ended["status"], ended["errorCode"]) == ("failed", "canary_failed"), ended
    (canary,) = ended["canary"]["nodes"]
    first = canary["node_name"]
    (second,) = set(TWO) - {first}
    assert f"canary failed on {first}: guarded could not be started" in ended["error"], ended["error"]
    assert "does not work here" in ended["error"]
    assert "; returned to " in ended["error"]
    assert {row["node_name"]: row["state"] for row in ended["nodes"] if row["action"].startswith("upgrade")} == {
        first: "succeeded",
        second: "cancelled",
    }
    assert fleet.began(second, f"upgrade {name}") == 0
    wait_for("both to be reported", lambda: set(digests(fleet, name).values()) == {old.digest})
    assert new.digest != old.digest
    assert warehouse.proxy.bytes_sent(old.layers[1].digest) == fetched, "the old version was there"
    assert {worker: versions_of(fleet, worker) for worker in TWO} == before, "the same processes all the time"
    assert fleet.residue_of(first) == []


def test_a_version_that_works_reaches_the_second_node_after_the_first_stayed_ready(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    loaded(serving, "followed", name)
    new = serving.offer(name, "two")
    with asking(ports(fleet), serving.token, "followed") as load:
        operation = fleet.request("upgrade", name, TWO)
        (first,) = [one["node_name"] for one in operation["canary"]["nodes"]]
        wait_for("the first to have it", lambda: digests(fleet, name)[first] == new.digest, LIMIT_SECONDS)
        ended = fleet.ended(operation)
        assert ended["status"] == "succeeded", ended
        assert ended["canary"]["phase"] == "passed", ended
        wait_for("only the new version", partial(says_only, load, "two"), LIMIT_SECONDS)
    assert load.failures == []
    trees = {said_by_engine(fleet, worker, name) for worker in TWO}
    assert trees == {"two"}


def says_only(load: Any, text: str) -> bool:
    last = load.answers[-30:]
    return len(last) == 30 and {said.split()[0] for _, said in last} == {text}


def said_by_engine(fleet: Fleet, worker: str, name: str) -> str:
    program = (fleet.backends_of(worker) / name / "run.sh").read_text()
    return "two" if '"two %d"' in program else "one"
