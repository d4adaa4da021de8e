"""The bus misbehaves: it dies, is full of nonsense, or floods somebody."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.guests import row_of
from tests.fleet.speaker import speaking
from tests.fleet.tap import tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by

from enginehouse.core import subjects
from enginehouse.host.log_limit import PLACE_BYTES

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
NONSENSE = 10_000 if IS_PROOF else 2_000
RESTARTS = 10 if IS_PROOF else 3
BURST = 10_000
FLOOD = 20_000
QUESTIONS = 100
# Without an answer by their nature. Any message at all on `stop` is a valid order to leave, so it is not among these.
SILENT = (subjects.STOP, subjects.CANCEL)
ANSWERING = tuple(verb for verb in subjects.WORKER_SUBJECTS if verb not in (*SILENT, subjects.STOP_NODE))
# Questions: whatever is in them, they are answered.
ASKING = (subjects.LIST, subjects.RUNNING)
GROWTH_BYTES = 40 * MEGABYTE  # what allocators and one batch of messages of a megabyte may keep
HUGE = 900_000  # just below what the bus takes in one message


# Nonsense ----------------------------------------------------------------------------------------


def nonsense(chance: random.Random, number: int) -> bytes:
    """No command of ours, of many kinds; never an object that could be one."""
    kinds: tuple[Callable[[], bytes], ...] = (
        lambda: chance.randbytes(chance.randrange(1, 200)),
        lambda: b'{"backend": "x", "command": {"intent": "' + chance.randbytes(5).hex().encode(),
        lambda: b"[" * 20_000,
        lambda: b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        lambda: msgspec.json.encode([{"backend": "x"}] * 3),
        lambda: b'{"backend": %d, "model": [], "model_name": {}, "intent": 7}' % number,
        lambda: b'{"backend": "x", "command": "y", "model": 1, "model_name": 1, "intent": {}}',
        lambda: b'{"backend": "\xff\xfe", "model": "\xff", "model_name": "\xff", "intent": "\xff"}',
        lambda: b'{"backend": "../../etc", "model": 1, "model_name": "../..", "intent": 1}',
        lambda: b"1e999" if number % 2 else b"null garbage",
    )
    if number % 199 == 0:
        return b'{"backend": ["' + b"x" * HUGE + b'"], "model": 1, "model_name": 1, "intent": 1}'
    return kinds[number % len(kinds)]()


def picture(fleet: Fleet, name: str) -> Any:
    """What nonsense must not change."""
    places = {
        worker: sorted((path.name, path.stat().st_ino) for path in fleet.backends_of(worker).iterdir())
        for worker in fleet.workers
    }
    operations = fleet.rows("select id, state, attempt, fence, outcome::text from intents order by id")
    nodes = [(one["name"], one["status"], one["approved"]) for one in fleet.nodes()]
    began = {worker: fleet.began(worker, f"install {name}") for worker in fleet.workers}
    processes = (*fleet.frontends, *fleet.workers.values())
    return places, operations, nodes, began, [(one.pid, one.is_alive) for one in processes]


def memory(fleet: Fleet) -> dict[str, int]:
    processes = (*fleet.frontends, *fleet.workers.values())
    return {one.name: psutil.Process(one.pid).memory_info().rss for one in processes}


def test_nonsense_on_every_subject_changes_nothing(fleet: Fleet, warehouse: Warehouse, name: str) -> None:
    """F-095."""
    node_id = fleet.node("worker-1")["id"]
    with tapped(fleet, warehouse) as tap, speaking(fleet, warehouse) as speaker:
        warehouse.publish(name, "one")
        fleet.done("install", name, ["worker-1"])
        tap.settle()
        recorded = [one for one in tap.heard if f"nodes.{node_id}." in one.subject and one.payload]
        commands = [one for one in recorded if one.subject.endswith(subjects.INSTALL)]
        assert len(commands) == 1
        replies = [commands[0].reply]
        before, size = picture(fleet, name), memory(fleet)
        chance = random.Random(95)
        targets = [subjects.node_subject(node_id, verb) for verb in (*ANSWERING, *SILENT)]
        targets += [subjects.progress_subject(node_id, str(uuid.uuid4())), *replies]
        targets += [f"{subjects.INBOX}.x", f"{subjects.INBOX}.{node_id}.{uuid.uuid4()}.{'9' * 500}"]
        targets += [f"{subjects.POLLS}.{node_id}.y.z.1"]
        messages: list[tuple[str, bytes, bool]] = []
        awaited = 0
        for number in range(NONSENSE):
            subject = targets[number % len(targets)]
            asks = subject.startswith("nodes.") and subject.removeprefix(f"nodes.{node_id}.") in ANSWERING
            awaited += asks
            # Every subject gets every kind.
            messages.append((subject, nonsense(chance, number // len(targets) + number), asks))
        # And what was really said once, again: the command, its answer and its progress.
        for one in recorded[:50]:
            messages.append((one.subject, one.payload, one.subject.endswith(subjects.INSTALL)))
            awaited += one.subject.endswith(subjects.INSTALL)
        warehouse.run(speaker.said(messages))
        wait_for("an answer to every question", lambda: len(speaker.answers) >= awaited)
        errors = [msgspec.json.decode(answer) for answer in speaker.answers]
        assert len([one for one in errors if one.get("error")]) >= awaited * (len(ANSWERING) - len(ASKING) - 1) // len(
            ANSWERING
        )
        assert msgspec.json.decode(speaker.ask(subjects.node_subject(node_id, subjects.LIST)))["backends"]
    fleet.until_ready()
    fleet.until_healthy()
    assert picture(fleet, name) == before
    grown = {who: after - size[who] for who, after in memory(fleet).items() if after - size[who] > GROWTH_BYTES}
    assert not grown, grown
    assert "worker.dropped" in fleet.log_of("worker-1"), "what has no answer is dropped, and counted"
    for frontend in fleet.frontends:
        log = fleet.log_of(frontend.name)
        assert "reply.dropped" in log
        assert "progress.dropped" in log
    for process in (*fleet.frontends, *fleet.workers.values()):
        assert "bus.receiver_failed" not in fleet.log_of(process.name)
    fleet.done("delete", name, ["worker-1"])


def has_dropped(log: Path) -> bool:
    return "progress.dropped" in log.read_text()


def test_a_flood_of_nonsense_leaves_the_log_of_a_frontend_short(fleet: Fleet, warehouse: Warehouse) -> None:
    node_id = fleet.node("worker-1")["id"]
    before = {frontend.name: frontend.log.stat().st_size for frontend in fleet.frontends}
    with speaking(fleet, warehouse) as speaker:
        flood = []
        for number in range(FLOOD):
            forged = b'{"intent": "\n2026-01-01 ERROR forged' + b"x" * 3000
            flood.append((subjects.progress_subject(node_id, f"{number}"), forged, False))
            flood.append((f"{subjects.INBOX}.{number}", b"nonsense", False))
            flood.append((f"{subjects.POLLS}.x.y.z.{number}", b"nonsense", False))
        warehouse.run(speaker.said(flood))
        for frontend in fleet.frontends:
            wait_for("the flood to have arrived", partial(has_dropped, frontend.log))
    fleet.until_ready()
    fleet.until_healthy()
    for frontend in fleet.frontends:
        # A budget for each of three places, and what is filled up meanwhile.
        grown = frontend.log.stat().st_size - before[frontend.name]
        assert grown < 4 * PLACE_BYTES, f"{grown} bytes for {3 * FLOOD} messages"


def test_a_burst_on_one_subject_of_a_worker_delays_no_other(fleet: Fleet, warehouse: Warehouse) -> None:
    """F-096."""
    first, second = (fleet.node(worker)["id"] for worker in ("worker-1", "worker-2"))
    asked = [(first, subjects.RUNNING), (second, subjects.LIST), (second, subjects.RUNNING)]
    with speaking(fleet, warehouse) as flooding, speaking(fleet, warehouse) as speaker:
        flood = [(subjects.node_subject(first, subjects.INSTALL), b'{"backend": 1}', True)] * BURST
        sent = warehouse.begin(flooding.said(flood))
        lateness: list[float] = []
        for number in range(QUESTIONS):
            node_id, verb = asked[number % len(asked)]
            began = time.monotonic()
            assert speaker.ask(subjects.node_subject(node_id, verb)), f"no answer on {verb}"
            lateness.append(time.monotonic() - began)
        sent.result(30)
        assert sorted(lateness)[int(QUESTIONS * 0.99) - 1] <= 1.0, sorted(lateness)[-5:]

        def accounted() -> bool:
            log = fleet.log_of("worker-1")
            return len(flooding.answers) == BURST or "bus.dropped" in log or "worker.dropped verb=backend.inst" in log

        wait_for("every one to be answered, or drops to be told", accounted)
    fleet.until_healthy()
    assert fleet.workers["worker-1"].is_alive


# Restarts ----------------------------------------------------------------------------------------


def is_downloading(fleet: Fleet, operation_id: str) -> bool:
    return bool(row_of(fleet.first.operation(operation_id), "worker-1")["status"] == "downloading")


def test_a_bus_that_is_killed_again_and_again_loses_no_request(
    fleet: Fleet, warehouse: Warehouse, names: Callable[[int], list[str]]
) -> None:
    """F-092."""
    ids = {worker: fleet.node(worker)["id"] for worker in fleet.workers}
    requested = names(RESTARTS)
    for name in requested:
        warehouse.publish(name, "one", megabytes=1)
    warehouse.proxy.bytes_per_second = 0.8 * MEGABYTE
    operations = []
    for number, name in enumerate(requested):
        # One is on its way, one has not been sent when the bus is gone.
        operations.append(fleet.request("install", name, ["worker-1", "worker-2"]))
        if number % 2:
            wait_for("it to be under way", partial(is_downloading, fleet, operations[-1]["jobID"]))
        fleet.nats.kill()
        operations.append(fleet.request("install", name, ["worker-3", "worker-4", "worker-5"], frontend=fleet.second))
        fleet.nats.start()
        began = time.monotonic()
        with speaking(fleet, warehouse) as speaker:
            for frontend in fleet.frontends:
                wait_for("the frontend to be back on the bus", frontend.is_ready, 5)
            for node_id in ids.values():
                question = subjects.node_subject(node_id, subjects.RUNNING)
                wait_for("the worker to listen again", partial(speaker.ask, question, b"{}", 1.0), 5)
        assert time.monotonic() - began <= 5.0
    for operation in operations:
        ended = fleet.ended(operation)
        assert ended["status"] == "succeeded", ended
    for name in requested:
        for worker in fleet.workers:
            assert said_by(fleet.backends_of(worker) / name) == "one"
            assert fleet.began(worker, f"install {name}") == 1
