"""Kill -9 of a part while an install is under way: it recovers by itself, and nothing accepted is lost."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import Cluster, Program, wait_for


def installers(program: Program) -> list[psutil.Process]:
    """The uv processes that work below a program."""
    found = []
    for one in program.descendants():
        try:
            if Path(one.exe()).name == "uv" and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def freeze(program: Program) -> psutil.Process:
    """Catch the installer at work and stop its clock."""

    def frozen() -> psutil.Process | None:
        for one in installers(program):
            with contextlib.suppress(psutil.NoSuchProcess):  # it made the environment; another one fills it
                one.suspend()
                return one
        return None

    caught: psutil.Process = wait_for("an install to be under way", frozen)
    return caught


@pytest.fixture(scope="module")
def cold(cluster: Cluster) -> dict[str, str]:
    """A package cache of its own, so that an install takes long enough to be caught."""
    return {"UV_CACHE_DIR": str(cluster.root / "cache")}


@pytest.fixture
def second(cluster: Cluster, cold: dict[str, str]) -> Program:
    """The second node, joined, approved, without the engine, and without its packages in the cache."""
    worker = cluster.workers.get("second") or cluster.join("second", cold)
    wait_for("second to be known", lambda: cluster.node("second"))
    if not cluster.node("second")["approved"]:
        cluster.cli("nodes", "approve", "second")
    cluster.wait_for_status("second", "healthy")
    if cluster.has_backend("second"):
        cluster.cli("backends", "delete", "llama-cpp", "--node", "second", "--force")
        wait_for("the engine to be gone", lambda: not cluster.has_backend("second"))
    shutil.rmtree(cold["UV_CACHE_DIR"], ignore_errors=True)
    return worker


def begin_install(cluster: Cluster) -> str:
    operation = cluster.json("backends", "install", "llama-cpp", "--node", "second", "--no-follow")
    return str(operation["jobID"])


def outcome(cluster: Cluster, operation_id: str) -> dict[str, object]:
    def ended() -> dict[str, object] | None:
        shown: dict[str, object] = cluster.operation(operation_id)
        return shown if shown["status"] not in ("queued", "running") else None

    found: dict[str, object] = wait_for("the operation to end", ended, 60)
    return found


def row(operation: dict[str, object]) -> dict[str, object]:
    rows = operation["nodes"]
    assert isinstance(rows, list)
    assert len(rows) == 1
    first: dict[str, object] = rows[0]
    return first


def test_a_frontend_that_is_killed_during_an_install_loses_nothing(cluster: Cluster, second: Program) -> None:
    operation_id = begin_install(cluster)
    installer = freeze(second)
    old = cluster.child("frontend").pid
    os.kill(old, signal.SIGKILL)
    wait_for("another frontend", lambda: cluster.cli("nodes", "list", code=None).returncode == 0)
    assert cluster.child("frontend").pid != old
    shown = cluster.json("ops", "show", operation_id)
    assert shown["status"] == "running", "the accepted request is still there, and still under way"
    installer.resume()
    ended = outcome(cluster, operation_id)
    assert (ended["status"], row(ended)["attempt"]) == ("succeeded", 1), "the same attempt was recorded, none was sent"
    wait_for("the node to report it", lambda: cluster.has_backend("second"))


def test_a_worker_that_is_killed_during_an_install_does_it_again_after_its_return(
    cluster: Cluster, second: Program, cold: dict[str, str]
) -> None:
    operation_id = begin_install(cluster)
    installer = freeze(second)
    os.kill(second.pid, signal.SIGKILL)
    second.end()
    wait_for(
        "the installer to die with its worker", lambda: not installer.is_running() or installer.status() == "zombie"
    )
    assert cluster.json("ops", "show", operation_id)["status"] in ("queued", "running")
    assert not cluster.has_backend("second")
    cluster.join("second", cold)
    ended = outcome(cluster, operation_id)
    assert ended["status"] == "succeeded"
    assert row(ended)["attempt"] == 2
    wait_for("the node to report the engine", lambda: cluster.has_backend("second"))
    backends = cluster.root / "second" / "backends"
    assert sorted(path.name for path in backends.iterdir()) == [".enginehouse", "llama-cpp", "xllamacpp"]
    assert not list(backends.glob(".enginehouse/staging/*"))


def test_the_local_worker_is_started_again_and_its_engine_dies_with_it(cluster: Cluster) -> None:
    assert cluster.cli("run", "tiny-chat", "--node", "first", "--prompt", "What is the capital of Italy?").stdout
    worker = cluster.child("worker")
    engines = worker.children(recursive=True)
    assert engines
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(engines, timeout=5)
    assert not alive
    cluster.wait_for_status("first", "healthy")
    done = cluster.cli("run", "tiny-chat", "--node", "first", "--prompt", "What is the capital of Italy?")
    assert done.stdout.strip() == "The capital of Italy is Rome."


def test_an_engine_that_is_killed_is_noticed_and_the_next_request_is_answered(cluster: Cluster) -> None:
    worker = cluster.child("worker")
    for engine in worker.children(recursive=True):
        engine.kill()
    done = cluster.cli("run", "tiny-chat", "--prompt", "What is the capital of Italy?")
    assert done.stdout.strip() == "The capital of Italy is Rome."


def test_a_bus_that_is_killed_comes_back_and_requests_go_on(cluster: Cluster, second: Program) -> None:
    assert cluster.parent is not None
    nats = next(one for one in psutil.Process(cluster.parent.pid).children() if "nats-server" in one.name())
    nats.kill()
    operation_id = begin_install(cluster)
    assert outcome(cluster, operation_id)["status"] == "succeeded"


def test_when_the_parent_is_killed_nothing_is_left(cluster: Cluster, second: Program) -> None:
    assert cluster.parent is not None
    left = cluster.parent.descendants()
    os.kill(cluster.parent.pid, signal.SIGKILL)
    cluster.parent.end()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    cluster.up()
    cluster.wait_for_status("first", "healthy")
    cluster.wait_for_status("second", "healthy")


def test_a_worker_that_moves_to_a_house_that_does_not_know_it_takes_its_first_requests(
    cluster: Cluster, second: Program, tmp_path: Path
) -> None:
    """Here the database is lost: the same worker is a new node, and what it had counted before means nothing."""
    assert cluster.parent is not None
    for _ in range(2):
        assert outcome(cluster, begin_install(cluster))["status"] == "succeeded"
        cluster.cli("backends", "delete", "llama-cpp", "--node", "second", "--force")
    cluster.parent.end()
    for left in cluster.data.glob("enginehouse.db*"):
        left.rename(tmp_path / left.name)
    cluster.up()
    cluster.wait_for_status("second", "pending")
    cluster.cli("nodes", "approve", "second")
    cluster.wait_for_status("second", "healthy")
    ended = outcome(cluster, begin_install(cluster))
    assert ended["status"] == "succeeded", ended
    before = (cluster.root / "second" / "backends" / "xllamacpp").stat().st_ino
    forced = cluster.json("backends", "install", "llama-cpp", "--node", "second", "--force", "--no-follow")
    assert outcome(cluster, str(forced["jobID"]))["status"] == "succeeded"
    assert (cluster.root / "second" / "backends" / "xllamacpp").stat().st_ino != before, "it was really done again"
