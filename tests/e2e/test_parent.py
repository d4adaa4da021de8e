"""What the surroundings of a cluster do to it: terminals that close, variables of other programs, a second Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import FAST, OFFLINE, PROGRAM, Cluster, wait_for
from tests.ports import free_port

FOREIGN = "a-token-of-another-program-on-this-machine"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster that is not up yet."""
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("place", ["the environment", "the settings file"])
def test_tokens_that_this_machine_was_given_for_other_programs_do_not_keep_a_house_from_starting(
    own: Cluster, place: str
) -> None:
    variables = dict.fromkeys(("ENGINEHOUSE_ADMIN_TOKEN", "LOCALAI_REGISTRATION_TOKEN"), FOREIGN)
    if place == "the settings file":
        variables = {}
        own.data.mkdir()
        (own.data / "enginehouse.toml").write_text(f'admin_token = "{FOREIGN}"\njoin_token = "{FOREIGN}"\n')
    own.up(environment=variables)
    assert own.node("first")["status"] == "healthy"


def test_the_credentials_of_registries_are_for_the_frontend_too(own: Cluster, tmp_path: Path) -> None:
    """It asks registries which version a tag is."""
    secrets = tmp_path / "registries.toml"
    secrets.write_text('"registry.example.org" = "user:password"\n')
    own.up("--registry-credentials", str(secrets))
    for part in ("frontend", "worker"):
        assert str(secrets) in own.child(part).cmdline()


def test_a_house_outlives_the_terminal_that_it_was_started_from_with_nohup(tmp_path: Path) -> None:
    data = tmp_path / "data"
    ports = ("--port", str(free_port()), "--nats-port", str(free_port()), "--base-port", str(free_port()))
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.Popen(
        ["nohup", PROGRAM, "up", "--data", str(data), *ports, *FAST],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        env={**os.environ, **OFFLINE},
        start_new_session=True,
    )
    os.close(writing)
    try:
        wait_for("the cluster to be ready", lambda: (data / "server.json").exists() or process.poll() is not None)
        process.send_signal(signal.SIGHUP)
        worker = the_worker(process.pid)
        assert worker is not None
        worker.kill()
        # It says that the worker ended, to nobody.
        wait_for("another worker", lambda: the_worker(process.pid) not in (None, worker))
        assert process.poll() is None
        process.terminate()
        assert process.wait(40) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    assert not (data / "server.json").exists()


def the_worker(parent: int) -> psutil.Process | None:
    try:
        return next((one for one in psutil.Process(parent).children() if "worker" in one.cmdline()), None)
    except psutil.Error:
        return None


def test_a_part_that_hangs_is_named_when_it_is_stopped_and_a_second_ctrl_c_ends_it(own: Cluster) -> None:
    parent = own.up()
    own.child("worker").suspend()
    os.kill(parent.pid, signal.SIGINT)
    wait_for("the part to be named", lambda: "worker is still stopping" in parent.output(), 30)
    started = time.monotonic()
    assert parent.end(signal.SIGINT) == 0
    assert time.monotonic() - started < 10
    assert not (own.data / "server.json").exists()


def test_a_worker_whose_terminal_closes_says_goodbye(cluster: Cluster) -> None:
    worker = cluster.join("laptop")
    wait_for("the node to ask", lambda: cluster.node("laptop"))
    cluster.cli("nodes", "approve", "laptop")
    cluster.wait_for_status("laptop", "healthy")
    assert worker.end(signal.SIGHUP) == 0
    assert cluster.node("laptop")["status"] == "offline", "told, not found out by its silence"
