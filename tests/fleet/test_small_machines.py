"""More models than five small machines can hold: loads are bounded, heartbeats go on, nothing comes and goes, and every
request is answered or told when to come back.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import PROGRAM, Fleet
from tests.fleet.cold import ColdAnswer, ask_at_once, ask_cold, begun, only_on
from tests.fleet.engines import Serving, ports, program
from tests.fleet.warehouse import Warehouse

from enginehouse.core.placement import LOADS_PER_NODE

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
MEBIBYTE = 1024 * 1024
MACHINE_BYTES = 290 * MEBIBYTE
# Python itself holds some more. Three of these fit on a machine beside each other, so that it is not memory alone that
# bounds its loads; and one of the others.
THIRD_BYTES, THIRD = 60 * MEBIBYTE, "90 MiB"
WHOLE_BYTES, WHOLE = 170 * MEBIBYTE, "200 MiB"
STORMING = 18 if IS_PROOF else 12  # models: three more than there is room for
DRAINED = () if IS_PROOF else ("worker-4", "worker-5")  # an engine takes half a second of a core to start
FEW_STARTS = 2
RETURNS = 40 if IS_PROOF else 3  # starts of the two models of F-075
# Two seconds after its start the reports of its node show it.
LONG_IDLE = """update replicas set used_at = 0, created_at = 1
    where model = any(%s) and created_at < extract(epoch from clock_timestamp()) - 2"""
LOOK_SECONDS = 0.1


@pytest.fixture(scope="module")
def small(running_fleet: Fleet) -> Iterator[Fleet]:
    """The fleet on machines with little memory, until the tests of this file are over."""
    restart_all(running_fleet, (sys.executable, "-m", "tests.fleet.small_worker"))
    yield running_fleet
    restart_all(running_fleet, (PROGRAM,))


def restart_all(fleet: Fleet, worker: tuple[str, ...]) -> None:
    for process in fleet.workers.values():
        process.program = worker
        process.again(SMALL_MEMORY_BYTES=str(MACHINE_BYTES))
    is_small = worker != (PROGRAM,)

    def all_are() -> bool:
        return all((node["total_ram"] == MACHINE_BYTES) is is_small for node in fleet.nodes())

    wait_for("the machines to have their size", all_are)
    fleet.until_healthy()


class Looks:
    """Looks all the time how many loads each node has, and whether it is healthy."""

    def __init__(self, fleet: Fleet) -> None:
        self.most_loads = 0
        self.unhealthy: set[str] = set()
        self.count = 0
        self._fleet = fleet
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _look(self) -> None:
        loads = "select count(*) from reservations where settled_at = 0 group by node_id"
        sick = "select name from nodes where health <> 'healthy'"
        with psycopg.connect(self._fleet.database_url, autocommit=True) as connection:
            while not self._over.wait(LOOK_SECONDS):
                found = [number for (number,) in connection.execute(loads)]
                self.most_loads = max([self.most_loads, *found])
                self.unhealthy |= {name for (name,) in connection.execute(sick)}
                self.count += 1


def replicas_of(fleet: Fleet, models: list[str]) -> set[tuple[str, str]]:
    """Their processes: (model, nonce)."""
    return set(fleet.rows("select model, nonce from replicas where model = any(%s)", models))


def test_more_cold_models_at_once_than_there_is_room_for_are_loaded_in_turn_or_refused(
    small: Fleet, fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """G16 and G20."""
    warehouse.publish(name, "third", run=program("third", first=f"held = bytearray(b'x') * {THIRD_BYTES}"))
    models = [f"storm-{number:02d}" for number in range(STORMING)]
    for model in models:
        serving.add_model(model, name, memory=THIRD)
    for worker in DRAINED:
        fleet.ended(fleet.first.post(f"/api/nodes/{worker}/drain"))
    asked = [(port, model) for port in ports(fleet) for model in models]
    with Looks(fleet) as looks:
        answers = ask_at_once(serving.token, asked)
        standing = replicas_of(fleet, models)
        later = time.monotonic() + 2.0
        wait_for("some passes of the reconciler", lambda: time.monotonic() > later)
    assert {answer.status for answer in answers} <= {200, 503}, answers
    assert all(1 <= float(answer.retry_after) <= 300 for answer in answers if answer.status == 503)
    served = {answer.model for answer in answers if answer.status == 200}
    assert len(served) >= STORMING - 3, "what fits is loaded"
    assert 1 < looks.most_loads <= LOADS_PER_NODE
    assert looks.unhealthy == set()
    assert looks.count > 20
    starts = {model: begun(fleet, f"start {model}") for model in models}
    assert max(starts.values()) <= FEW_STARTS, starts
    assert replicas_of(fleet, models) == standing, "nothing comes and goes"


def test_two_models_that_take_turns_on_a_machine_with_room_for_one_are_served_or_refused_for_a_moment(
    small: Fleet, fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-075. Every replica counts as idle soon after its start, whatever it does, so that some are evicted between
    selection and use.
    """
    # Answers take so long that most evictions meet some.
    run = program("whole", first=f"held = bytearray(b'x') * {WHOLE_BYTES}", answer_seconds=0.4)
    warehouse.publish(name, "whole", run=run)
    models = ["turn-one", "turn-two"]
    for model in models:
        serving.add_model(model, name, memory=WHOLE)
    over = threading.Event()

    def go_on(number: int) -> list[ColdAnswer]:
        """Ask for the two in turn, from another one and another frontend each."""
        answers: list[ColdAnswer] = []
        while not over.is_set():
            turn = len(answers) + number
            answers.append(ask_cold(ports(fleet)[turn // 2 % 2], serving.token, models[turn % 2]))
        return answers

    def has_returned() -> bool:
        fleet.rows(LONG_IDLE, models)
        return sum(begun(fleet, f"start {model}") for model in models) >= RETURNS

    with (
        only_on(fleet, models[0], "worker-1"),
        only_on(fleet, models[1], "worker-1"),
        ThreadPoolExecutor(4) as pool,
    ):
        asking = pool.map(go_on, range(4))
        try:
            wait_for("one to be evicted for the other and loaded again", has_returned, 20.0 * RETURNS)
        finally:
            over.set()
        answers = [answer for some in asking for answer in some]
    assert {answer.status for answer in answers} <= {200, 503}, {(one.status, one.message) for one in answers}
    assert all(answer.retry_after for answer in answers if answer.status == 503)
    for model in models:
        assert [answer for answer in answers if (answer.model, answer.status) == (model, 200)]
