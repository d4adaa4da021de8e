"""A cluster of real processes: `enginehouse up` on a data directory of its own, and workers that join it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.ports import free_port, ports_in_a_row

from enginehouse.link.client import FrontendClient

PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
# The relations of the defaults, ten times as fast, so that a test sees minutes in seconds.
FAST = ("--heartbeat", "1s", "--stale", "3s", "--lease", "5s", "--reconcile", "1s")
# The built-in gallery alone: no test asks the internet.
OFFLINE = {"ENGINEHOUSE_BACKEND_GALLERIES": "[]", "ENGINEHOUSE_MODEL_GALLERIES": "[]"}


def wait_for(what: str, probe: Callable[[], Any], limit_seconds: float = 30.0) -> Any:
    """The first true answer of `probe`; fails, saying for what it waited, when there is none in time."""
    pause = threading.Event()
    deadline = time.monotonic() + limit_seconds
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"waited {limit_seconds} s in vain for: {what}")
        pause.wait(0.02)


class Program:
    """A child process whose output is kept."""

    def __init__(self, *arguments: str, log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [PROGRAM, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **OFFLINE, **(environment or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid

    def output(self) -> str:
        return self.log.read_text()

    def end(self, number: signal.Signals = signal.SIGINT, limit_seconds: float = 40.0) -> int:
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self._process.wait(limit_seconds)

    def descendants(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []


class Cluster:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "first"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.parent: Program | None = None
        self.workers: dict[str, Program] = {}
        self._base_port = ports_in_a_row()

    def up(self, *more: str, environment: dict[str, str] | None = None) -> Program:
        ports = ("--port", str(self.port), "--nats-port", str(self._nats_port()), "--base-port", str(self._base_port))
        arguments = ("up", "--data", str(self.data), "--name", "first", *ports, *FAST, *more)
        log = self.root / "up.log"
        log.write_bytes(b"")
        self.parent = Program(*arguments, log=log, environment=environment)
        wait_for("`up` to say that it is up", lambda: "Enginehouse is up" in log.read_text(), 60)
        return self.parent

    def _nats_port(self) -> int:
        self._bus_port = getattr(self, "_bus_port", 0) or free_port()
        return self._bus_port

    def join(self, name: str, environment: dict[str, str] | None = None) -> Program:
        token = (self.data / "join.token").read_text().strip()
        base = self._base_port + 5 * (1 + len(self.workers))
        arguments = ("join", self.url, "--name", name, "--data", str(self.root / name), "--base-port", str(base))
        worker = Program(
            *arguments,
            log=self.root / f"{name}.log",
            environment={"ENGINEHOUSE_TOKEN": token, **(environment or {})},
        )
        self.workers[name] = worker
        return worker

    def cli(
        self, *arguments: str, code: int | None = 0, limit_seconds: float = 90.0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [PROGRAM, "--data", str(self.data), *arguments], capture_output=True, text=True, timeout=limit_seconds
        )
        if code is not None:
            assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.cli("--json", *arguments).stdout)

    def operations(self) -> list[dict[str, Any]]:
        """All of them, newest first."""
        listed: list[dict[str, Any]] = self.json("ops", "list")["operations"]
        return listed

    def node(self, name: str) -> dict[str, Any]:
        """The node as the server shows it; empty while it does not know it."""
        return next((one for one in self._get("/api/nodes") if one["name"] == name), {})

    def operation(self, operation_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self._get(f"/api/operations/{operation_id}")
        return found

    def _get(self, path: str) -> Any:
        """For whoever waits: a command takes a core for a third of a second each time."""
        token = (self.data / "admin.token").read_text().strip()
        with contextlib.closing(FrontendClient(self.url, token, user_agent="tests")) as client:
            return client.request("GET", path, None, object)

    def has_backend(self, name: str, directory: str = "xllamacpp") -> bool:
        return any(one["name"] == directory for one in self.node(name).get("backends", ()))

    def wait_for_status(self, name: str, status: str, limit_seconds: float = 30.0) -> None:
        wait_for(f"{name} to be {status}", lambda: self.node(name).get("status") == status, limit_seconds)

    def child(self, word: str) -> psutil.Process:
        """The child of `up` with that word on its command line."""
        assert self.parent is not None
        children = psutil.Process(self.parent.pid).children()
        return next(one for one in children if word in one.cmdline())

    def end(self) -> None:
        for worker in self.workers.values():
            worker.end()
        if self.parent is not None:
            self.parent.end()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for the tests of a module, already up."""
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.up()
        yield made
    finally:
        made.end()
