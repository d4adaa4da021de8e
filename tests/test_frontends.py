"""Several frontends behind one port, as real processes over a real PostgreSQL and a real NATS server."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.conftest import wait_for
from tests.ports import free_port

NATS = str(Path(sys.executable).with_name("nats-server"))
STOP_SECONDS = 30.0


@pytest.fixture
def bus() -> Iterator[str]:
    port = free_port()
    with subprocess.Popen([NATS, "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL) as server:
        yield f"nats://127.0.0.1:{port}"
        server.terminate()


class Group:
    """The parent and its frontends."""

    def __init__(self, data: Path, bus: str, database: str, *more: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "enginehouse", "--data", str(data), "frontend", "--port", str(self.port)]
        command += ["--nats-url", bus, "--database-url", database, "--backend-galleries", "[]", *more]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def listening(self) -> set[int]:
        """The frontends that take connections."""
        found = set()
        for child in psutil.Process(self.process.pid).children():
            try:
                ports = {one.laddr.port for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
            if self.port in ports:
                found.add(child.pid)
        return found

    def status(self) -> int:
        """Of a request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status
        finally:
            connection.close()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def two(tmp_path: Path, bus: str, postgres: Callable[[], str]) -> Iterator[Group]:
    group = Group(tmp_path / "data", bus, postgres(), "--processes", "2")
    try:
        wait_for("both frontends", lambda: len(group.listening()) == 2)
        yield group
    finally:
        group.end()


@pytest.mark.slow
def test_a_killed_frontend_comes_back_and_the_port_goes_on_answering(two: Group) -> None:
    before = two.listening()
    killed, other = sorted(before)
    process = psutil.Process(killed)
    os.kill(killed, signal.SIGKILL)
    # Dead, not only dying: what the kernel had queued for it is reset until then.
    wait_for("one of them to be gone", lambda: not is_alive(process) and killed not in two.listening())
    assert [two.status() for _ in range(50)] == [200] * 50
    wait_for("another one", lambda: len(two.listening()) == 2)
    assert other in two.listening()
    assert killed not in two.listening()


@pytest.mark.slow
def test_both_frontends_get_connections_and_end_with_their_parent_in_order(two: Group) -> None:
    kept = []
    try:
        for _ in range(64):
            connection = http.client.HTTPConnection("127.0.0.1", two.port, timeout=10)
            kept.append(connection)
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
        busy = {
            child.pid
            for child in psutil.Process(two.process.pid).children()
            for one in child.net_connections("tcp")
            if one.status == psutil.CONN_ESTABLISHED and one.laddr.port == two.port
        }
        assert busy == two.listening()
    finally:
        for connection in kept:
            connection.close()
    children = psutil.Process(two.process.pid).children()
    two.process.terminate()
    assert two.process.wait(STOP_SECONDS) == 0
    assert not any(is_alive(child) for child in children)


@pytest.mark.slow
def test_frontends_end_with_a_parent_that_is_killed(two: Group) -> None:
    children = psutil.Process(two.process.pid).children()
    two.process.kill()
    wait_for("their end", lambda: not any(is_alive(child) for child in children))


def test_several_frontends_over_sqlite_are_refused(tmp_path: Path) -> None:
    group = Group(tmp_path, "nats://127.0.0.1:1", f"sqlite:///{tmp_path / 'x.db'}", "--processes", "2")
    _, said = group.process.communicate(timeout=STOP_SECONDS)
    assert group.process.returncode == 2
    assert said.startswith("enginehouse: cannot run 2 frontends over SQLite")
