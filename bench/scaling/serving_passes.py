"""What a pass of the reconciler and a refresh of the routes cost, for bench/placement.py.

A real frontend without its loops, on SQLite in memory where there is one, with nodes, models, schedules and ready
replicas in its store. Each step is timed with nothing changed, and after one replica was replaced by another process.
The second frontend over the same store sees the same changes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct
from tests.frontend.serving_rows import GIB, REPLICAS_PER_NODE, a_model, a_node, a_replica
from tests.frontend.world import Time, WatchedStore, World

from enginehouse.core.replica import Replica
from enginehouse.core.schedule import LoadInfo, Schedule
from enginehouse.store import db, load_infos, models, nodes, replicas, schedules
from enginehouse.store.db import Connection

REPLICAS_PER_MODEL = 50
AGE_SECONDS = 3600.0  # of the replicas


class PassCosts(Struct, frozen=True, kw_only=True):
    """Milliseconds, medians."""

    nodes: int
    pass_whole: float  # everything is read
    routes_whole: float
    pass_unchanged: float
    pass_changed: float
    routes_unchanged: float
    routes_changed: float
    other_routes_changed: float  # on the second frontend


def fill(connection: Connection, count: int) -> list[Replica]:
    """So many nodes, each full, and every model with as many replicas as are wanted."""
    now = db.now(connection)
    known = [a_model(number) for number in range(count * REPLICAS_PER_NODE // REPLICAS_PER_MODEL)]
    ready = [a_replica(number, known[number % len(known)]) for number in range(count * REPLICAS_PER_NODE)]
    for model in known:
        models.insert(connection, model, now)
        schedules.put(connection, Schedule(model_name=model.name, min_replicas=REPLICAS_PER_MODEL), now)
        load_infos.change(
            connection,
            model.name,
            lambda info, model=model: LoadInfo(model=info.model, revision=model.revision, memory_bytes=4 * GIB),  # type: ignore[misc]
        )
    for number in range(count):
        here = ready[number * REPLICAS_PER_NODE : (number + 1) * REPLICAS_PER_NODE]
        nodes.insert(connection, a_node(number, here, now), f"{number}")
    for number, one in enumerate(ready):
        replicas.put(connection, one, now - AGE_SECONDS + number / 1000)
    return ready


async def _timed(step: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await step()
    return (time.perf_counter() - began) * 1000


async def measure(count: int, rounds: int) -> PassCosts:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="passes-", dir=memory) as scratch:
        store = await WatchedStore.open(f"sqlite:///{scratch}/enginehouse.db")
        assert isinstance(store, WatchedStore)
        try:
            clock = Time()
            first, second = World(store, clock), World(store, clock, owner="other")
            ready = await store.transaction(lambda connection: fill(connection, count))
            return await _measure(first, second, ready, rounds)
        finally:
            store.close()


async def _measure(first: World, second: World, ready: list[Replica], rounds: int) -> PassCosts:
    steps = {
        "pass": first.reconciler.step,
        "routes": first.router.step,
        "other_routes": second.router.step,
    }
    unchanged: dict[str, list[float]] = {name: [] for name in steps}
    changed: dict[str, list[float]] = {name: [] for name in steps}
    whole: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3):
        for step in steps.values():
            await step()  # the first ones read everything
    for number in range(rounds):
        for name, step in steps.items():
            unchanged[name].append(await _timed(step))
        other = msgspec.structs.replace(ready[number], nonce=f"other-{number}", address=f"h:{30_000 + number}")
        await first.store.transaction(lambda c, other=other: replicas.put(c, other, db.now(c)))  # type: ignore[misc]
        for name, step in steps.items():
            changed[name].append(await _timed(step))
        # As a frontend that has just started.
        first.reconciler._quiet, first.router._rows_before = None, None
        for name, step in steps.items():
            whole[name].append(await _timed(step))
    assert len(first.router.routes()) == len(second.router.routes()) == len(ready)
    return PassCosts(
        nodes=len(ready) // REPLICAS_PER_NODE,
        pass_whole=statistics.median(whole["pass"]),
        routes_whole=statistics.median(whole["routes"]),
        pass_unchanged=statistics.median(unchanged["pass"]),
        pass_changed=statistics.median(changed["pass"]),
        routes_unchanged=statistics.median(unchanged["routes"]),
        routes_changed=statistics.median(changed["routes"]),
        other_routes_changed=statistics.median(changed["other_routes"]),
    )
