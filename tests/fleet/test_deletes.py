"""Deletes: of what is not there, of what nobody can reach now, and against an upgrade of the same thing."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from typing import Any

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import STALE_SECONDS, Fleet, Frontend
from tests.fleet.guests import Clock, row_of
from tests.fleet.warehouse import META, META_BUILD, Warehouse
from tests.worker.shelf import Tree, tree_of

from enginehouse.core.errors import NotFound

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
AWAY_SECONDS = (20 if IS_PROOF else 2) * STALE_SECONDS
ROUNDS = 40 if IS_PROOF else 5  # on each of five workers
CLAIM_SECONDS = 0.1


def test_a_delete_of_what_is_not_there_succeeds_and_says_so(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    """F-026, for a backend."""
    warehouse.publish(name, "one")
    deleted = fleet.done("delete", name, ["worker-1"])
    assert row_of(deleted, "worker-1")["note"] == "already_absent"
    fleet.done("install", name, ["worker-1"])
    shutil.rmtree(fleet.backends_of("worker-1") / name)
    again = fleet.done("delete", name, ["worker-1"])
    assert row_of(again, "worker-1")["note"] == "already_absent"
    _until_unlisted(fleet, name)


def test_a_meta_name_whose_build_is_gone_can_be_deleted(fleet: Fleet, warehouse: Warehouse) -> None:
    """F-026, for a meta entry."""
    warehouse.publish(META_BUILD, "one")
    fleet.done("install", META, ["worker-2"])

    def listed() -> set[str]:
        return {one["Name"] for one in fleet.second.get("/backends")} & {META, META_BUILD}

    wait_for("both names to be listed", lambda: listed() == {META, META_BUILD})
    shutil.rmtree(fleet.backends_of("worker-2") / META_BUILD)
    fleet.done("delete", META, ["worker-2"])
    wait_for("the orphan to disappear", lambda: listed() == set(), 5)
    assert not (fleet.backends_of("worker-2") / META).exists()


def test_a_delete_waits_for_its_node_however_long_and_comes_first_there(
    fleet: Fleet, warehouse: Warehouse, name: str, other: str
) -> None:
    """F-027."""
    warehouse.publish(name, "one")
    warehouse.publish(other, "one")
    fleet.done("install", name, ["worker-5"])
    fleet.workers["worker-5"].stop()
    wait_for("it to be offline", lambda: fleet.node("worker-5")["status"] == "offline", 3 * STALE_SECONDS)
    deleting = fleet.request("delete", name, ["worker-5"], frontend=fleet.first)
    installing = fleet.request("install", other, ["worker-5"], frontend=fleet.second)
    pace, polls = Clock(0.25), 0
    since = time.monotonic()
    while time.monotonic() - since < AWAY_SECONDS:
        found = fleet.frontends[polls % 2].operation(deleting["jobID"])
        row = row_of(found, "worker-5")
        assert (found["status"], row["status"], row["reason"], row["attempt"]) == ("queued", "queued", "node_away", 0)
        assert found["isParked"]
        polls += 1
        pace.tick()
    fleet.workers["worker-5"].start()
    assert fleet.ended(deleting, fleet.second)["status"] == "succeeded"
    assert fleet.ended(installing)["status"] == "succeeded"
    assert not (fleet.backends_of("worker-5") / name).exists()
    assert fleet.began("worker-5", f"delete {name}") == 1
    sent = dict(
        fleet.rows(
            "select o.operation_id, i.dispatched_at from operation_intents o join intents i on i.id = o.intent_id"
            " where o.operation_id in (%s, %s)",
            deleting["jobID"],
            installing["jobID"],
        )
    )
    # Two frontends may share what is due between them, within the time of one claim.
    assert sent[deleting["jobID"]] <= sent[installing["jobID"]] + CLAIM_SECONDS
    _until_unlisted(fleet, name)


def test_of_an_upgrade_and_a_delete_at_once_the_later_accepted_one_holds(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-022: both orders, five milliseconds apart, on two frontends, round after round on five workers."""
    old = warehouse.publish(name, "one", megabytes=0.05)
    warehouse.publish(name, "two", megabytes=0.05)
    old_uri = warehouse.proxy.reference(f"{name}@{old.digest}")
    failures: list[str] = []
    later: list[str] = []

    def compete(worker: str, seed: int) -> None:
        chance = random.Random(seed)
        new_tree: Tree = {}
        try:
            for _ in range(ROUNDS):
                fleet.done("install", name, [worker], uri=old_uri, force=True)
                wait_for("the report of it", lambda: _has(fleet, worker, name))
                if not new_tree:
                    fleet.done("upgrade", name, [worker])
                    new_tree.update(tree_of(fleet.backends_of(worker) / name))
                    fleet.done("install", name, [worker], uri=old_uri, force=True)
                later.append(_round(fleet, worker, name, chance, new_tree))
        except BaseException as error:  # an assertion of a thread is lost otherwise
            failures.append(f"{worker}: {error!r}")

    rivals = [threading.Thread(target=compete, args=one) for one in zip(fleet.workers, range(5), strict=False)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(120 if IS_PROOF else 60)
    assert failures == []
    assert len(later) == 5 * ROUNDS
    assert set(later) == {"upgrade", "delete"}, "both orders came up"


def _round(fleet: Fleet, worker: str, name: str, chance: random.Random, new_tree: Tree) -> str:
    """One upgrade against one delete; which of the two was accepted later."""
    kinds = ["upgrade", "delete"]
    chance.shuffle(kinds)
    frontends: list[Frontend] = [fleet.first, fleet.second]
    chance.shuffle(frontends)
    made: dict[str, dict[str, Any]] = {}

    def ask(kind: str, frontend: Frontend, after_seconds: float) -> None:
        Clock(after_seconds).tick()
        try:
            made[kind] = fleet.request(kind, name, [worker], frontend=frontend)
        except NotFound:
            assert kind == "upgrade", "what was deleted and reported cannot be upgraded"

    askers = [
        threading.Thread(target=ask, args=(kind, frontend, 0.005 * index))
        for index, (kind, frontend) in enumerate(zip(kinds, frontends, strict=True))
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(30)
    ended = {kind: fleet.ended(operation) for kind, operation in made.items()}
    order = fleet.rows(
        "select o.operation_id from operation_intents o join intents i on i.id = o.intent_id"
        " where o.operation_id = any(%s) order by i.generation",
        [operation["jobID"] for operation in made.values()],
    )
    by_id = {operation["jobID"]: kind for kind, operation in made.items()}
    accepted = [by_id[row[0]] for row in order]
    assert sorted(accepted) == sorted(made)
    last = ended[accepted[-1]]
    assert last["status"] == "succeeded", last
    for kind in accepted[:-1]:
        row = row_of(ended[kind], worker)
        assert row["state"] in ("succeeded", "superseded"), row
        assert row["state"] == "succeeded" or (row["reason"], bool(row["error"])) == ("superseded", True), row
    tree = fleet.backends_of(worker) / name
    if accepted[-1] == "delete":
        assert not tree.exists()
    else:
        assert tree_of(tree) == new_tree
    assert fleet.residue_of(worker) == []
    return accepted[-1]


def _has(fleet: Fleet, worker: str, name: str) -> bool:
    return any(one["name"] == name for one in fleet.node(worker)["backends"])


def _until_unlisted(fleet: Fleet, name: str) -> None:
    def is_listed() -> bool:
        return any(one["Name"] == name for frontend in fleet.frontends for one in frontend.get("/backends"))

    wait_for(f"{name} to be listed no longer", lambda: not is_listed(), 5)
