"""The web page in a real Chromium: how soon it is there, whether it stays small, and what it costs a frontend.

Chromium shows the page's own files with a canned cluster behind them: 100 nodes, 1,000 entries of the catalogue, 1,000
operations. Measured are the first paint and the full lists, each from a navigation with an empty cache; the memory of
the page and the CPU of the process that draws it while 200 events a second arrive; the bytes of a first visit of every
page; and, with a real frontend, what 50 open pages cost it while nothing happens. The figure is the worst part of its
bar; 1 is the most.

The flood takes half an hour, with `--quick` 25 seconds and beside the measurement of the frontend.

    .venv/bin/python bench/page.py [--quick] [--minutes 30] [--nodes 100]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from playwright.async_api import Browser, Playwright, async_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))  # this is run as a script, and its neighbours are in a package

from bench.scaling.figures import Figure
from bench.window.browser import HOST, Shown, Soaked, chromium, load, soak, transfer
from bench.window.served import ENTRIES, NODES, OPERATIONS, served
from bench.window.watched import Watched, cost_of_watchers

SHOWN_MS = 1000.0
HEAP_GROWTH, COUNT_GROWTH = 5.0, 5.0  # per cent
RENDERER_CORES = 0.1
TRANSFER_BYTES = 250_000
WATCHERS, WATCHERS_CORES = 50, 0.05
EVENTS_PER_SECOND = 200
_FLOOD = 220  # nominal: the server sleeps a twentieth of a second between its pieces and works beside that

FLEET = f"document.querySelectorAll('main .panel').length === {NODES}"
LISTS = {
    "fleet": ("#/fleet", FLEET),
    # A page of the history has 100; more are shown when they are asked for.
    "operations": ("#/operations", "document.querySelectorAll('main a.row').length >= 100"),
    # A window of a list: the rows in sight exist.
    "catalogue": (
        "#/backends?show=all",
        f"document.querySelector('main .slot[aria-setsize=\"{ENTRIES}\"]') && document.querySelector('table.matrix')",
    ),
}
GOING = "#/operations/00000001-0000-4000-8000-000000000000"
SOAKED = {
    "fleet": ("#/fleet", FLEET),
    "an operation on 100 nodes": (GOING, f"document.querySelectorAll('main .noderow').length === {NODES}"),
}
VISITED = [
    *("#/fleet", "#/nodes/node-000", "#/operations", GOING, "#/backends", "#/models", "#/models/qwen"),
    *("#/chat", "#/logs", "#/logs/node-000", "#/access", "#/settings"),
]


class Plan(Struct, frozen=True, kw_only=True):
    """How much of it is measured."""

    loads: int
    looks: tuple[float, ...]  # seconds after the page was opened, the first after it is warm
    nodes: int
    idle_seconds: float
    is_side_by_side: bool


async def figures_of_loads(browser: Browser, root: str, count: int) -> list[Figure]:
    await load(browser, f"{root}/#/fleet", FLEET)  # Chromium's own first time
    found: dict[str, list[Shown]] = {name: [] for name in ("empty", *LISTS)}
    for _ in range(count):
        found["empty"].append(await load(browser, f"{root}/empty", "document.querySelector('p')"))
        for name, (address, condition) in LISTS.items():
            found[name].append(await load(browser, f"{root}/{address}", condition))
    empty = statistics.median(one.first_paint for one in found["empty"])
    print(f"an empty page of the same server: first paint {empty:.0f} ms")
    figures: list[Figure] = []
    for name in LISTS:
        paint = statistics.median(one.first_paint for one in found[name])
        there = statistics.median(one.there for one in found[name])
        drawn = statistics.median(one.drawn for one in found[name])
        slowest = max(one.drawn for one in found[name])
        figures += [
            Figure(
                name=f"first paint of the {name}",
                value=paint,
                unit=" ms",
                bar=SHOWN_MS,
                remark=f"{paint / empty:.1f} x an empty page",
            ),
            Figure(
                name=f"full list of the {name}",
                value=drawn,
                unit=" ms",
                bar=SHOWN_MS,
                remark=f"{drawn / empty:.1f} x an empty page; in the document after {there:.0f} ms, "
                f"the slowest of {count} {slowest:.0f} ms",
            ),
        ]
    return figures


async def figures_of_transfer(browser: Browser, root: str) -> list[Figure]:
    found = await transfer(browser, f"{root}/", VISITED)
    answers = sorted(found.answers.items(), key=lambda one: -one[1])
    listed = ", ".join(f"{path} {size / 1000:.0f} kB" for path, size in answers[:6])
    print(f"the API's answers of that visit, beside the page's own files: {listed}")
    remark = f"{found.files} files, {len(VISITED)} pages visited, API {sum(found.answers.values()) / 1000:.0f} kB"
    return [
        Figure(name="transfer of a first visit", value=found.own / 1000, unit=" kB", bar=TRANSFER_BYTES / 1000,
               remark=remark)
    ]  # fmt: skip


async def figures_of_flood(playwright: Playwright, looks: Sequence[float]) -> list[Figure]:
    """Each page in a browser of its own, whose processes are its own."""
    soaked: dict[str, Soaked] = {}

    async def one(name: str) -> None:
        address, condition = SOAKED[name]
        with served(_FLOOD) as port:
            root = f"http://{HOST}:{port}"
            async with chromium(playwright) as browser:
                soaked[name] = await soak(
                    browser, f"{root}/{address}", f"http://127.0.0.1:{port}/sent", condition, list(looks)
                )

    async with asyncio.TaskGroup() as group:
        for name in SOAKED:
            group.create_task(one(name))
    return [figure for name in SOAKED for figure in figures_of_soaked(name, soaked[name])]


def figures_of_soaked(name: str, soaked: Soaked) -> list[Figure]:
    first, last = soaked.samples[0], soaked.samples[-1]
    looks = ", ".join(f"{one.heap_bytes / 1e6:.2f} ({one.seconds:.0f} s)" for one in soaked.samples)
    print(f"{name}: MB after a collection: {looks}")
    if soaked.events_per_second < EVENTS_PER_SECOND:
        print(f"{name}: only {soaked.events_per_second:.0f} events a second arrived: the machine is too busy")
    return [
        Figure(
            name=f"memory with {name}, more from {first.seconds:.0f} s to {last.seconds:.0f} s",
            value=growth(first.heap_bytes, last.heap_bytes),
            unit=" %",
            bar=HEAP_GROWTH,
        ),
        Figure(
            name=f"elements with {name}, more",
            value=growth(first.nodes, last.nodes),
            unit=" %",
            bar=COUNT_GROWTH,
            remark=f"{first.nodes:.0f} -> {last.nodes:.0f}",
        ),
        Figure(
            name=f"listeners with {name}, more",
            value=growth(first.listeners, last.listeners),
            unit=" %",
            bar=COUNT_GROWTH,
            remark=f"{first.listeners:.0f} -> {last.listeners:.0f}",
        ),
        Figure(
            name=f"CPU of the renderer with {name}",
            value=soaked.renderer_cores,
            unit=" of a core",
            bar=RENDERER_CORES,
            remark=f"{soaked.events_per_second:.0f} events a second; "
            f"drawing without a graphics card takes another {soaked.gpu_cores:.2f}",
        ),
    ]


def growth(first: float, last: float) -> float:
    """In per cent; what shrinks has not grown."""
    return max(0.0, 100 * (last / first - 1))


async def figures_of_watchers(plan: Plan) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="page-") as place:
        found: Watched = await cost_of_watchers(Path(place), plan.nodes, WATCHERS, plan.idle_seconds)
    return [
        Figure(
            name=f"{WATCHERS} open pages, of a frontend with {plan.nodes} idle nodes",
            value=max(0.0, found.beside - found.without),
            unit=" of a core",
            bar=WATCHERS_CORES,
            remark=f"{found.without:.3f} without, {found.beside:.3f} with; "
            f"{found.bytes_per_watcher / 1000:.1f} kB/s to each",
        )
    ]


async def measure(plan: Plan) -> list[Figure]:
    figures: list[Figure] = []

    def keep(found: list[Figure]) -> None:
        for figure in found:
            print(f"  {figure}", flush=True)
        figures.extend(found)

    print(f"{NODES} nodes, {ENTRIES} entries, {OPERATIONS} operations, medians of {plan.loads}:", flush=True)
    async with async_playwright() as playwright:
        with served() as port:
            root = f"http://{HOST}:{port}"
            async with chromium(playwright) as browser:
                keep(await figures_of_loads(browser.browser, root, plan.loads))
                if plan.is_side_by_side:
                    async with asyncio.TaskGroup() as group:
                        visited = group.create_task(figures_of_transfer(browser.browser, root))
                        flooded = group.create_task(figures_of_flood(playwright, plan.looks))
                        watched = group.create_task(figures_of_watchers(plan))
                    for one in (visited, flooded, watched):
                        keep(one.result())
                    return figures
                keep(await figures_of_transfer(browser.browser, root))
        keep(await figures_of_flood(playwright, plan.looks))
        keep(await figures_of_watchers(plan))
    return figures


async def main() -> int:
    parser = argparse.ArgumentParser(description="The web page in Chromium, and what open pages cost a frontend.")
    parser.add_argument("--quick", action="store_true", help="25 s of events instead of half an hour, under 50 s")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long events arrive")
    parser.add_argument("--nodes", type=int, default=100, help="of the real frontend")
    given = parser.parse_args()
    if given.quick:
        plan = Plan(loads=3, looks=(13.0, 18.0, 23.0), nodes=given.nodes, idle_seconds=10.0, is_side_by_side=True)
    else:
        last = 60.0 * given.minutes
        looks = (last / 10, *(last * part / 10 for part in range(2, 11)))
        plan = Plan(loads=9, looks=looks, nodes=given.nodes, idle_seconds=60.0, is_side_by_side=False)
    began = time.perf_counter()
    figures = await measure(plan)
    worst = max(figures, key=lambda one: one.part)
    print(f"{time.perf_counter() - began:.0f} s in all")
    print(f"page: {worst.part:.2f} (bar 1.0: the worst of {len(figures)} figures over its own bar, {worst.name})")
    return 0 if worst.part <= 1.0 else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
