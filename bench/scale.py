"""A fleet that grows to hundreds or a thousand nodes: what an install, an idle fleet and a power cut cost.

A real frontend with SQLite and with PostgreSQL, real NATS, stub workers in this process, 50 watchers. One cluster per
database grows: 8 idle nodes, an install to 10, to 100, then all nodes register at once as after a power cut, and an
install to all of them; then the fleet is idle, and a second frontend joins. Bars are ratios within one run where that
is possible. The figure is the worst part of its bar; 1 is the most.

    .venv/bin/python bench/scale.py [--quick] [--nodes 1000] [--plot FILE] [--database sqlite]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a script, and its neighbours are in a package

from bench.backlog import databases
from bench.fanout import TOKENS
from bench.scaling.clusters import WARM_MODEL, Cluster, PostgresMeter, RunningFrontend, running_cluster
from bench.scaling.figures import (
    COMPARED,
    HEALTHY_SECONDS,
    WARM_MORE_MS,
    Figure,
    Idle,
    Installed,
    figures_of_idle,
    figures_of_installs,
    plot,
)
from bench.scaling.stream_watchers import NodeWatcher, StreamWatcher
from bench.scaling.stub_workers import HEARTBEAT_SECONDS, HttpConnection, Refused, StubWorkers
from bench.scaling.warm_requests import WarmRequests
from bench.serving import places

from enginehouse.core.errors import Unavailable

WATCHERS = 50
FEW, SMALL = 8, 10
LIMIT_SECONDS = 600.0  # for one install or one power cut; a fleet that takes longer is broken
CALM_SECONDS = 60.0  # at most, between an install and what is idle
CALM_STEP_SECONDS = 0.5
ANSWERED_SECONDS = 0.6  # a little more than heartbeats of a large fleet wait for each other
PROBE_SECONDS = 0.25  # between looks at the nodes during an install


class Plan(Struct, frozen=True, kw_only=True):
    """How much of it is measured."""

    nodes: int
    idle_seconds: float
    statement_seconds: float
    warm_seconds: float

    @property
    def steps(self) -> tuple[int, ...]:
        """Installs before all nodes are there."""
        return tuple(sorted({SMALL, COMPARED, *((300,) if self.nodes > 300 else ())}))


class Measured(NamedTuple):
    installs: list[Installed]
    figures: list[Figure]


class Stage:
    """One cluster while it grows."""

    def __init__(self, cluster: Cluster, workers: StubWorkers, meter: PostgresMeter | None, plan: Plan) -> None:
        self._cluster = cluster
        self._workers = workers
        self._meter = meter
        self.plan = plan
        self._frontend = cluster.frontends[0]
        self._watchers = [StreamWatcher(self._frontend.port, TOKENS["admin"]) for _ in range(WATCHERS - 1)]
        self.nodes = NodeWatcher(self._frontend.port, TOKENS["admin"])
        self._watchers.append(self.nodes)
        self._reader = HttpConnection(self._frontend.port)
        self._refused = 0  # lists of nodes

    @property
    def has_meter(self) -> bool:
        return self._meter is not None

    @contextlib.asynccontextmanager
    async def watched(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        watching = [group.create_task(watcher.run()) for watcher in self._watchers]
        try:
            for watcher in self._watchers:
                await watcher.is_open.wait()
            yield
        finally:
            for task in watching:
                task.cancel()

    async def grow(self, count: int) -> None:
        """Until so many nodes have joined and are shown as healthy."""
        await self._workers.join([one for one in self._workers.nodes[:count] if not one.node_id])
        await self._all_healthy(count)

    async def _all_healthy(self, count: int) -> None:
        async with asyncio.timeout(LIMIT_SECONDS):
            await self.nodes.until_healthy({one.node_id for one in self._workers.nodes[:count]})

    async def install(self, group: asyncio.TaskGroup) -> Installed:
        """One install to every node there is."""
        count = sum(bool(one.node_id) for one in self._workers.nodes)
        idle_ms = statistics.mean([await self._nodes_ms() for _ in range(9)])
        received = sum(watcher.received_bytes for watcher in self._watchers)
        cuts, failures = sum(watcher.cuts for watcher in self._watchers), len(self._workers.failures)
        before, began, own = self._frontend.cpu_seconds(), time.perf_counter(), own_cpu_seconds()
        operation = await asyncio.to_thread(request_install, self._frontend, f"engine-{count}")
        probing = group.create_task(self._probe())
        async with asyncio.timeout(LIMIT_SECONDS):
            seen = [await watcher.saw(operation) for watcher in self._watchers]
            probed = await _ended(probing)
            while (status := await asyncio.to_thread(status_of, self._frontend, operation)) != "succeeded":
                if status not in ("queued", "running", "unavailable"):
                    raise SystemExit(f"the install to {count} nodes {status}")
                await asyncio.sleep(0.05)
            shown = time.perf_counter()
        took = max(*seen, shown) - began
        return Installed(
            nodes=count,
            seconds=took,
            cpu_seconds=self._frontend.cpu_seconds() - before,
            bytes_per_watcher=(sum(watcher.received_bytes for watcher in self._watchers) - received) / WATCHERS,
            nodes_ms=statistics.mean(probed),
            idle_nodes_ms=idle_ms,
            cuts=sum(watcher.cuts for watcher in self._watchers) - cuts,
            remark=f"the last watcher after {max(seen) - began:.2f} s, the slowest list {max(probed):.0f} ms, "
            f"{self._refused} lists refused, "
            f"{len(self._workers.failures) - failures} failed heartbeats, "
            f"stubs {(own_cpu_seconds() - own) / took:.2f} of a core",
        )

    async def _probe(self) -> list[float]:
        """Lists of nodes until it is cancelled, one after the other."""
        found: list[float] = []
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(PROBE_SECONDS)
                found.append(await self._nodes_ms())
        return found or [0.0]

    async def _nodes_ms(self) -> float:
        began = time.perf_counter()
        try:
            await self._reader.ask("GET", "/api/nodes?limit=100", TOKENS["admin"])
        except Refused:
            self._refused += 1
        return (time.perf_counter() - began) * 1000

    async def _calm(self) -> None:
        """Until what was before is over: heartbeats are answered soon, none is repeated, and the frontend does not
        do less and less.
        """
        deadline, before = time.monotonic() + CALM_SECONDS, float("inf")
        while time.monotonic() < deadline:
            failures, cpu = len(self._workers.failures), self._frontend.cpu_seconds()
            await asyncio.sleep(CALM_STEP_SECONDS)
            spent = self._frontend.cpu_seconds() - cpu
            is_answered = self._workers.unanswered <= self.plan.nodes * ANSWERED_SECONDS / HEARTBEAT_SECONDS
            if is_answered and len(self._workers.failures) == failures and spent >= 0.7 * before:
                return
            before = spent

    async def idle(self) -> Idle:
        await self._calm()
        seconds = self.plan.idle_seconds
        before = [one.cpu_seconds() for one in self._cluster.frontends]
        postgres = self._meter.cpu_seconds() if self._meter else 0.0
        await asyncio.sleep(seconds)
        cores = (
            sum(one.cpu_seconds() - then for one, then in zip(self._cluster.frontends, before, strict=True)) / seconds
        )
        counted: list[int] = [0, 0]
        if self._meter is not None:
            postgres = (self._meter.cpu_seconds() - postgres) / seconds
            counted.clear()
            with self._meter.counting(counted):
                await asyncio.sleep(self.plan.statement_seconds)
        statements, transactions = (count / self.plan.statement_seconds for count in counted)
        joined = sum(bool(one.node_id) for one in self._workers.nodes)
        return Idle(
            nodes=joined, cores=cores, postgres_cores=postgres, statements=statements, transactions=transactions
        )

    async def power_comes_back(self, warm: WarmRequests) -> list[Figure]:
        """Every node registers at once, those that are known and those that are new."""
        await warm.since_last()
        await asyncio.sleep(self.plan.warm_seconds)
        before = await warm.since_last()
        every, own, failures = self._workers.nodes, own_cpu_seconds(), len(self._workers.failures)
        self.nodes.flaps, began = 0, time.perf_counter()
        await self._workers.join(every)
        registered = time.perf_counter() - began
        await self._all_healthy(len(every))
        took = time.perf_counter() - began
        meanwhile = await warm.since_last()
        remark = (
            f"registered after {registered:.1f} s, {len(self._workers.failures) - failures} calls repeated, "
            f"stubs {(own_cpu_seconds() - own) / took:.2f} of a core"
        )
        described = (
            f"{before.p99:.1f} -> {meanwhile.p99:.1f} ms, median {before.median:.1f} -> {meanwhile.median:.1f} ms, "
            f"direct {before.direct_p99:.1f} -> {meanwhile.direct_p99:.1f} ms, "
            f"{meanwhile.requests} requests, {meanwhile.failures} failed"
        )
        added = meanwhile.p99 - before.p99
        return [
            Figure(name="all healthy", value=took, unit=" s", bar=HEALTHY_SECONDS, remark=remark),
            Figure(name="p99 of warm requests, added", value=added, unit=" ms", bar=WARM_MORE_MS, remark=described),
            Figure(name="failed warm requests", value=meanwhile.failures, bar=0),
        ]


async def _ended(probing: asyncio.Task[list[float]]) -> list[float]:
    probing.cancel()
    return await probing


def own_cpu_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


def request_install(frontend: RunningFrontend, name: str) -> str:
    """The id of the operation. A frontend that has no answer is asked again for the same."""
    request = {"kind": "install", "name": name, "uri": "pypi:engine==1"}
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            answer = frontend.client.request("POST", "/api/operations", request, dict[str, object], key=name)
            return str(answer["jobID"])
        except Unavailable as error:
            print(f"  a request was refused: {error}")
            if time.monotonic() > deadline:
                raise


def status_of(frontend: RunningFrontend, operation: str) -> str:
    """As it is shown; "unavailable" if it is not."""
    try:
        shown = frontend.client.request("GET", f"/api/operations/{operation}", None, dict[str, object])
    except Unavailable:
        return "unavailable"
    return str(shown["status"])


async def measure(
    place: Path, database: str, postgres: Path | None, plan: Plan
) -> tuple[list[Installed], list[Figure]]:
    """`postgres` is the directory of the server, where it is one."""
    meter = PostgresMeter(postgres, database) if postgres is not None else None
    with places.engine("stub") as engine:
        async with asyncio.TaskGroup() as group:
            workers = StubWorkers(plan.nodes, TOKENS["join"], group)
            keys = [one.public_key for one in workers.nodes]
            async with running_cluster(place, database, keys, engine.port) as cluster:
                await workers.begin(cluster.frontends[0].port, cluster.bus_url, cluster.accounts)
                warm = await WarmRequests.start(cluster.frontends[0].port, engine.port, TOKENS["admin"], WARM_MODEL)
                stage = Stage(cluster, workers, meter, plan)
                try:
                    async with stage.watched(group):
                        found = await run_stages(cluster, stage, warm, group)
                finally:
                    await warm.stop()
                    await workers.leave()
    return found


async def run_stages(cluster: Cluster, stage: Stage, warm: WarmRequests, group: asyncio.TaskGroup) -> Measured:
    few = two = None
    has_meter = stage.has_meter
    await stage.grow(FEW)
    if has_meter:
        few = await stage.idle()
    installs: list[Installed] = []
    for count in stage.plan.steps:
        await stage.grow(count)
        installs.append(await stage.install(group))
        say(installs[-1])
    joining = await stage.power_comes_back(warm)
    installs.append(await stage.install(group))
    say(installs[-1])
    many = await stage.idle()
    if has_meter:
        await cluster.start_frontend()
        two = await stage.idle()
    flaps = Figure(name="nodes that flapped", value=stage.nodes.flaps, bar=0)
    return Measured(installs, [*figures_of_installs(installs), *figures_of_idle(few, many, two), *joining, flaps])


def say(one: Installed) -> None:
    print(
        f"  {one.nodes:5d} nodes: {one.seconds:.2f} s, frontend {one.cpu_seconds:.2f} s of CPU "
        f"({one.cpu_ms_per_node:.2f} ms per node), {one.bytes_per_watcher / 1e6:.2f} MB per watcher, "
        f"nodes {one.idle_nodes_ms:.1f} -> {one.nodes_ms:.1f} ms, {one.cuts} watchers cut off; {one.remark}",
        flush=True,
    )


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="scale-") as made:
        Path(made).chmod(0o755)  # as root, PostgreSQL runs as another user
        yield Path(made)


async def main() -> int:
    parser = argparse.ArgumentParser(description="What installs, idle nodes and a power cut cost in a large fleet.")
    parser.add_argument("--quick", action="store_true", help="300 nodes instead of 1,000, under 50 s")
    parser.add_argument("--nodes", type=int, help="how many")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), help="only this one")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw times and CPU as SVG")
    given = parser.parse_args()
    nodes = given.nodes or (300 if given.quick else 1000)
    if given.quick:
        plan = Plan(nodes=nodes, idle_seconds=2.5, statement_seconds=1.5, warm_seconds=1.5)
    else:
        plan = Plan(nodes=nodes, idle_seconds=20.0, statement_seconds=10.0, warm_seconds=10.0)
    measured: dict[str, list[Installed]] = {}
    figures: list[Figure] = []
    began = time.perf_counter()
    with scratch() as place, databases(place) as kinds:
        for kind in [given.database] if given.database else list(kinds):
            print(f"{kind}:", flush=True)
            (place / kind).mkdir()
            server = place / "postgres" if kind == "postgresql" else None
            measured[kind], found = await measure(place / kind, kinds[kind](), server, plan)
            for figure in found:
                print(f"  {figure}", flush=True)
            figures += found
    if given.plot is not None:
        given.plot.write_text(plot(measured))
    worst = max(figures, key=lambda one: one.part)
    print(f"{time.perf_counter() - began:.0f} s in all")
    print(f"scale: {worst.part:.2f} (bar 1.0: the worst of {len(figures)} figures over its own bar, {worst.name})")
    return 0 if worst.part <= 1.0 else 1


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
