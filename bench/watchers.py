"""200 installs that report ten times a second, with 500 watchers: how much is written, and how late the watchers are.

A real frontend on real PostgreSQL and NATS. Workers are stubs that only report progress. Writes are counted by the
database itself (rows of `intents` updated), lateness from the moment an operation is asked for until the last watcher
has its event. The bars: one write per operation and second, one second behind.

    .venv/bin/python bench/watchers.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg

from enginehouse.bus import embedded
from enginehouse.core import subjects, wire
from enginehouse.core.ids import NodeId
from enginehouse.core.progress import Progress
from enginehouse.host import processes
from enginehouse.link.client import FrontendClient
from enginehouse.ports import Message

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a script, and its neighbours are in a package

from bench.backlog import databases
from bench.fanout import LIMIT_SECONDS, TOKENS, StubWorker, free_port, until_ready

NODES, NAMES = 20, 10
OPERATIONS = NODES * NAMES
EVENTS_PER_SECOND = 10
WATCHERS = 500
BAR = 1.0


class Reporting(StubWorker):
    """A worker whose installs never end and report ten times a second."""

    async def _install(self, message: Message) -> None:
        assert self._bus is not None
        request = wire.decode(message.payload, wire.BackendInstallRequest, "the install request")
        assert request.command is not None
        node_id = message.subject.split(".")[1]
        number = 0
        while True:
            number += 1
            told = Progress("downloading", "layer", number * 1000, 10**9, request.command.attempt, number)
            event = wire.progress_event(request.op_id, NodeId(node_id), request.backend, request.command.intent, told)
            await self._bus.publish(subjects.progress_subject(NodeId(node_id), request.op_id), wire.encode(event))
            await asyncio.sleep(1 / EVENTS_PER_SECOND)


class Watcher:
    """One stream of events; `seen` is set when it holds what was asked for."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._wanted = b""
        self._seen = asyncio.Event()
        self._seen_at = 0.0
        self.received_bytes = 0

    async def run(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=4 * 1024 * 1024)
        head = f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKENS['admin']}\r\n\r\n"
        writer.write(head.encode())
        rest = b""
        try:
            while content := await reader.read(1024 * 1024):
                self.received_bytes += len(content)
                if self._wanted and self._wanted in rest + content:
                    self._seen_at = self._seen_at or time.perf_counter()
                    self._seen.set()
                rest = content[-64:]
        finally:
            writer.close()

    def expect(self, text: bytes) -> None:
        self._wanted, self._seen_at = text, 0.0
        self._seen.clear()

    async def saw(self) -> float:
        await self._seen.wait()
        return self._seen_at


@contextlib.asynccontextmanager
async def running_frontend(place: Path, database: str, port: int, keys: list[str]) -> AsyncIterator[FrontendClient]:
    url = f"http://127.0.0.1:{port}"
    nats_port = free_port()
    nats = [embedded.find_program(), "-a", "127.0.0.1", "-p", str(nats_port)]
    argv = [sys.executable, "-m", "enginehouse", "frontend", "--data", str(place), "--port", str(port)]
    argv += ["--nats-url", f"nats://127.0.0.1:{nats_port}", "--stale", "600s", "--approve-keys", ",".join(keys)]
    argv += ["--backend-galleries", "[]"]
    environment = {**os.environ, "ENGINEHOUSE_DATABASE_URL": database}
    async with contextlib.AsyncExitStack() as stack:
        for name, command in (("nats", nats), ("frontend", argv)):
            child = await processes.spawn(command, directory=place, environment=environment, log=place / f"{name}.log")
            stack.push_async_callback(processes.stop_group, child, LIMIT_SECONDS)
        client = FrontendClient(url, TOKENS["admin"], user_agent="bench")
        await until_ready(client)
        yield client


def updates(database: str) -> int:
    """Rows of intents that were written so far, by the database's own count."""
    query = "select pg_stat_force_next_flush(), n_tup_upd from pg_stat_user_tables where relname = 'intents'"
    with psycopg.connect(database, autocommit=True) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[1])


async def measure(place: Path, database: str, seconds: float) -> tuple[float, float]:
    """Writes per operation and second, and how late the last watcher was, at the median of several changes."""
    for role, token in TOKENS.items():
        (place / f"{role}.token").write_text(token)
    port = free_port()
    async with asyncio.TaskGroup() as group:
        workers = [Reporting(f"stub-{number}", f"http://127.0.0.1:{port}", group) for number in range(NODES)]
        async with running_frontend(place, database, port, [worker.public_key for worker in workers]) as client:
            for worker in workers:
                await worker.join()
            for number in range(NAMES):
                for node in range(NODES):
                    await asyncio.to_thread(ask, client, f"engine-{number}", f"stub-{node}")
            watchers = [Watcher(port) for _ in range(WATCHERS)]
            watching = [group.create_task(watcher.run()) for watcher in watchers]
            await asyncio.sleep(2.0)  # everybody is there, and what the beginning cost is over
            before, began = await asyncio.to_thread(updates, database), time.perf_counter()
            lateness: list[float] = []
            while time.perf_counter() - began < seconds:
                lateness.append(await one_change(client, watchers, len(lateness)))
                await asyncio.sleep(0.5)
            spent = time.perf_counter() - began
            written = await asyncio.to_thread(updates, database) - before
            received = sum(watcher.received_bytes for watcher in watchers)
            print(f"{received / 1e6:.0f} MB of events to {WATCHERS} watchers; changes seen by all after", end=" ")
            print(", ".join(f"{late:.2f}" for late in lateness), "s")
            for task in watching:
                task.cancel()
            for worker in workers:
                for task in worker.tasks:
                    task.cancel()
                await worker.leave()
    return written / OPERATIONS / spent, statistics.median(lateness)


def ask(client: FrontendClient, name: str, node: str) -> str:
    request = {"kind": "install", "name": name, "nodes": [node], "uri": "pypi:engine==1"}
    return str(client.request("POST", "/api/operations", request, dict[str, object])["jobID"])


async def one_change(client: FrontendClient, watchers: list[Watcher], number: int) -> float:
    """Seconds from asking for something until the last watcher has seen it."""
    name = f"change-{number}-{time.time_ns()}"
    for watcher in watchers:
        watcher.expect(name.encode())
    began = time.perf_counter()
    await asyncio.to_thread(ask, client, name, "stub-0")
    async with asyncio.timeout(LIMIT_SECONDS):
        seen = [await watcher.saw() for watcher in watchers]
    return max(seen) - began


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="watchers-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


async def main() -> int:
    parser = argparse.ArgumentParser(description="Writes and lateness with 200 installs and 500 watchers.")
    parser.add_argument("--quick", action="store_true", help="shorter, under 50 s")
    seconds = 8.0 if parser.parse_args().quick else 30.0
    with scratch() as place, databases(place) as kinds:
        (place / "frontend").mkdir()
        writes, late = await measure(place / "frontend", kinds["postgresql"](), seconds)
    print(
        f"{OPERATIONS} installs, {EVENTS_PER_SECOND} events a second each: {writes:.2f} writes per operation and second"
    )
    worst = max(writes, late)
    print(
        f"watchers: {worst:.2f} (bar {BAR}: writes per operation and second, and seconds until all have seen a change)"
    )
    return 0 if max(writes, late) <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
