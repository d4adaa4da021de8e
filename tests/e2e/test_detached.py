"""`up --detach` returns when everything is ready and goes on; `down` stops it in order and says what it stopped."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import OFFLINE, Cluster, wait_for


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    return Cluster(tmp_path)


def started(cluster: Cluster, *more: str) -> tuple[str, ...]:
    nats, base = str(cluster._nats_port()), str(cluster._base_port)
    ports = ("--port", str(cluster.port), "--nats-port", nats, "--base-port", base)
    return ("up", "--detach", "--name", "first", *ports, *more)


def has_ended(pid: int) -> bool:
    """Also if the first process of this machine, which inherits it, has not taken notice yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_it_goes_on_without_its_terminal_and_down_stops_all_of_it(idle: Cluster) -> None:
    done = idle.cli(*started(idle))
    assert f"Enginehouse is up: {idle.url}" in done.stdout
    assert "down` stops it" in done.stdout
    assert idle.node("first")["status"] == "healthy"
    pid = int((idle.data / "lock").read_text())
    parts = psutil.Process(pid).children()
    assert len(parts) == 3
    assert os.getsid(pid) != os.getsid(0)
    assert "starting nats-server" in (idle.data / "logs" / "up.log").read_text()
    # A second one is refused with the reason, and changes nothing.
    refused = idle.cli(*started(idle), code=1)
    assert f"is in use by process {pid}" in refused.stderr
    assert idle.node("first")["status"] == "healthy"
    stopped = idle.cli("down")
    assert stopped.stdout.startswith(f"stopped worker, frontend, nats-server (process {pid}, ran for ")
    assert has_ended(pid)
    assert [one for one in parts if one.is_running()] == []
    assert f"nothing is running in {idle.data}" in idle.cli("down").stdout
    assert json.loads(idle.cli("down", "--json").stdout)["stopped"] == []


def test_a_refusal_is_that_of_the_program_with_its_exit_code(idle: Cluster) -> None:
    assert "a port is a number" in idle.cli("up", "--detach", "--port", "808000", code=2).stderr
    idle.cli(*started(idle))
    other = idle.cli("--data", str(idle.root / "other"), "up", "--detach", "--port", str(idle.port), code=1)
    assert "another program uses this port" in other.stderr
    answer = idle.cli(
        "--data", str(idle.root / "other"), "--json", *started(idle)[:2], "--port", str(idle.port), code=1
    )
    assert json.loads(answer.stdout)["error"]["code"] == "port_in_use"
    idle.cli("down")


def test_a_frozen_one_is_named_and_only_forced_to_end(idle: Cluster) -> None:
    greeting = json.loads(idle.cli("--json", *started(idle)).stdout)
    assert greeting["url"] == idle.url
    pid = int((idle.data / "lock").read_text())
    parts = psutil.Process(pid).children()
    os.kill(pid, signal.SIGSTOP)
    still = idle.cli("down", "--limit", "1s", code=4)
    assert f"cannot stop process {pid} within 1 s" in still.stderr
    assert psutil.pid_exists(pid)
    assert idle.cli("down", "--force").stdout.startswith("killed worker, frontend, nats-server")
    wait_for("the children to end with it", lambda: not any(one.is_running() for one in parts))


def test_down_stops_a_worker_that_joined(idle: Cluster) -> None:
    idle.cli(*started(idle))
    worker = idle.join("second")
    wait_for("the second node", lambda: idle.node("second"))
    stopped = idle.cli("--data", str(idle.root / "second"), "down")
    assert stopped.stdout.startswith(f"stopped worker (process {worker.pid}, ")
    assert worker.end() == 0
    assert idle.node("first")["status"] == "healthy"
    idle.cli("down")
