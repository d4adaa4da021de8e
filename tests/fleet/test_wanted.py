"""Wanted replicas on real processes: back by themselves after kills of workers, frontends and engines, and upgrades."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import psutil
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask, asking, ports, processes_of

LIMIT_SECONDS = 60.0


def where(fleet: Fleet, model: str) -> set[str]:
    """The nodes of a model's replicas, as both frontends see them; empty while they disagree."""
    seen = []
    for frontend in fleet.frontends:
        (found,) = [one for one in frontend.get("/api/models") if one["name"] == model]
        seen.append({one["node_name"] for one in found["replicas"]})
    return seen[0] if all(one == seen[0] for one in seen) else set()


def on_so_many(fleet: Fleet, model: str, number: int, besides: str = "") -> bool:
    found = where(fleet, model)
    return len(found) == number and besides not in found


def schedule(fleet: Fleet, model: str, **fields: Any) -> dict[str, Any]:
    stored: dict[str, Any] = fleet.first.post("/api/nodes/scheduling", {"model_name": model, **fields})
    return stored


def test_a_minimum_is_kept_without_requests_when_a_worker_dies_and_after_frontends_restarted(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-047."""
    serving.offer(name, "one")
    serving.add_model("kept-speaker", name)
    schedule(fleet, "kept-speaker", min_replicas=2)
    wait_for("two replicas", partial(on_so_many, fleet, "kept-speaker", 2), LIMIT_SECONDS)
    gone = sorted(where(fleet, "kept-speaker"))[0]
    with asking(ports(fleet), serving.token, "kept-speaker") as load:
        load.until_more()
        fleet.workers[gone].kill()
        again = partial(on_so_many, fleet, "kept-speaker", 2, gone)
        wait_for("a replica elsewhere", again, LIMIT_SECONDS)
        load.until_more()
    # Only requests that the dead engine had may fail.
    assert {status for status, _ in load.failures} <= {0, 502, 503}
    assert len(load.failures) <= 8
    for frontend in fleet.frontends:
        frontend.kill()
    for node in sorted(where_engines_run(fleet)):
        for process in processes_of(fleet, node):
            process.kill()
    fleet.mend()
    wait_for("two replicas again", partial(on_so_many, fleet, "kept-speaker", 2), LIMIT_SECONDS)
    fleet.first.delete("/api/nodes/scheduling/kept-speaker")


def where_engines_run(fleet: Fleet) -> set[str]:
    return {name for name, worker in fleet.workers.items() if worker.is_alive and processes_of(fleet, name)}


def test_more_than_the_fleet_can_hold_is_said_with_the_reason_of_each_node_and_tried_seldom(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-048."""
    serving.offer(name, "one")
    serving.add_model("many-speaker", name)
    schedule(fleet, "many-speaker", min_replicas=9)
    wait_for("all that fits", partial(on_so_many, fleet, "many-speaker", 5), LIMIT_SECONDS)

    def told() -> dict[str, Any] | None:
        found: dict[str, Any] = fleet.second.get("/api/nodes/scheduling/many-speaker")
        return found if found.get("reason") else None

    stored = wait_for("the reason", told, LIMIT_SECONDS)
    assert stored["unsatisfiable_until"]
    assert stored["reason"].count("already runs a replica of it") == 5
    explained = fleet.second.get("/api/models/many-speaker/explain")
    assert (explained["replicas"], explained["wanted"], explained["chosen"]) == (5, 9, "")
    fleet.first.delete("/api/nodes/scheduling/many-speaker")


def test_replicas_follow_a_changed_selector_and_an_operators_labels_survive_their_worker(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-054."""
    model = "labelled-speaker"
    serving.offer(name, "one")
    serving.add_model(model, name)
    for worker, zone in (("worker-1", "attic"), ("worker-2", "attic"), ("worker-3", "cellar")):
        fleet.first.patch(f"/api/nodes/{worker}/labels", {"zone": zone})
    schedule(fleet, model, spread_all=True, node_selector={"zone": "attic"})
    attic, cellar = {"worker-1", "worker-2"}, {"worker-3"}
    wait_for("one on each in the attic", lambda: where(fleet, model) == attic, LIMIT_SECONDS)
    fleet.workers["worker-2"].again()
    fleet.until_healthy()
    assert fleet.node("worker-2")["labels"]["zone"] == "attic"
    wait_for("both to be there again", lambda: where(fleet, model) == attic, LIMIT_SECONDS)
    with asking(ports(fleet), serving.token, model) as load:
        load.until_more()
        schedule(fleet, model, spread_all=True, node_selector={"zone": "cellar"})
        wait_for("it to have moved", lambda: where(fleet, model) == cellar, LIMIT_SECONDS)
        load.until_more()
    assert load.failures == []
    before = starts_and_stops(fleet, model)
    serving.add_model("witness-speaker", name)
    schedule(fleet, "witness-speaker", min_replicas=1, node_selector={"zone": "cellar"})
    wait_for("a pass of the reconciler", partial(on_so_many, fleet, "witness-speaker", 1), LIMIT_SECONDS)
    assert starts_and_stops(fleet, model) == before
    assert where(fleet, model) == cellar
    for one in (model, "witness-speaker"):
        fleet.first.delete(f"/api/nodes/scheduling/{one}")
    for worker in attic | cellar:
        fleet.first.delete(f"/api/nodes/{worker}/labels/zone")


def starts_and_stops(fleet: Fleet, model: str) -> int:
    ((number,),) = fleet.rows("select count(*) from intents where subject = %s", f"replica:{model}#0")
    return int(number)


def test_no_engine_outlives_a_worker_that_was_killed_and_its_ports_are_free(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-085."""
    serving.offer(name, "one")
    for number in range(3):
        serving.add_model(f"mortal-speaker-{number}", name)
        serving.load(f"mortal-speaker-{number}", "worker-4")
    engines = processes_of(fleet, "worker-4")
    listening = {
        one.laddr.port for engine in engines for one in engine.net_connections() if one.status == psutil.CONN_LISTEN
    }
    assert len(listening) == 3
    fleet.workers["worker-4"].kill()
    wait_for("every engine to be gone", lambda: not any(map(runs, engines)), 5.0)
    # Whoever else connects on this machine may have one of these as its own port for a moment.
    wait_for("their ports to be free", lambda: all(map(is_free, listening)))


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_what_was_loaded_by_hand_is_there_again_after_an_upgrade_of_its_engine_and_after_a_restart(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("hand-speaker", name)
    serving.load("hand-speaker", "worker-3")
    serving.offer(name, "two")
    assert fleet.done("upgrade", name, ["worker-3"])["status"] == "succeeded"
    wait_for("it to be replaced", partial(says, fleet, serving, "two"), LIMIT_SECONDS)
    wait_for("one to be left", partial(on_so_many, fleet, "hand-speaker", 1), LIMIT_SECONDS)
    assert where(fleet, "hand-speaker") == {"worker-3"}
    fleet.workers["worker-3"].again()
    fleet.until_healthy()
    wait_for("it to be back", partial(on_so_many, fleet, "hand-speaker", 1), LIMIT_SECONDS)


def says(fleet: Fleet, serving: Serving, wanted: str) -> bool:
    status, said = ask(fleet.first.port, serving.token, "hand-speaker")
    return status == 200 and said.split()[0] == wanted


def test_an_operator_who_deletes_an_engine_does_not_get_it_back_for_a_model_that_was_loaded(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    serving.offer(name, "one")
    serving.add_model("left-speaker", name)
    serving.load("left-speaker", "worker-2")
    assert fleet.done("delete", name, ["worker-2"])["status"] == "succeeded"
    serving.add_model("witness-speaker", name)
    schedule(fleet, "witness-speaker", min_replicas=1, node_selector={"node.name": "worker-4"})
    wait_for("a pass of the reconciler", partial(on_so_many, fleet, "witness-speaker", 1), LIMIT_SECONDS)
    assert where(fleet, "left-speaker") == set()
    assert not (fleet.backends_of("worker-2") / name).exists()
    fleet.first.delete("/api/nodes/scheduling/witness-speaker")
