"""What a fleet says of its replicas is true: a busy one is alive, a dead one is not loaded, a count ends with its
frontend.
"""

from __future__ import annotations

import os
import signal
import socket
import time

from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.cold import ask_cold, begun, loads_of, nonces_of, only_on
from tests.fleet.engines import PIECE_SECONDS, Serving, Stream, ports, processes_of, program
from tests.fleet.warehouse import Warehouse

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
BUSY_SECONDS = 300.0 if IS_PROOF else 7.0  # of F-049: more than STALE and STALL
STREAMS = 20  # of F-050
HEAL_SECONDS = 60.0


def test_an_engine_that_is_deaf_because_it_is_busy_is_neither_removed_nor_started_again(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str
) -> None:
    """F-049."""
    warehouse.publish(name, "busy", run=program("busy", is_single=True))
    serving.add_model(model := f"busy-{name}", name)
    serving.load(model, "worker-2")
    before = nonces_of(fleet, model)
    pieces = int(BUSY_SECONDS / PIECE_SECONDS)
    stream = Stream(fleet.first.port, serving.token, model, pieces)
    stream.start()
    wait_for("it to be busy", lambda: stream.pieces)
    ((address,),) = fleet.rows("select address from replicas where model = %s", model)
    assert is_deaf(address)

    def is_over() -> bool:
        assert nonces_of(fleet, model) == before
        return stream.is_whole

    wait_for("it to be done", is_over, 2 * BUSY_SECONDS + 10.0)
    stream.join()
    assert len(stream.pieces) == pieces
    assert ask_cold(fleet.second.port, serving.token, model).said == stream.pieces[0]
    assert (loads_of(fleet, model), begun(fleet, f"start {model}")) == (1, 1)


def is_deaf(address: str) -> bool:
    """Whether a health check gets no answer within a second."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 1.0) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        try:
            return not client.recv(1)
        except TimeoutError:
            return True


def test_requests_of_a_killed_frontend_are_forgotten_and_their_replica_can_be_stopped(
    fleet: Fleet, serving: Serving, name: str
) -> None:
    """F-050."""
    serving.offer(name, "one")
    serving.add_model(model := f"counted-{name}", name)
    with only_on(fleet, model, "worker-4", idle_seconds=1.0):
        streams = [Stream(fleet.first.port, serving.token, model, 6000) for _ in range(STREAMS)]
        for stream in streams:
            stream.start()
        wait_for("all to be under way", lambda: all(stream.pieces for stream in streams))
        before = nonces_of(fleet, model)
        # The surviving frontend alone would find it idle by now: nobody asks it.
        under_way = time.monotonic() + 3.0
        wait_for("some passes", lambda: time.monotonic() > under_way)
        assert nonces_of(fleet, model) == before
        assert in_flight(fleet) == [float(STREAMS), 0.0]
        fleet.first.kill()
        killed = time.monotonic()
        for stream in streams:
            stream.join()
            assert not stream.is_whole
        wait_for("it to be stopped", lambda: not nonces_of(fleet, model), HEAL_SECONDS)
        assert time.monotonic() - killed < HEAL_SECONDS
        wait_for("its process to be gone", lambda: not processes_of(fleet, "worker-4"))
        fleet.mend()
        assert in_flight(fleet) == [0.0, 0.0]


def in_flight(fleet: Fleet) -> list[float]:
    """The requests in flight on each frontend, as it says."""
    found = []
    for frontend in fleet.frontends:
        lines = frontend.client.request_bytes("GET", "/metrics").decode().splitlines()
        found += [float(line.split()[-1]) for line in lines if line.startswith("enginehouse_in_flight ")]
    return found


def test_no_frontend_calls_a_model_loaded_whose_last_replica_is_gone(fleet: Fleet, serving: Serving, name: str) -> None:
    """F-052. Its engine takes longer to come back than the frontends may take to notice."""
    serving.offer(name, "one", start_seconds=3.0)
    serving.add_model(model := f"gone-{name}", name)
    serving.load(model, "worker-3")
    assert loaded_at(fleet, model) == [True, True]
    (engine,) = processes_of(fleet, "worker-3")
    os.kill(engine.pid, signal.SIGKILL)
    killed = time.monotonic()
    wait_for("both to see it", lambda: loaded_at(fleet, model) == [False, False], 5.0)
    assert time.monotonic() - killed < 5.0
    wait_for("both to see it again", lambda: loaded_at(fleet, model) == [True, True])
    for port in ports(fleet):
        assert ask_cold(port, serving.token, model).status == 200


def loaded_at(fleet: Fleet, model: str) -> list[bool]:
    """What each frontend says: in its list of models, and by its routes."""
    found = []
    for frontend in fleet.frontends:
        (listed,) = [one for one in frontend.get("/api/models") if one["name"] == model]
        metrics = frontend.client.request_bytes("GET", "/metrics").decode()
        has_route = f'enginehouse_replicas{{model="{model}"' in metrics
        found.append(listed["state"] == "loaded" or bool(listed["replicas"]) or has_route)
    return found
