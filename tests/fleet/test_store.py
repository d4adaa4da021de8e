"""The database misbehaves: it restarts, loses an answer, or has too few connections."""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet, Frontend
from tests.fleet.databases import Server, running_server, socket_directory
from tests.fleet.guests import Clock, until_stocked
from tests.fleet.proxies import cutting_commits
from tests.fleet.warehouse import Warehouse

from enginehouse.core.errors import EnginehouseError, Unavailable

CONNECTIONS = 20
WISHES = 50
WORKERS = ("worker-1", "worker-2")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server(max_connections=CONNECTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, server: Server, stocked: Warehouse) -> Iterator[Fleet]:
    """Two frontends and two workers on a server that tests may stop."""
    made = Fleet(tmp_path_factory.mktemp("small"), server.make_database(), stocked.environment)
    try:
        made.start(frontends=2, workers=2)
        yield made
    finally:
        made.end()


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "somebody waits for ever"


class Asker:
    """Asks for what is to be installed, and again with the same key until it is accepted."""

    def __init__(self, fleet: Fleet, uri: str) -> None:
        self._fleet = fleet
        self._uri = uri
        self._requests: queue.Queue[tuple[int, str, str]] = queue.Queue()
        self.accepted: dict[str, list[str]] = {}
        self.refusals: list[Unavailable] = []
        for number in range(WISHES):
            self._requests.put((number, f"requested-{number // 2}", WORKERS[number % 2]))

    def work(self, _: int) -> None:
        pace = Clock(0.1)
        while True:
            try:
                number, name, worker = self._requests.get_nowait()
            except queue.Empty:
                return
            key = str(uuid.uuid4())
            for attempt in range(300):
                frontend = self._fleet.frontends[(number + attempt) % 2]
                try:
                    made = self._fleet.request("install", name, [worker], frontend=frontend, key=key, uri=self._uri)
                except Unavailable as error:
                    self.refusals.append(error)
                    pace.tick()
                else:
                    self.accepted.setdefault(made["jobID"], []).append(name)
                    break
            pace.tick()


def test_a_database_that_is_pulled_down_under_fifty_requests_costs_only_time(
    small: Fleet, server: Server, warehouse: Warehouse, name: str
) -> None:
    """F-037."""
    warehouse.publish(name, "one")
    asker = Asker(small, warehouse.proxy.reference(f"{name}:latest"))
    pids = [frontend.pid for frontend in small.frontends]
    asking = threading.Thread(target=in_threads, args=(4, asker.work))
    asking.start()
    wait_for("a third of them to be accepted", lambda: len(asker.accepted) >= WISHES // 3)
    server.stop()
    try:
        for frontend in small.frontends:
            with pytest.raises(Unavailable) as refused:
                small.request("install", "refused", ["worker-1"], frontend=frontend, uri="oci://127.0.0.1/none:1")
            assert (refused.value.code, refused.value.retry_after_seconds) == ("store_unavailable", 2.0)
    finally:
        server.start()
    began = time.monotonic()
    small.until_ready()
    small.until_healthy()
    assert time.monotonic() - began < 10.0
    asking.join(60)
    assert len(asker.accepted) == WISHES
    assert {error.code for error in asker.refusals} <= {"store_unavailable"}, asker.refusals
    for operation_id, (requested,) in asker.accepted.items():
        ended = small.ended({"jobID": operation_id, "kind": "install", "name": requested})
        assert ended["status"] == "succeeded", ended
        (row,) = ended["nodes"]
        logs = "".join(small.log_of(frontend.name) for frontend in small.frontends)
        # A claim whose commit nobody heard of is an attempt that was never sent.
        assert logs.count(f"intent.sent intent={row['intent']} ") <= 1, ended
    assert small.rows("select count(*) from operations") == [(WISHES,)]
    for worker in WORKERS:
        assert {small.began(worker, f"install requested-{number}") for number in range(WISHES // 2)} == {1}
    assert [frontend.pid for frontend in small.frontends] == pids
    assert all(frontend.is_alive for frontend in small.frontends)


def test_a_commit_whose_answer_was_lost_is_found_again_under_its_key(
    fleet: Fleet, warehouse: Warehouse, names: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """F-038."""
    real = socket_directory(fleet.database_url)
    url = fleet.database_url.replace(real, str(tmp_path))
    with cutting_commits(warehouse, tmp_path, real) as cutter:
        environment = {"ENGINEHOUSE_DATABASE_URL": url}
        cut_off = fleet.add_frontend("cut-off", environment=environment)
        try:
            until_stocked(cut_off)
            for number, name in enumerate(names(4)):
                warehouse.publish(name, "one")
                key = str(uuid.uuid4())
                cutter.arm(b"INSERT INTO operations")
                with pytest.raises(Unavailable) as lost:
                    fleet.request("install", name, ["worker-1"], frontend=cut_off, key=key)
                assert lost.value.code == "store_unavailable"
                assert cutter.cuts == number + 1
                asked = (fleet.first, cut_off)[number % 2]
                again = fleet.request("install", name, ["worker-1"], frontend=asked, key=key)
                assert fleet.rows("select id from operations where name = %s", name) == [(again["jobID"],)]
                assert fleet.ended(again)["status"] == "succeeded"
                assert fleet.began("worker-1", f"install {name}") == 1
        finally:
            cut_off.stop()
            fleet.frontends.remove(cut_off)
            cut_off.client.close()


def test_a_burst_of_requests_on_a_database_with_few_connections_waits_or_is_told_when_to_come_back(
    small: Fleet, server: Server, warehouse: Warehouse, name: str
) -> None:
    """F-040."""
    warehouse.publish(name, "one")
    uri = warehouse.proxy.reference(f"{name}:latest")
    small.until_ready()
    answers: Counter[str] = Counter()
    gate = threading.Barrier(200)

    def ask(number: int) -> None:
        frontend = small.frontends[number % 2]
        gate.wait(30)
        try:
            if number % 4 < 2:
                frontend.get("/api/operations?limit=20")
            else:
                small.request("install", f"burst-{number % 8}", ["worker-1"], frontend=frontend, uri=uri)
            answers["done"] += 1
        except Unavailable as error:
            answers["told when to come back" if error.retry_after_seconds else str(error)] += 1

    # Somebody else has taken all connections but two, so that the pools of the frontends cannot grow.
    others: list[psycopg.Connection] = []
    with suppress(psycopg.OperationalError):
        others.extend(psycopg.connect(small.database_url) for _ in range(CONNECTIONS))
    for other in others[:2]:
        other.close()
    try:
        in_threads(200, ask)
    finally:
        for other in others:
            other.close()
    assert answers.total() == 200, answers
    assert set(answers) <= {"done", "told when to come back"}, answers
    assert answers["done"] > 0
    ended = time.monotonic()
    for frontend in small.frontends:
        wait_for("a prompt answer", partial(is_prompt, frontend), 5)
    assert time.monotonic() - ended < 5.0
    small.until_ready()
    small.done("install", f"after-{name}", ["worker-2"], uri=uri)


def is_prompt(frontend: Frontend) -> bool:
    began = time.monotonic()
    try:
        frontend.get("/api/operations?limit=20")
    except EnginehouseError:
        return False
    return time.monotonic() - began < 1.0 and frontend.is_ready()
