"""What a pass of the reconciler and a refresh of the routes cost, for bench/placement.py.

A real frontend without its loops, on SQLite in memory where there is one, with nodes, models, schedules and ready
replicas in its store. Each step is timed with nothing changed, and after one replica was replaced by another process;
the pass also after one node reported something else. The second frontend over the same store sees the same changes.

Checksums are sums in SQL over every row, so they are timed apart: the rest of a pass is what must not grow.
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
from enginehouse.store import checksums, db, load_infos, models, nodes, replicas, schedules
from enginehouse.store.db import Connection

REPLICAS_PER_MODEL = 50
AGE_SECONDS = 3600.0  # of the replicas, and of the last change of each node


class PassCosts(Struct, frozen=True, kw_only=True):
    """Milliseconds, medians."""

    nodes: int
    pass_whole: float  # everything is read
    routes_whole: float
    pass_unchanged: float
    pass_changed: float
    pass_reported: float  # after another report
    checksums: float  # part of both: they are compared by the look before the pass, and by the pass
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
        node = msgspec.structs.replace(a_node(number, here, now), updated_at=now - AGE_SECONDS + number / 100)
        nodes.insert(connection, node, f"{number}")
    for number, one in enumerate(ready):
        replicas.put(connection, one, now - AGE_SECONDS + number / 1000)
    return ready


async def _timed(step: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await step()
    return (time.perf_counter() - began) * 1000


def _compare(connection: Connection) -> float:
    began = time.perf_counter()
    checksums.of_serving(connection)
    checksums.of_serving_by_model(connection)
    return (time.perf_counter() - began) * 1000


def _report(connection: Connection, one: Replica) -> None:
    """The node of this replica shows that one of its processes takes less memory now."""
    node = nodes.get(connection, one.node_id)
    assert node is not None
    first, *others = node.report.replicas
    less = msgspec.structs.replace(first, memory_bytes=first.memory_bytes - 1)
    report = msgspec.structs.replace(node.report, replicas=(less, *others))
    nodes.set_report(connection, node.id, report, db.now(connection))


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
    reported: list[float] = []
    compared: list[float] = []
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
        compared.append(await first.store.look(_compare))
        await first.store.transaction(lambda c, number=number: _report(c, ready[number]))  # type: ignore[misc]
        reported.append(await _timed(first.reconciler.step))
        # As a frontend that has just started.
        first.reconciler._quiet = first.reconciler._known = first.router._rows_before = None
        for name, step in steps.items():
            whole[name].append(await _timed(step))
    assert len(first.router.routes()) == len(second.router.routes()) == len(ready)
    return PassCosts(
        nodes=len(ready) // REPLICAS_PER_NODE,
        pass_whole=statistics.median(whole["pass"]),
        routes_whole=statistics.median(whole["routes"]),
        pass_unchanged=statistics.median(unchanged["pass"]),
        pass_changed=statistics.median(changed["pass"]),
        pass_reported=statistics.median(reported),
        checksums=statistics.median(compared),
        routes_unchanged=statistics.median(unchanged["routes"]),
        routes_changed=statistics.median(changed["routes"]),
        other_routes_changed=statistics.median(changed["other_routes"]),
    )
