"""What placing, reconciling and routing cost in a large fleet: 1,000 nodes with 10,000 replicas, over a tenth of it.

A placement looks at every node once, so its cost per node must not grow with the fleet. The plan of one model must not
depend on how many other models there are. The choice of a route among 1,000 replicas has a bar of its own, with and
without regard to the prefix of a prompt of 2 KiB, and so has what a request for one replica pays for its route.

A pass of the reconciler with nothing to do, and a refresh of unchanged routes, are compared with a reading of
everything in the same store, and so are the pass and the routes of two frontends after one replica of 10,000 was
replaced. What such a pass costs beside its checksums, which are sums in SQL over all rows, must not grow with the
fleet: it is compared with that of a tenth of the nodes, and so is a pass after one report.

    .venv/bin/python bench/placement.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a script, and its neighbours are in a package

from bench.scaling import serving_passes
from tests.frontend.serving_rows import REPLICAS_PER_NODE

from enginehouse.core.backend import Resolved
from enginehouse.core.capacity import Capacity
from enginehouse.core.demand import Demand
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.node import Node
from enginehouse.core.placement import IdleReplica, Needs, NoRoom, Reservation, Room, place
from enginehouse.core.prefix import Thresholds
from enginehouse.core.reconcile import ModelFacts, ServingReplica, plan_model
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report
from enginehouse.core.routing import Route, choose_route
from enginehouse.core.schedule import LoadInfo, Schedule
from enginehouse.frontend.serving.prefixes import Candidates, Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts

GIB = 1024**3
BAR = 1.5  # cost per node at 1,000 nodes over that at 100
ROUTE_BAR_US = 20.0
PREFIX_BAR_US = 50.0  # of which the body is read and hashed for half
UNCHANGED_BAR = 0.1  # of a reading of everything, for a pass and for routes
CHANGED_BAR = 0.3  # the same where one replica of 10,000 is another
GROWTH_BAR = 2.0  # a pass after one change, without its checksums: 1,000 nodes over 100
MODEL = Model(name="m", backend="engine", files=(ModelFile("f", "builtin:f", "0" * 64, 4 * GIB),))
BUILD = Resolved(directory="engine", uri="pypi:engine==1", digest="sha256:1", meta="")


def node(number: int, replicas: int) -> Node:
    running = tuple(RunningReplica(model_id=f"other-{index}", replica_index=0) for index in range(replicas))
    return Node(
        id=NodeId(f"n{number:04d}"),
        name=f"n{number:04d}",
        node_type="backend",
        public_key="k",
        approved=True,
        health="healthy",
        drained=False,
        address="",
        http_address="",
        capability="default",
        platform="linux/amd64",
        labels={"zone": f"z{number % 10}"},
        max_replicas_per_model=1,
        capacity=Capacity(available_ram=(number % 32 + 1) * GIB, total_ram=64 * GIB, available_disk=100 * GIB),
        created_at=0.0,
        updated_at=0.0,
        last_heartbeat=0.0,
        report=Report(replicas=running),
    )


def fleet(number: int) -> tuple[Needs, list[Room]]:
    rooms = []
    for index in range(number):
        made = node(index, 10)
        held = Reservation(operation_id=f"o{index}", node_id=made.id, model="x", slot=0, memory_bytes=GIB)
        idle = IdleReplica(model="idle", slot=0, memory_bytes=GIB, used_at=float(index))
        rooms.append(Room(node=made, reserved=(held,) if index % 7 == 0 else (), idle=(idle,)))
    builds = {room.node.id: BUILD for room in rooms}
    demand = Demand(memory_bytes=5 * GIB, origin="configured")
    return Needs(model=MODEL, demand=demand, builds=builds, selector={"zone": "z3"}), rooms


def microseconds(work: Callable[[], object], times: int, rounds: int) -> float:
    """The median of the rounds."""
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(times):
            work()
        took.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(took)


def routes(number: int) -> list[Route]:
    return [
        Route(
            model="m",
            slot=0,
            node_id=NodeId(f"n{index}"),
            node_name=f"n{index}",
            address="h:1",
            key="k",
            revision="r",
            nonce=f"nonce{index}",
        )
        for index in range(number)
    ]


def by_prefix(many: list[Route], busy: dict[str, int], rounds: int) -> float:
    """The choice among many, of a conversation that is known; its body is read and hashed for it."""
    prefixes = Prefixes(time.monotonic)
    among = Candidates(many, {one.id: one for one in many}, Thresholds())
    body = b'{"model":"m","messages":[{"role":"user","content":"%s"}]}' % (b"word " * 400)

    def choose() -> object:
        return prefixes.choose(prefixes.chain_of("m", body), among, lambda one: busy[one.id] + 1)

    return microseconds(choose, 500, rounds)


async def acquired(limit: int, rounds: int) -> float:
    nothing = cast(Any, None)  # neither the store nor the loader is asked for a known route
    parts = RouterParts(rows=RouteRows(), prefixes=Prefixes(time.monotonic), queues=RequestQueues())
    router = Router(nothing, nothing, wait_seconds=1.0, memory_seconds=1e9, parts=parts)
    router._routes = {"m": [msgspec.structs.replace(routes(1)[0], limit=limit)]}
    router._looked_at = asyncio.get_running_loop().time()
    took = []
    for _ in range(rounds * 10):
        began = time.perf_counter()
        for _ in range(200):
            router.release(await router.acquire("m", "token", b"{}"))
        took.append((time.perf_counter() - began) / 200 * 1e6)
    return statistics.median(took)


def of_everything(rounds: int) -> tuple[float, float]:
    """The worst part of its bar of what passes and refreshes cost, over a reading of everything; and how a pass after
    one change grows.
    """
    worst, rests = 0.0, []
    for found in asyncio.run(serving_passes.measure((100, 1000), rounds)):
        print(
            f"{found.nodes} nodes, {found.nodes * REPLICAS_PER_NODE} replicas: a pass that reads everything "
            f"{found.pass_whole:.1f} ms, with nothing to do {found.pass_unchanged:.2f} ms, after one change "
            f"{found.pass_changed:.1f} ms, after one report {found.pass_reported:.1f} ms, of which checksums "
            f"{found.checksums:.2f} ms; routes {found.routes_whole:.1f}, {found.routes_unchanged:.2f} and "
            f"{found.routes_changed:.1f} ms, on a second frontend {found.other_routes_changed:.1f} ms"
        )
        worst = max(
            worst,
            found.pass_unchanged / found.pass_whole / UNCHANGED_BAR,
            max(found.pass_changed, found.pass_reported) / found.pass_whole / CHANGED_BAR,
            found.routes_unchanged / found.routes_whole / UNCHANGED_BAR,
            max(found.routes_changed, found.other_routes_changed) / found.routes_whole / CHANGED_BAR,
        )
        rests.append((found.pass_changed - found.checksums, found.pass_reported - found.checksums))
    fewer, more = rests
    return worst, max(after / before for before, after in zip(fewer, more, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description="What placing, reconciling and routing cost in a large fleet.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 50 s")
    rounds = 7 if parser.parse_args().quick else 25
    per_node = {}
    for number in (100, 1000):
        needs, rooms = fleet(number)
        assert not isinstance(place(needs, rooms), NoRoom)
        took = microseconds(lambda needs=needs, rooms=rooms: place(needs, rooms), 1000 // number * 3, rounds)  # type: ignore[misc]
        per_node[number] = took / number
        print(f"a placement among {number} nodes: {took:.0f} us, {per_node[number]:.2f} us per node")
    replicas = [ServingReplica(node_id=NodeId(f"n{n}"), slot=0, created_at=0.0, last_used=0.0) for n in range(1000)]
    matching = [one.node_id for one in replicas]
    schedule = Schedule(model_name="m", min_replicas=1000)
    facts = ModelFacts(
        now=1.0, info=LoadInfo(model="m"), schedule=schedule, replicas=replicas, loading=(), matching=matching
    )
    print(f"the plan of a model with 1000 replicas: {microseconds(lambda: plan_model(facts), 5, rounds):.0f} us")
    many = routes(1000)
    busy = {route.id: index % 5 + 1 for index, route in enumerate(many)}
    turn = 0

    def choose() -> Route:
        nonlocal turn
        turn += 1
        return choose_route(many, busy, turn, lambda nonce: 1)

    route = microseconds(choose, 2000, rounds)
    print(f"the choice of a route among 1000: {route:.1f} us (bar {ROUTE_BAR_US:g} us)")
    affine = by_prefix(many, busy, rounds)
    print(f"the same by the prefix of 2 KiB: {affine:.1f} us (bar {PREFIX_BAR_US:g} us)")
    for limit in (0, 4):
        print(f"a route of one replica, limit {limit}, and its release: {asyncio.run(acquired(limit, rounds)):.2f} us")
    grows = per_node[1000] / per_node[100]
    passes, growth = of_everything(rounds)
    worst = max(grows / BAR, route / ROUTE_BAR_US, affine / PREFIX_BAR_US, passes, growth / GROWTH_BAR)
    figures = (
        f"cost per node at 1,000 over that at 100 is {grows:.2f} of {BAR:g}, route {route:.1f} and {affine:.1f} us, "
        f"passes and routes by what changed {passes:.2f}, a pass after one change grows {growth:.2f} times of "
        f"{GROWTH_BAR:g}"
    )
    print(f"placement: {worst:.2f} (bar 1: {figures})")
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
