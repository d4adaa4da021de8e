"""A short transaction while eight callers list 1,000 nodes without a pause: SQLite and PostgreSQL.

Its 99th percentile is compared with the median of a list in the same run: in one queue with the lists it would wait for
all of them. The bar is 0.5 for the worse of the two databases.

    .venv/bin/python bench/reads.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import NodeId
from enginehouse.core.node import NodeQuery
from enginehouse.core.report import Report
from enginehouse.frontend.fleet.node_views import NodeViews
from enginehouse.run import COLLECT_AFTER, SWITCH_SECONDS
from enginehouse.store import db, nodes
from enginehouse.store.db import Connection, Store

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a script, and its neighbours are in a package

from bench.backlog import databases, node

BAR = 0.5
NODES = 1000
CALLERS = 8
PAUSE_SECONDS = 0.005  # between two transactions
BACKENDS = tuple(
    InstalledBackend(name=f"backend-{number}", is_system=False, is_meta=False, version="1", digest="sha256:" + "1" * 64)
    for number in range(5)
)


def fill(connection: Connection) -> None:
    now = db.now(connection)
    for number in range(NODES):
        one = msgspec.structs.replace(node(number, now), report=Report(boot_id="b", backends=BACKENDS))
        nodes.insert(connection, one, f"token-{number}")


def write(connection: Connection) -> None:
    nodes.set_labels(connection, NodeId("node-001"), {}, db.now(connection))


async def measure(store: Store, seconds: float, callers: int) -> tuple[list[float], list[float]]:
    """What each transaction and each list took."""
    transactions: list[float] = []
    lists: list[float] = []
    views, is_over = NodeViews(store), False

    async def list_on() -> None:
        while not is_over:
            began = time.perf_counter()
            assert len(await views.every(NodeQuery())) == NODES
            lists.append(time.perf_counter() - began)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(list_on())
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            began = time.perf_counter()
            await store.transaction(write)
            transactions.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)
        is_over = True
    return transactions, lists


async def compare(make: Callable[[], str], seconds: float) -> float:
    store = await Store.open(make())
    try:
        await store.transaction(fill)
        alone, _ = await measure(store, seconds, 0)
        beside, lists = await measure(store, seconds, CALLERS)
    finally:
        store.close()
    listed = statistics.median(lists)
    for what, times in (("alone", alone), ("beside", beside)):
        print(f"  {what:7s} median {1000 * statistics.median(times):6.1f} ms, p99 {1000 * _p99(times):6.1f} ms")
    print(f"  a list  median {1000 * listed:6.1f} ms")
    return _p99(beside) / listed


def _p99(times: list[float]) -> float:
    return sorted(times)[int(0.99 * (len(times) - 1))]


async def main() -> int:
    parser = argparse.ArgumentParser(description="A short transaction while others list a thousand nodes.")
    parser.add_argument("--quick", action="store_true", help="for seconds instead of a minute")
    seconds = 6.0 if parser.parse_args().quick else 30.0
    # As a frontend does it.
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    sys.setswitchinterval(SWITCH_SECONDS)
    worst = 0.0
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="reads-", dir=memory) as scratch:
        Path(scratch).chmod(0o755)
        with databases(Path(scratch)) as kinds:
            for kind, make in kinds.items():
                print(f"{kind}: a transaction alone and beside {CALLERS} callers that list {NODES} nodes")
                worst = max(worst, await compare(make, seconds))
    print(f"reads: {worst:.2f} (bar {BAR}: p99 of a transaction over the median of the lists beside it, the worse)")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
