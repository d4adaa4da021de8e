"""Kill -9 of a part while an install is under way: it recovers by itself, and nothing accepted is lost."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import House, Program, wait_for


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
    caught: psutil.Process = wait_for("an install to be under way", lambda: next(iter(installers(program)), None))
    caught.suspend()
    return caught


@pytest.fixture(scope="module")
def cold(house: House) -> dict[str, str]:
    """A package cache of its own, so that an install takes long enough to be caught."""
    return {"UV_CACHE_DIR": str(house.root / "cache")}


@pytest.fixture
def second(house: House, cold: dict[str, str]) -> Program:
    """The second node, joined, approved, without the engine, and without its packages in the cache."""
    worker = house.workers.get("second") or house.join("second", cold)
    wait_for("second to be known", lambda: house.node("second"))
    if not house.node("second")["approved"]:
        house.cli("nodes", "approve", "second")
    house.wait_for_status("second", "healthy")
    if house.has_backend("second"):
        house.cli("backends", "delete", "llama-cpp", "--node", "second")
        wait_for("the engine to be gone", lambda: not house.has_backend("second"))
    shutil.rmtree(cold["UV_CACHE_DIR"], ignore_errors=True)
    return worker


def begin_install(house: House) -> str:
    operation = house.json("backends", "install", "llama-cpp", "--node", "second", "--no-follow")
    return str(operation["jobID"])


def outcome(house: House, operation_id: str) -> dict[str, object]:
    def ended() -> dict[str, object] | None:
        shown: dict[str, object] = house.json("ops", "show", operation_id)
        return shown if shown["status"] not in ("queued", "running") else None

    found: dict[str, object] = wait_for("the operation to end", ended, 60)
    return found


def row(operation: dict[str, object]) -> dict[str, object]:
    rows = operation["nodes"]
    assert isinstance(rows, list)
    assert len(rows) == 1
    first: dict[str, object] = rows[0]
    return first


def test_a_frontend_that_is_killed_during_an_install_loses_nothing(house: House, second: Program) -> None:
    operation_id = begin_install(house)
    installer = freeze(second)
    old = house.child("frontend").pid
    os.kill(old, signal.SIGKILL)
    wait_for("another frontend", lambda: house.cli("nodes", "list", code=None).returncode == 0)
    assert house.child("frontend").pid != old
    shown = house.json("ops", "show", operation_id)
    assert shown["status"] == "running", "the accepted request is still there, and still under way"
    installer.resume()
    ended = outcome(house, operation_id)
    assert (ended["status"], row(ended)["attempt"]) == ("succeeded", 1), "the same attempt was recorded, none was sent"
    assert house.has_backend("second")


def test_a_worker_that_is_killed_during_an_install_does_it_again_after_its_return(
    house: House, second: Program, cold: dict[str, str]
) -> None:
    operation_id = begin_install(house)
    installer = freeze(second)
    os.kill(second.pid, signal.SIGKILL)
    second.end()
    wait_for(
        "the installer to die with its worker", lambda: not installer.is_running() or installer.status() == "zombie"
    )
    assert house.json("ops", "show", operation_id)["status"] in ("queued", "running")
    assert not house.has_backend("second")
    house.join("second", cold)
    ended = outcome(house, operation_id)
    assert ended["status"] == "succeeded"
    assert row(ended)["attempt"] == 2
    wait_for("the node to report the engine", lambda: house.has_backend("second"))
    backends = house.root / "second" / "backends"
    assert sorted(path.name for path in backends.iterdir()) == [".enginehouse", "llama-cpp", "xllamacpp"]
    assert not list(backends.glob(".enginehouse/staging/*"))


def test_the_local_worker_is_started_again_and_its_engine_dies_with_it(house: House) -> None:
    assert house.cli("run", "tiny-chat", "--node", "first", "--prompt", "What is the capital of Italy?").stdout
    worker = house.child("worker")
    engines = worker.children(recursive=True)
    assert engines
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(engines, timeout=5)
    assert not alive
    house.wait_for_status("first", "healthy")
    done = house.cli("run", "tiny-chat", "--node", "first", "--prompt", "What is the capital of Italy?")
    assert done.stdout.strip() == "The capital of Italy is Rome."


def test_an_engine_that_is_killed_is_noticed_and_the_next_request_is_answered(house: House) -> None:
    worker = house.child("worker")
    for engine in worker.children(recursive=True):
        engine.kill()
    done = house.cli("run", "tiny-chat", "--prompt", "What is the capital of Italy?")
    assert done.stdout.strip() == "The capital of Italy is Rome."


def test_a_bus_that_is_killed_comes_back_and_requests_go_on(house: House, second: Program) -> None:
    assert house.parent is not None
    nats = next(one for one in psutil.Process(house.parent.pid).children() if "nats-server" in one.name())
    nats.kill()
    operation_id = begin_install(house)
    assert outcome(house, operation_id)["status"] == "succeeded"


def test_when_the_parent_is_killed_nothing_is_left(house: House, second: Program) -> None:
    assert house.parent is not None
    left = house.parent.descendants()
    os.kill(house.parent.pid, signal.SIGKILL)
    house.parent.end()
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    house.up()
    house.wait_for_status("first", "healthy")
    house.wait_for_status("second", "healthy")


def test_a_worker_that_moves_to_a_house_that_does_not_know_it_takes_its_first_requests(
    house: House, second: Program, tmp_path: Path
) -> None:
    """Here the database is lost: the same worker is a new node, and what it had counted before means nothing."""
    assert house.parent is not None
    for _ in range(2):
        assert outcome(house, begin_install(house))["status"] == "succeeded"
        house.cli("backends", "delete", "llama-cpp", "--node", "second")
    house.parent.end()
    for left in house.data.glob("enginehouse.db*"):
        left.rename(tmp_path / left.name)
    house.up()
    house.wait_for_status("second", "pending")
    house.cli("nodes", "approve", "second")
    house.wait_for_status("second", "healthy")
    ended = outcome(house, begin_install(house))
    assert ended["status"] == "succeeded", ended
    forced = house.json("backends", "install", "llama-cpp", "--node", "second", "--force", "--no-follow")
    before = (house.root / "second" / "backends" / "xllamacpp").stat().st_ino
    assert outcome(house, str(forced["jobID"]))["status"] == "succeeded"
    assert (house.root / "second" / "backends" / "xllamacpp").stat().st_ino != before, "it was really done again"
