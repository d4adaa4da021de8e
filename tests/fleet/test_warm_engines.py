"""Warm requests under misfortune, for engines of both protocols: beside installs and loads, with clients that leave or
read slowly, and across restarts of frontends.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import psutil
import pytest
from tests.e2e.conftest import wait_for
from tests.engine.localai.stub_backend import in_one_file
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask, asking, ports, processes_of, program
from tests.fleet.proxies import balanced
from tests.fleet.test_localai_engines import add_model
from tests.fleet.warehouse import MEGABYTE, Warehouse

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
LEAVING = 10_000 if IS_PROOF else 200  # clients of F-061
SLOW = 100 if IS_PROOF else 30  # clients of F-063
MEBIBYTE = 1024 * 1024
# The row says 50 ms. Here nodes, frontends, registry and clients share two cores with the installs themselves.
ADDED_SECONDS = 0.25
KINDS = pytest.mark.parametrize("kind", ["http", "grpc"])


def offer(fleet: Fleet, warehouse: Warehouse, serving: Serving, kind: str, *names: str, pause: float = 0.01) -> str:
    """A model on worker-1 whose streams have no end; returns its name."""
    (backend,) = names
    run = program("one", piece_seconds=pause) if kind == "http" else in_one_file()
    warehouse.publish(backend, "", run=run)
    add_model(fleet, serving, model := f"warm-{backend}", backend, "tokens:100000000", f"token_seconds:{pause}")
    return model


@contextmanager
def streaming(port: int, token: str, model: str, *, buffer_bytes: int = 0) -> Iterator[socket.socket]:
    """A connection on which a stream without an end has begun."""
    body = json.dumps(
        {"model": model, "stream": True, "max_tokens": 100_000_000, "messages": [{"role": "user", "content": "Go on"}]}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n"
    with socket.socket() as client:
        if buffer_bytes:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        client.settimeout(30)
        client.connect(("127.0.0.1", port))
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert client.recv(1) == b"H"
        yield client


@KINDS
def test_warm_requests_do_not_wait_for_installs_upgrades_and_loads_on_their_node(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, names: Callable[[int], list[str]], kind: str
) -> None:
    """F-058."""
    engine, sibling, cold, *installed = names(6)
    model = offer(fleet, warehouse, serving, kind, engine)
    for one in (sibling, cold, *installed):
        warehouse.publish(one, "old", megabytes=2, run=program("cold") if one == cold else b"")
    fleet.done("install", sibling, ["worker-1"])
    warehouse.publish(sibling, "new", megabytes=4)
    serving.add_model(f"cold-{kind}", cold)
    with asking(ports(fleet), serving.token, model) as load:
        load.until_more(100)
        quiet = load.percentile(0.99)
        since = len(load.seconds)
        warehouse.proxy.bytes_per_second = 2 * MEGABYTE
        begun = [fleet.request("install", one, ["worker-1"]) for one in installed]
        begun += [fleet.request("upgrade", sibling, ["worker-1"])]
        begun += [fleet.first.post(f"/api/models/cold-{kind}/load", {"node": "worker-1"})]
        for operation in begun:
            assert fleet.ended(operation)["status"] == "succeeded"
        load.until_more(20)
    assert load.failures == []
    assert load.percentile(0.99, since) < quiet + ADDED_SECONDS


@KINDS
def test_clients_that_leave_in_the_middle_leave_nothing_behind(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str, kind: str
) -> None:
    """F-061."""
    model = offer(fleet, warehouse, serving, kind, name)
    frontend = psutil.Process(fleet.first.pid)
    (engine,) = processes_of(fleet, "worker-1")
    before, threads = frontend.num_fds(), engine.num_threads()
    for _ in range(LEAVING // 20):
        with ExitStack() as open_ones:
            for _ in range(20):
                open_ones.enter_context(streaming(fleet.first.port, serving.token, model))
    wait_for("the descriptors of the frontend to be as before", lambda: frontend.num_fds() <= before + 5, 10)
    if kind == "http":
        # A thread per connection: those of calls that were cancelled have ended.
        wait_for("the engine to have nothing to do", lambda: engine.num_threads() <= threads + 5, 10)
    assert ask(fleet.first.port, serving.token, model, 60)[0] == 200


@KINDS
def test_clients_that_hardly_read_fill_no_memory_and_hold_up_nobody(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str, kind: str
) -> None:
    """F-063."""
    model = offer(fleet, warehouse, serving, kind, name, pause=0.0)
    frontend = psutil.Process(fleet.first.pid)
    over = threading.Event()
    with ExitStack() as clients:
        slow = [
            clients.enter_context(streaming(fleet.first.port, serving.token, model, buffer_bytes=4096))
            for _ in range(SLOW)
        ]
        before = frontend.memory_info().rss

        def read_slowly() -> None:
            while not over.wait(1.0):
                for one in slow:
                    with suppress(OSError):
                        one.recv(1)

        reading = threading.Thread(target=read_slowly)
        reading.start()
        try:
            # Each could have sent hundreds of megabytes in that time.
            other = f"other-{kind}"
            serving.add_model(other, name)
            serving.load(other, "worker-2")
            with asking([fleet.first.port], serving.token, other, clients=4) as load:
                load.until_more(60)
            assert load.failures == []
            assert load.slowest < 10.0
            assert frontend.memory_info().rss - before < SLOW * MEBIBYTE
        finally:
            over.set()
            reading.join(10)


@KINDS
def test_a_frontend_that_starts_knows_its_replicas_before_it_answers(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str, kind: str
) -> None:
    """F-065 and F-066."""
    model = offer(fleet, warehouse, serving, kind, name)
    loads = fleet.rows("select count(*) from operations where kind = 'load' and name = %s", model)
    with balanced(warehouse, ports(fleet)) as balancer:
        wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
        with asking([int(balancer.url.rpartition(":")[2])], serving.token, model) as load:
            for frontend in fleet.frontends:
                assert frontend.stop() == 0
                wait_for("the balancer to notice", lambda: len(balancer.ready) == 1)
                frontend.start()
                seen: list[tuple[int, str]] = []
                wait_for("it to answer", partial(_asked, frontend.port, serving.token, model, seen), 30)
                assert {status for status, _ in seen} <= {0, 200, 503}, seen
                wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
                load.until_more(20)
    assert load.failures == []
    assert fleet.rows("select count(*) from operations where kind = 'load' and name = %s", model) == loads


def _asked(port: int, token: str, model: str, seen: list[tuple[int, str]]) -> bool:
    with suppress(KeyError, http.client.HTTPException):
        seen.append(ask(port, token, model))
    return bool(seen) and seen[-1][0] == 200
