"""Engines that serve while something is done to them or to frontends: deletes, drains, restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, Stream, ask, asking, ports, processes_of
from tests.fleet.guests import row_of
from tests.fleet.proxies import balanced
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by

from enginehouse.link.client import FrontendClient

GRACE_SECONDS = 2.0  # of the workers of this fleet
STREAMS = 10
PIECES = 40


def outcome_of(fleet: Fleet, operation: dict[str, Any]) -> dict[str, Any]:
    query = """select outcome from intents join operation_intents on intent_id = intents.id
        where operation_id = %s"""
    ((found,),) = fleet.rows(query, operation["jobID"])
    decoded: dict[str, Any] = msgspec.json.decode(found)
    return decoded


class Witness:
    """Looks all the time whether processes live and a directory is there."""

    def __init__(self, directory: Path, pids: list[int]) -> None:
        self.seen: list[tuple[bool, bool]] = []  # whether any process lives, whether the directory is there
        self._directory = directory
        self._inode = directory.stat().st_ino
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Witness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)

    def _look(self) -> None:
        while not self._over.wait(0.002):
            # The directory first: a process that ends between the two looks must not count as one that outlived it.
            is_there = self._is_there()
            self.seen.append((any(lives(pid) for pid in self._pids), is_there))

    def _is_there(self) -> bool:
        try:
            return self._directory.stat().st_ino == self._inode
        except FileNotFoundError:
            return False


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_delete_stops_what_serves_before_it_removes_and_no_request_hangs(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-024."""
    serving.offer(name, "one")
    for model in ("first-speaker", "second-speaker"):
        serving.add_model(model, name)
        serving.load(model, "worker-2")
    pids = [process.pid for process in processes_of(fleet, "worker-2")]
    assert len(pids) == 2
    models = ("first-speaker", "second-speaker")
    with (
        asking(ports(fleet), serving.token, *models) as load,
        Witness(fleet.backends_of("worker-2") / name, pids) as witness,
    ):
        operation = fleet.request("delete", name, ["worker-2"], frontend=fleet.second)
        assert fleet.ended(operation)["status"] == "succeeded"
        wait_for("the old processes and their files to be gone", lambda: witness.seen[-1] == (False, False))
        before = len(load.answers)
        load.until_more()
    assert (True, False) not in witness.seen, "the files went before the processes"
    assert sorted(outcome_of(fleet, operation)["stopped"]) == ["first-speaker#0", "second-speaker#0"]
    assert load.slowest < 20.0, "somebody waited for what is gone"
    # What was being answered when its process was stopped fails with a word; nobody is told less.
    assert {status for status, _ in load.failures} <= {502, 503}, load.failures
    late = [said for status, said in load.answers[before:] if status == 200]
    assert not [said for said in late if int(said.removeprefix("one ")) in pids]


def test_an_engine_that_does_not_listen_is_killed_with_all_it_started(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-025. What even a kill does not end is in tests/worker/engines/test_survivors.py: no process can be made so."""
    serving.offer(name, "deaf", is_stubborn=True)
    serving.add_model("deaf-speaker", name)
    serving.load("deaf-speaker", "worker-3")
    pids = [process.pid for process in processes_of(fleet, "worker-3")]
    assert len(pids) == 2
    stream = Stream(fleet.first.port, serving.token, "deaf-speaker", 600)
    stream.start()
    wait_for("an answer to be under way", lambda: stream.pieces)
    began = time.monotonic()
    operation = fleet.request("delete", name, ["worker-3"])
    wait_for("all of it to be dead", lambda: not any(lives(pid) for pid in pids), 3 * GRACE_SECONDS)
    assert GRACE_SECONDS * 0.9 < time.monotonic() - began < 2 * GRACE_SECONDS + 1.0, "asked first, then killed"
    assert fleet.ended(operation)["status"] == "succeeded"
    assert outcome_of(fleet, operation)["stopped"] == ["deaf-speaker#0"]
    assert not (fleet.backends_of("worker-3") / name).exists()
    stream.join()
    assert not stream.is_whole, "a broken answer does not look complete"


def test_a_drain_lets_streams_finish_and_keeps_requests_for_later(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str, other: str
) -> None:
    """F-029."""
    serving.offer(name, "one")
    warehouse.publish(other, "later")
    serving.add_model("speaker", name)
    serving.load("speaker", "worker-4")
    (drained,) = [process.pid for process in processes_of(fleet, "worker-4")]
    streams = [Stream(fleet.frontends[number % 2].port, serving.token, "speaker", PIECES) for number in range(STREAMS)]
    for stream in streams:
        stream.start()
    wait_for("all streams to be under way", lambda: all(stream.pieces for stream in streams))
    serving.load("speaker", "worker-5")
    (staying,) = [process.pid for process in processes_of(fleet, "worker-5")]
    drain = fleet.first.post("/api/nodes/worker-4/drain")
    queued = [fleet.request("install", other, ["worker-4"]), fleet.request("delete", name, ["worker-4"])]
    # The other frontend is told by the bus of nobody: it looks, within a second.
    wait_for("both to send nobody there", lambda: is_left_alone(fleet, serving, staying))
    with asking(ports(fleet), serving.token, "speaker") as load:
        for operation in queued:
            shown = fleet.second.operation(operation["jobID"])
            assert shown["status"] in ("queued", "running"), shown
            assert row_of(shown, "worker-4")["reason"] == "draining", shown
        for stream in streams:
            stream.join()
    assert load.failures == []
    assert {said for _, said in load.answers} == {f"one {staying}"}
    for stream in streams:
        assert stream.is_whole
        assert stream.pieces == [f"one {drained}"] * PIECES
    ended = fleet.ended(drain)
    assert ended["status"] == "succeeded", ended
    wait_for("its engine to be gone", lambda: not lives(drained))
    for operation in queued:
        assert fleet.first.operation(operation["jobID"])["status"] in ("queued", "running")
    fleet.first.post("/api/nodes/worker-4/resume")
    for operation in queued:
        assert fleet.ended(operation)["status"] == "succeeded"
    assert said_by(fleet.backends_of("worker-4") / other) == "later"
    assert not (fleet.backends_of("worker-4") / name).exists()


def is_left_alone(fleet: Fleet, serving: Serving, staying: int) -> bool:
    """By more requests at once than there are streams: the one with fewer under way is asked first."""
    every = ports(fleet) * 2 * STREAMS
    with ThreadPoolExecutor(len(every)) as pool:
        said = set(pool.map(lambda port: ask(port, serving.token, "speaker"), every))
    return said == {(200, f"one {staying}")}


def through(fleet: Fleet, url: str) -> FrontendClient:
    return FrontendClient(url, fleet.tokens["admin"], user_agent="tests")


def test_frontends_restart_one_after_the_other_and_nobody_notices(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, names: Callable[[int], list[str]]
) -> None:
    """F-118. With the engine and the model that come with the package."""
    requested = names(4)
    for name in requested:
        warehouse.publish(name, "one", megabytes=0.5)
    serving.load("tiny-chat", "worker-1")
    warehouse.proxy.bytes_per_second = MEGABYTE
    operations: list[dict[str, Any]] = []
    with balanced(warehouse, ports(fleet)) as balancer:
        wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
        port = int(balancer.url.rpartition(":")[2])
        with asking([port], serving.token, "tiny-chat") as load, closing(through(fleet, balancer.url)) as client:
            for number, frontend in enumerate(fleet.frontends):
                for name in requested[number * 2 : number * 2 + 2]:
                    for worker in fleet.workers:
                        body = {"kind": "install", "name": name, "nodes": [worker]}
                        operations.append(client.request("POST", "/api/operations", body, dict[str, Any]))
                assert frontend.stop() == 0, "it ends in order"
                wait_for("the balancer to notice", lambda: len(balancer.ready) == 1)
                frontend.start()
                wait_for("it to be ready again", frontend.is_ready)
                wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
                load.until_more()
    assert load.failures == []
    assert len({operation["jobID"] for operation in operations}) == 20
    for operation in operations:
        ended = fleet.ended(operation)
        assert ended["status"] == "succeeded", ended
    for name in requested:
        for worker in fleet.workers:
            assert fleet.began(worker, f"install {name}") == 1


def reported(fleet: Fleet, worker: str, model: str) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = fleet.node(worker)["replicas"]
    return next((one for one in found if one["model_id"] == model), None)


def test_a_frontend_that_wakes_with_an_old_route_is_answered_by_no_other_model(
    fleet: Fleet, serving: Serving, name: str, other: str
) -> None:
    """The engines of this test answer whoever asks, with whatever key."""
    for model, backend, says in (("old-speaker", name, "old"), ("new-speaker", other, "new")):
        serving.offer(backend, says)
        serving.add_model(model, backend)
    serving.load("old-speaker", "worker-1")
    replica = wait_for("the old one in a report", partial(reported, fleet, "worker-1", "old-speaker"))
    assert replica["checks_key"] is False
    fleet.second.pause()
    try:
        fleet.workers["worker-1"].kill()
        fleet.workers["worker-1"].again()
        fleet.until_healthy("worker-1")
        loaded = fleet.first.post("/api/models/new-speaker/load", {"node": "worker-1"})
        assert fleet.ended(loaded)["status"] == "succeeded"
        started = wait_for("the new one in a report", partial(reported, fleet, "worker-1", "new-speaker"))
    finally:
        fleet.second.resume()
    answers = [ask(fleet.second.port, serving.token, "old-speaker") for _ in range(5)]
    assert not [said for status, said in answers if status == 200 and not said.startswith("old ")], answers
    assert started["address"] != replica["address"]
