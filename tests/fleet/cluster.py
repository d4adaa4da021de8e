"""A fleet of real processes over one PostgreSQL and one NATS: frontends that are equals, workers that join any of them.

Everything is ended by pid. Times are the defaults ten times as fast, so that a test sees minutes in seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from tests.e2e.conftest import wait_for
from tests.ports import free_port, ports_in_a_row

from enginehouse.core.errors import EnginehouseError
from enginehouse.link.client import FrontendClient

PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
NATS = str(Path(sys.executable).with_name("nats-server"))
STALE_SECONDS = 3.0
LEASE_SECONDS = 5.0
RECONCILE_SECONDS = 1.0
FAST = (
    *("--heartbeat", "1s", "--stale", f"{STALE_SECONDS}s", "--lease", f"{LEASE_SECONDS}s"),
    *("--reconcile", f"{RECONCILE_SECONDS}s", "--stall", "6s", "--canary", "2s", "--canary-limit", "60s"),
)
OPEN = ("queued", "running")


def flags(usual: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    """Flags with one value each; one of `more` stands instead of the usual one, because none may be given twice."""
    usual, more = tuple(usual), tuple(more)
    pairs = zip(usual[::2], usual[1::2], strict=True)
    return (*(word for flag, value in pairs if flag not in more for word in (flag, value)), *more)


class Process:
    """One program, which may be killed, paused and started again with the same arguments."""

    def __init__(self, name: str, arguments: Iterable[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.log = log
        first, *self._arguments = arguments
        self.program: tuple[str, ...] = (first,)  # a test may put another one in its place, for the next start
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self.program, *self._arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def again(self, **environment: str) -> None:
        """Killed, and started with these variables changed."""
        self.kill()
        self._environment |= environment
        self.start()

    def stop(self, limit_seconds: float = 40.0) -> int:
        """In order; the exit code."""
        assert self._process is not None
        if self.is_alive:
            self.resume()
            self._signal(signal.SIGTERM)
        return self._process.wait(limit_seconds)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self.is_alive:
            self._process.send_signal(number)


def end_all(processes: Iterable[Process]) -> None:
    """In order, all at once."""
    enders = [threading.Thread(target=process.stop) for process in processes if process.is_alive]
    for ender in enders:
        ender.start()
    for ender in enders:
        ender.join()


class Frontend(Process):
    def __init__(self, name: str, root: Path, more: Iterable[str], environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        usual = ("--data", str(root / name), "--port", str(self.port), *FAST)
        arguments = (PROGRAM, "frontend", *flags(usual, more))
        super().__init__(name, arguments, root / f"{name}.log", environment)
        self.client = FrontendClient(self.url, environment["ENGINEHOUSE_ADMIN_TOKEN"], user_agent="tests")

    def is_ready(self) -> bool:
        try:
            self.client.request_bytes("GET", "/readyz", timeout_seconds=5.0)
        except EnginehouseError:
            return False
        return True

    def is_ready_or_over(self) -> bool:
        return not self.is_alive or self.is_ready()

    def get(self, path: str) -> Any:
        return self.client.request("GET", path, None, object)

    def post(self, path: str, body: object = None, *, key: str = "") -> Any:
        return self.client.request("POST", path, body, object, key=key)

    def patch(self, path: str, body: object) -> Any:
        return self.client.request("PATCH", path, body, object)

    def delete(self, path: str) -> Any:
        return self.client.request("DELETE", path, None, object)

    def operation(self, operation_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/api/operations/{operation_id}")
        return found


class Fleet:
    def __init__(self, root: Path, database_url: str, environment: dict[str, str]) -> None:
        self.root = root
        self.database_url = database_url
        self.nats_port = free_port()
        self.nats_url = f"nats://127.0.0.1:{self.nats_port}"
        self.tokens = {role: f"eh-{role}-{uuid.uuid4().hex}" for role in ("admin", "join")}
        self.environment = {
            **environment,
            "ENGINEHOUSE_DATABASE_URL": database_url,
            "ENGINEHOUSE_NATS_URL": self.nats_url,
        }
        self.nats = Process("nats", (NATS, "-a", "127.0.0.1", "-p", str(self.nats_port)), root / "nats.log", {})
        self.frontends: list[Frontend] = []
        self.workers: dict[str, Process] = {}
        self._base_port = ports_in_a_row(100)

    # Processes ------------------------------------------------------------------------------------

    def start(self, frontends: int, workers: int) -> None:
        self.nats.start()
        for number in range(frontends):
            self.add_frontend(f"frontend-{number + 1}")
        self.until_ready()
        for number in range(workers):
            self.add_worker(f"worker-{number + 1}", self.frontends[number % frontends])
        self.until_healthy()

    def add_frontend(self, name: str, *more: str, environment: dict[str, str] | None = None) -> Frontend:
        tokens = {f"ENGINEHOUSE_{role.upper()}_TOKEN": token for role, token in self.tokens.items()}
        made = Frontend(name, self.root, more, {**self.environment, **tokens, **(environment or {})})
        self.frontends.append(made)
        made.start()
        return made

    def add_worker(
        self,
        name: str,
        frontend: Frontend,
        *more: str,
        approve: bool = True,
        environment: dict[str, str] | None = None,
    ) -> Process:
        base = self._base_port + 5 * len(self.workers)
        told = {**self.environment, "ENGINEHOUSE_TOKEN": self.tokens["join"], **(environment or {})}
        # Frontends are equals: a worker is told of all, and begins with the one it was given.
        urls = ",".join(dict.fromkeys([frontend.url, *(one.url for one in self.frontends)]))
        usual = ("--url", urls, "--name", name, "--data", str(self.root / name), "--base-port", str(base))
        arguments = (PROGRAM, "worker", *flags((*usual, "--grace", "2s"), more))
        made = Process(name, arguments, self.root / f"{name}.log", told)
        self.workers[name] = made
        made.start()
        if approve:
            wait_for(f"{name} to register", lambda: self.node(name))
            if not self.node(name)["approved"]:
                frontend.post(f"/api/nodes/{name}/approve")
        return made

    def until_ready(self) -> None:
        for frontend in self.frontends:
            try:
                wait_for(f"{frontend.name} to be ready", frontend.is_ready_or_over)
            finally:
                if not frontend.is_ready():
                    print(f"alive: {frontend.is_alive}; {frontend.name} said:\n{self.log_of(frontend.name)[-4000:]}")
            assert frontend.is_alive, f"{frontend.name} ended by itself"

    def until_healthy(self, *names: str, limit_seconds: float = 30.0) -> None:
        wanted = set(names or self.workers)

        def all_healthy() -> bool:
            return wanted <= {one["name"] for one in self.nodes() if one["status"] == "healthy"}

        wait_for(f"{', '.join(sorted(wanted))} to be healthy", all_healthy, limit_seconds)

    def mend(self) -> None:
        """Everybody runs and is healthy again, whatever a test did to them."""
        for process in (self.nats, *self.frontends, *self.workers.values()):
            process.resume()
            if not process.is_alive:
                process.start()
        self.until_ready()
        self.until_healthy()

    def end(self) -> None:
        """Workers first, all at once; then the frontends, then the bus."""
        for group in (list(self.workers.values()), self.frontends, [self.nats]):
            end_all(group)
        for frontend in self.frontends:
            frontend.client.close()

    # Asking ---------------------------------------------------------------------------------------

    @property
    def first(self) -> Frontend:
        return self.frontends[0]

    @property
    def second(self) -> Frontend:
        return self.frontends[1]

    def nodes(self, frontend: Frontend | None = None) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (frontend or self._any()).get("/api/nodes")
        return found

    def _any(self) -> Frontend:
        return next(one for one in self.frontends if one.is_alive)

    def node(self, name: str) -> dict[str, Any]:
        return next((one for one in self.nodes() if one["name"] == name), {})

    def request(
        self,
        kind: str,
        name: str,
        nodes: Iterable[str] | None = None,
        *,
        frontend: Frontend | None = None,
        key: str = "",
        **more: object,
    ) -> dict[str, Any]:
        body: dict[str, object] = {"kind": kind, "name": name, **more}
        if kind == "delete":
            body.setdefault("force", True)  # also where models run
        if nodes is not None:
            body["nodes"] = list(nodes)
        found: dict[str, Any] = (frontend or self._any()).post("/api/operations", body, key=key)
        return found

    def ended(
        self, operation: dict[str, Any], frontend: Frontend | None = None, limit_seconds: float = 60.0
    ) -> dict[str, Any]:
        """The operation once it is over, as that frontend tells it."""

        # A store that is slow to answer has it accepted, and not read.
        told = f"{operation.get('kind', 'the operation')} {operation.get('name', operation['jobID'])}"

        def over() -> dict[str, Any] | None:
            found = (frontend or self._any()).operation(operation["jobID"])
            return found if found["status"] not in OPEN else None

        found: dict[str, Any] = wait_for(f"{told} to end", over, limit_seconds)
        return found

    def done(self, kind: str, name: str, nodes: Iterable[str] | None = None, **more: Any) -> dict[str, Any]:
        """Ask for it, wait, and see that it succeeded."""
        found = self.ended(self.request(kind, name, nodes, **more))
        assert found["status"] == "succeeded", found
        return found

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """What the database says; for what no route tells, and for time that a test cannot wait for."""
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            done = connection.execute(query.encode(), values)
            return done.fetchall() if done.description else []

    # Looking on the disks of workers --------------------------------------------------------------

    def backends_of(self, worker: str) -> Path:
        return self.root / worker / "backends"

    def residue_of(self, worker: str) -> list[str]:
        cluster = self.backends_of(worker) / ".enginehouse"
        return [path.name for place in ("staging", "replaced") for path in cluster.glob(f"{place}/*")]

    def journal_of(self, worker: str) -> list[dict[str, Any]]:
        path = self.root / worker / "journal" / "journal.jsonl"
        return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def began(self, worker: str, action: str) -> int:
        """How often the worker has begun to do this, by its log."""
        return self.log_of(worker).count(f"command.started action={action!r}")

    def log_of(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()


def rows_of(operation: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of an operation by the name of their node."""
    return {row["node_name"]: row for row in operation.get("nodes", ())}
