"""Who comes to a fleet for one test and leaves it again, and what several tests do to those who stay."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import PROGRAM, Fleet, Frontend, Process, end_all, rows_of

from enginehouse.core.errors import NotFound

STUB = str(Path(__file__).with_name("stub_worker.py"))


@contextmanager
def guest_worker(fleet: Fleet, name: str, *more: str, environment: dict[str, str] | None = None) -> Iterator[Process]:
    made = fleet.add_worker(name, fleet.first, *more, environment=environment)
    try:
        fleet.until_healthy(name)
        yield made
    finally:
        made.stop()
        del fleet.workers[name]
        with suppress(NotFound):
            fleet.second.delete(f"/api/nodes/{name}?force=true")


@contextmanager
def guest_stubs(fleet: Fleet, count: int) -> Iterator[dict[str, Process]]:
    """So many stub workers, by their names: one process each."""
    environment = {"ENGINEHOUSE_TOKEN": fleet.tokens["join"]}
    made: dict[str, Process] = {}
    for number in range(count):
        name, url = f"stub-{number + 1}", fleet.frontends[number % len(fleet.frontends)].url
        line = (sys.executable, STUB, name, url, fleet.nats_url)
        made[name] = Process(name, line, fleet.root / f"{name}.log", environment)
        made[name].start()
    try:
        for name in made:
            wait_for(f"{name} to register", partial(fleet.node, name))
            fleet.first.post(f"/api/nodes/{name}/approve")
        fleet.until_healthy(*made)
        yield made
    finally:
        for name, process in made.items():
            process.kill()
            with suppress(NotFound):
                fleet.second.delete(f"/api/nodes/{name}?force=true")


def until_stocked(frontend: Frontend) -> None:
    """Ready, and its gallery is read: a frontend that was never there before answers before it has been."""
    wait_for(f"{frontend.name} to be ready", frontend.is_ready)
    wait_for(f"{frontend.name} to have read its gallery", lambda: _has_engines(frontend))


def _has_engines(frontend: Frontend) -> bool:
    return any(one["name"].startswith("engine-") for one in frontend.get("/backends/available"))


@contextmanager
def guest_frontend(fleet: Fleet, name: str, *more: str) -> Iterator[Frontend]:
    made = fleet.add_frontend(name, *more)
    try:
        until_stocked(made)
        yield made
    finally:
        made.stop()
        fleet.frontends.remove(made)
        made.client.close()


@contextmanager
def guest_frontends(fleet: Fleet, names: Iterable[str], *more: str) -> Iterator[list[Frontend]]:
    """Several at once, which takes no longer than one."""
    made = [fleet.add_frontend(name, *more) for name in names]
    try:
        for one in made:
            until_stocked(one)
        yield made
    finally:
        end_all(made)
        for one in made:
            fleet.frontends.remove(one)
            one.client.close()


@contextmanager
def registered(fleet: Fleet, name: str, node_type: str) -> Iterator[str]:
    """A node that was never approved, by its id. No program stands behind it."""
    body = {"name": name, "node_type": node_type, "token": fleet.tokens["join"]}
    made = fleet.first.client.request("POST", "/api/node/register", body, dict[str, Any], token=fleet.tokens["join"])
    try:
        yield str(made["id"])
    finally:
        fleet.first.delete(f"/api/nodes/{name}?force=true")


def restart(*frontends: Frontend) -> None:
    for frontend in frontends:
        frontend.kill()
        frontend.start()
    for frontend in frontends:
        wait_for(f"{frontend.name} to be ready", frontend.is_ready)


def row_of(operation: dict[str, Any], worker: str) -> dict[str, Any]:
    return rows_of(operation)[worker]


def command(
    fleet: Fleet, *arguments: str, token: str = "", limit_seconds: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """`enginehouse` as somebody runs it who has an address and a token."""
    line = _line(fleet, arguments, token)
    return subprocess.run(line, capture_output=True, text=True, timeout=limit_seconds)


@contextmanager
def following(fleet: Fleet, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The same, while it goes on."""
    line = _line(fleet, arguments, "")
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def _line(fleet: Fleet, arguments: Iterable[str], token: str) -> list[str]:
    return [PROGRAM, "--url", fleet.second.url, "--token", token or fleet.tokens["admin"], *arguments]


def watch(frontend: Frontend, path: str = "/api/events") -> Iterator[tuple[str, dict[str, Any]]]:
    """The events of a frontend as they come: kind and body."""
    with frontend.client.stream_events(path) as events:
        for event in events:
            yield event.event, msgspec.json.decode(event.data)


class Clock:
    """The pace of a client that looks every so often."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._never = threading.Event()

    def tick(self) -> None:
        self._never.wait(self._seconds)
