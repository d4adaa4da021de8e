"""Cold requests on real processes: one load however many ask, whoever gives up, fails or dies meanwhile."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import LEASE_SECONDS, Fleet
from tests.fleet.cold import ColdAnswer, ask_at_once, ask_cold, begun, loads_of, nonces_of, only_on
from tests.fleet.engines import Serving, ports, processes_of, program
from tests.fleet.test_peers import Hub
from tests.fleet.warehouse import Warehouse

from enginehouse.core.model import ModelFile

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
COLD_REQUESTS = 1000 if IS_PROOF else 100  # of F-067
START_SECONDS = 3.0
HUGE_BYTES = 1024**5
# As the shell says of a process that the kernel killed for its memory. The engine has read its key by then.
ENDS_137 = """
key = json.load(open(os.environ["ENGINEHOUSE_MODEL_FILE"]))["key"]
time.sleep(1.0)
print("cannot hold the weights of", key, flush=True)
sys.exit(137)
"""


def test_many_cold_requests_on_two_frontends_cause_one_install_and_one_start(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-067."""
    serving.offer(name, "one", start_seconds=1.0)
    serving.add_model(model := f"cold-{name}", name)
    answers = ask_at_once(serving.token, [(port, model) for port in ports(fleet)] * (COLD_REQUESTS // 2))
    assert {answer.status for answer in answers} == {200}
    assert len({answer.said for answer in answers}) == 1, "one process answers"
    done = [begun(fleet, what) for what in (f"install {name}", f"place the files of {model}", f"start {model}")]
    assert done == [1, 1, 1]
    assert loads_of(fleet, model) == 1


def test_a_load_goes_on_when_its_client_has_given_up(fleet: Fleet, serving: Serving, name: str) -> None:
    """F-069."""
    serving.offer(name, "one", start_seconds=START_SECONDS)
    serving.add_model(model := f"left-{name}", name)
    assert ask_cold(fleet.first.port, serving.token, model, limit_seconds=1.0).status == 0
    wait_for("the load to end", lambda: nonces_of(fleet, model))
    for port in ports(fleet):
        answer = ask_cold(port, serving.token, model)
        assert (answer.status, answer.seconds < START_SECONDS) == (200, True), "it is warm"
    assert (loads_of(fleet, model), begun(fleet, f"start {model}")) == (1, 1)


def test_an_engine_that_exits_while_it_loads_is_told_to_all_who_wait_and_not_started_again_for_a_while(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-070."""
    warehouse.publish(name, "one", run=program("one", first=ENDS_137))
    serving.add_model(model := f"ending-{name}", name)
    with only_on(fleet, model, "worker-1"):
        answers = ask_at_once(serving.token, [(port, model) for port in ports(fleet)] * 5)
        assert {(answer.status, answer.code) for answer in answers} == {(500, "backend_exited")}
        (message,) = {answer.message for answer in answers}
        assert "ended with code 137: cannot hold the weights of …" in message, "the cause, without the key"
        warehouse.publish(name, "mended", run=program("mended"))
        fleet.done("upgrade", name, ["worker-1"])
        for port in ports(fleet):
            again = ask_cold(port, serving.token, model)
            assert (again.message, again.retry_after) == (message, "10")
        assert (loads_of(fleet, model), begun(fleet, f"start {model}")) == (1, 1)
        let_pass(fleet, model, 60.0)
        answer = ask_cold(fleet.second.port, serving.token, model)
        assert (answer.status, answer.said.split()[0]) == (200, "mended")


def let_pass(fleet: Fleet, model: str, seconds: float) -> None:
    """So much time since the last load of a model."""
    fleet.rows("update operations set created_at = created_at - %s where name = %s", seconds, model)
    fleet.rows(
        """update intents set updated_at = updated_at - %s where id in (select intent_id from operation_intents
            join operations on operations.id = operation_id where operations.name = %s)""",
        seconds,
        model,
    )


@pytest.mark.parametrize("what", ["memory", "disk"])
def test_a_model_that_fits_nowhere_is_refused_at_once_with_what_each_node_has(
    fleet: Fleet, serving: Serving, name: str, what: str
) -> None:
    """F-074."""
    serving.offer(name, "one")
    huge = ModelFile("huge.gguf", "https://127.0.0.1/huge.gguf", "0" * 64, HUGE_BYTES)
    model = f"huge-{what}"
    if what == "memory":
        serving.add_model(model, name, memory="1024 TiB")
    else:
        serving.add_model(model, name, files=(huge,), memory="1 MiB")
    for port in ports(fleet):
        answer = ask_cold(port, serving.token, model)
        assert (answer.status, answer.code, answer.seconds < 5.0) == (503, "insufficient_capacity", True)
        assert 1 <= float(answer.retry_after) <= 300
        for worker in fleet.workers:
            reasons, _, remedy = answer.message.partition(". What would help: ")
            assert remedy.startswith("add a node"), "no machine has as much in all"
            (reason,) = [part for part in reasons.split("; ") if f"{worker} " in part]
            assert "needs 1.0 PiB" in reason, reason
            assert f"of {what}" in reason, reason
            # Of a replica that was ready a moment ago, no heartbeat has shown the memory yet.
            assert re.search(r" free(, [0-9.]+ \w+ reserved for [^,]+)?$", reason), reason


def test_the_loads_of_a_killed_frontend_are_served_to_those_who_wait_elsewhere_whatever_their_phase(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, names: Callable[[int], list[str]]
) -> None:
    """F-068. The second frontend sleeps until the first has all four loads, and then gets requests of its own."""
    quick, slow, bulky = names(3)
    serving.offer(quick, "quick")
    serving.offer(slow, "slow", start_seconds=2 * START_SECONDS)
    warehouse.publish(bulky, "bulky", megabytes=3, run=program("bulky"))
    hub = Hub(warehouse)
    file = hub.offer("staged", 3)
    # These workers talk to the first frontend while it lives.
    nodes = {"choosing": "worker-1", "installing": "worker-3", "staging": "worker-5", "loading": "worker-1"}
    backends = {"choosing": quick, "installing": bulky, "staging": quick, "loading": slow}
    for phase, backend in backends.items():
        serving.add_model(phase, backend, files=(file,) if phase == "staging" else ())
        fleet.first.post("/api/nodes/scheduling", {"model_name": phase, "node_selector": {"node.name": nodes[phase]}})
    fleet.done("install", quick, ["worker-1", "worker-5"])
    fleet.done("install", slow, ["worker-1"])
    with ThreadPoolExecutor(8) as pool:

        def ask(port: int, phase: str) -> Callable[[], ColdAnswer]:
            return pool.submit(ask_cold, port, serving.token, phase).result

        fleet.second.pause()
        try:
            warehouse.proxy.bytes_per_second = 50_000
            lost = [ask(fleet.first.port, phase) for phase in ("installing", "staging", "loading")]
            subjects = (f"backend:{bulky}", "model:staging", "replica:loading#0")
            wait_for("three phases", lambda: all(is_running(fleet, subject) for subject in subjects))
            hold_placing(fleet)
            lost.append(ask(fleet.first.port, "choosing"))
            owner = wait_for("the fourth", partial(owner_of, fleet, "choosing"))
        finally:
            fleet.second.resume()
        kept = [ask(fleet.second.port, phase) for phase in backends]
        wait_for("all to wait", lambda: all(is_waited_for(fleet, phase) for phase in backends))
        assert {owner_of(fleet, phase) for phase in backends} == {owner}
        assert all(is_running(fleet, subject) for subject in subjects), "no phase is over"
        fleet.first.kill()
        assert {answer().status for answer in lost} == {0}
        wait_for("another owner", lambda: owner_of(fleet, "choosing") != owner, LEASE_SECONDS + 2.0)
        fleet.rows("delete from leases where name = 'placing'")
        warehouse.calm()
        answers = [answer() for answer in kept]
    hub.close()
    assert {answer.status for answer in answers} == {200}, answers
    for phase in backends:
        assert (loads_of(fleet, phase), begun(fleet, f"start {phase}"), len(nonces_of(fleet, phase))) == (1, 1, 1)
    running = {worker: len(processes_of(fleet, worker)) for worker in fleet.workers}
    assert running == {"worker-1": 2, "worker-2": 0, "worker-3": 1, "worker-4": 0, "worker-5": 1}
    fleet.mend()
    for phase in backends:
        fleet.first.delete(f"/api/nodes/scheduling/{phase}")


def is_running(fleet: Fleet, subject: str) -> bool:
    return bool(fleet.rows("select 1 from intents where subject = %s and state = 'running'", subject))


def hold_placing(fleet: Fleet) -> None:
    """No load gets a node from now on: whatever begins stays in its first phase."""
    fleet.rows(
        """insert into leases (name, owner, until) values ('placing', 'nobody', 1e12)
            on conflict (name) do update set owner = 'nobody', until = 1e12"""
    )


def owner_of(fleet: Fleet, model: str) -> str:
    """The frontend that steers the load of a model."""
    query = """select owner from leases join operations on leases.name = 'load:' || operations.id
        where operations.name = %s and is_steered"""
    found = fleet.rows(query, model)
    return str(found[0][0]) if found else ""


def is_waited_for(fleet: Fleet, model: str) -> bool:
    metrics = fleet.second.client.request_bytes("GET", "/metrics").decode()
    return f'enginehouse_model_waiting{{model="{model}"}} 1.0' in metrics
