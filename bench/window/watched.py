"""A real frontend with nodes that only send heartbeats: what fifty open pages cost it while nothing happens.

A page that is open and idle is its event stream and nothing else, so the pages are streams of a plain client, opened by
the page's own request.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import NamedTuple

from bench.fanout import TOKENS
from bench.scaling.clusters import Cluster, RunningFrontend
from bench.scaling.stream_watchers import StreamWatcher
from bench.scaling.stub_workers import StubWorkers

CALM_SECONDS = 1.5  # after the nodes have joined, and after the streams were opened
LIMIT_SECONDS = 60.0


class Watched(NamedTuple):
    """Parts of a core."""

    without: float
    beside: float
    bytes_per_watcher: float  # and second


async def cost_of_watchers(place: Path, nodes: int, watchers: int, seconds: float) -> Watched:
    """`seconds` should be a multiple of the ten between two heartbeats of a node."""
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        workers = StubWorkers(nodes, TOKENS["join"], group)
        keys = [one.public_key for one in workers.nodes]
        cluster = Cluster(place, f"sqlite:///{place / 'bench.db'}", keys, stack)
        await cluster.start_bus()
        frontend = await cluster.start_frontend()
        try:
            await workers.begin(frontend.port, cluster.bus_url, cluster.accounts)
            async with asyncio.timeout(LIMIT_SECONDS):
                await workers.join(workers.nodes)
            await asyncio.sleep(CALM_SECONDS)
            without = await _cores(frontend, seconds)
            pages = [StreamWatcher(frontend.port, TOKENS["admin"]) for _ in range(watchers)]
            watching = [group.create_task(one.run()) for one in pages]
            async with asyncio.timeout(LIMIT_SECONDS):
                for one in pages:
                    await one.is_open.wait()
            await asyncio.sleep(CALM_SECONDS)
            received = sum(one.received_bytes for one in pages)
            beside = await _cores(frontend, seconds)
            received = sum(one.received_bytes for one in pages) - received
            for task in watching:
                task.cancel()
            if any(one.cuts for one in pages):
                raise SystemExit("a stream of events ended although nothing happened")
        finally:
            await workers.leave()
    return Watched(without, beside, received / watchers / seconds)


async def _cores(frontend: RunningFrontend, seconds: float) -> float:
    loop = asyncio.get_running_loop()
    before, began = frontend.cpu_seconds(), loop.time()
    await asyncio.sleep(seconds)
    return (frontend.cpu_seconds() - before) / (loop.time() - began)
