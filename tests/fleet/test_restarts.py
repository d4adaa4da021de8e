"""An engine that ends in a fleet: it comes back without anybody asking, on the same node, and answers through every
frontend. Engines of both protocols.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import psutil
import pytest
from tests.e2e.conftest import wait_for
from tests.engine.localai.stub_backend import in_one_file
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask, ports, processes_of, program
from tests.fleet.test_localai_engines import add_model
from tests.fleet.warehouse import Warehouse


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_an_engine_that_ends_comes_back_without_a_request(
    fleet: Fleet, warehouse: Warehouse, serving: Serving, name: str, kind: str
) -> None:
    warehouse.publish(name, "", run=program("one") if kind == "http" else in_one_file())
    model = f"back-{kind}"
    add_model(fleet, serving, model, name)
    started = "select nonce from replicas where model = %s"
    ((before,),) = fleet.rows(started, model)
    loads = "select count(*) from operations where kind = 'load' and name = %s"
    asked = fleet.rows(loads, model)
    (engine,) = processes_of(fleet, "worker-1")
    os.kill(engine.pid, signal.SIGKILL)

    def is_back() -> bool:
        found = fleet.rows(started, model)
        return bool(found) and found != [(before,)]

    wait_for("the replica to have a new process", is_back, 20)
    assert not psutil.pid_exists(engine.pid)
    for port in ports(fleet):
        wait_for("an answer", partial(_answers, port, serving.token, model))
    assert fleet.rows(loads, model) == asked, "nobody had to load it again"
    assert "engine.restarts" in fleet.log_of("worker-1")


def _answers(port: int, token: str, model: str) -> bool:
    return ask(port, token, model)[0] == 200
