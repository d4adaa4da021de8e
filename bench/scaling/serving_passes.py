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
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
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
    """Milliseconds of CPU time, medians: what else runs on the machine counts least then."""

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
    began = time.process_time()
    await step()
    return (time.process_time() - began) * 1000


def _compare(connection: Connection) -> float:
    began = time.process_time()
    checksums.of_serving(connection)
    checksums.of_serving_by_model(connection)
    return (time.process_time() - began) * 1000


def _report(connection: Connection, one: Replica) -> None:
    """The node of this replica shows that one of its processes takes less memory now."""
    node = nodes.get(connection, one.node_id)
    assert node is not None
    first, *others = node.report.replicas
    less = msgspec.structs.replace(first, memory_bytes=first.memory_bytes - 1)
    report = msgspec.structs.replace(node.report, replicas=(less, *others))
    nodes.set_report(connection, node.id, report, db.now(connection))


class _Filled(Struct, kw_only=True):
    """Two frontends over one store, and the milliseconds of CPU of each step in every round."""

    first: World
    second: World
    ready: list[Replica]
    took: dict[str, list[float]] = msgspec.field(default_factory=lambda: defaultdict(list))

    @property
    def steps(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {
            "pass": self.first.reconciler.step,
            "routes": self.first.router.step,
            "other_routes": self.second.router.step,
        }

    def median(self, name: str) -> float:
        return statistics.median(self.took[name])


async def measure(counts: Sequence[int], rounds: int) -> list[PassCosts]:
    """Of fleets with so many nodes, which take turns: other work on the machine slows all of them."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="passes-", dir=memory) as scratch, ExitStack() as stores:
        fleets = []
        for count in counts:
            store = await WatchedStore.open(f"sqlite:///{scratch}/{count}.db")
            stores.callback(store.close)
            assert isinstance(store, WatchedStore)
            clock = Time()
            ready = await store.transaction(partial(fill, count=count))
            fleet = _Filled(first=World(store, clock), second=World(store, clock, owner="other"), ready=ready)
            for _ in range(3):
                for step in fleet.steps.values():
                    await step()  # the first ones read everything
            fleets.append(fleet)
        for number in range(rounds):
            for fleet in fleets:
                await _round(fleet, number)
        return [_costs(fleet) for fleet in fleets]


async def _round(fleet: _Filled, number: int) -> None:
    first, ready, took = fleet.first, fleet.ready, fleet.took
    for name, step in fleet.steps.items():
        took[f"{name}_unchanged"].append(await _timed(step))
    other = msgspec.structs.replace(ready[number], nonce=f"other-{number}", address=f"h:{30_000 + number}")
    await first.store.transaction(lambda c: replicas.put(c, other, db.now(c)))
    for name, step in fleet.steps.items():
        took[f"{name}_changed"].append(await _timed(step))
    took["checksums"].append(await first.store.look(_compare))
    await first.store.transaction(lambda c: _report(c, ready[number]))
    took["pass_reported"].append(await _timed(first.reconciler.step))
    # As a frontend that has just started.
    first.reconciler._quiet = first.reconciler._known = first.router._rows_before = None
    for name, step in fleet.steps.items():
        took[f"{name}_whole"].append(await _timed(step))
    assert len(first.router.routes()) == len(fleet.second.router.routes()) == len(ready)


def _costs(fleet: _Filled) -> PassCosts:
    return PassCosts(
        nodes=len(fleet.ready) // REPLICAS_PER_NODE,
        pass_whole=fleet.median("pass_whole"),
        routes_whole=fleet.median("routes_whole"),
        pass_unchanged=fleet.median("pass_unchanged"),
        pass_changed=fleet.median("pass_changed"),
        pass_reported=fleet.median("pass_reported"),
        checksums=fleet.median("checksums"),
        routes_unchanged=fleet.median("routes_unchanged"),
        routes_changed=fleet.median("routes_changed"),
        other_routes_changed=fleet.median("other_routes_changed"),
    )
