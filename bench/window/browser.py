"""Chromium with the page: when something is there, how many bytes it takes, and what a flood of events costs.

Every visit is in a context of its own, so nothing is in a cache. CPU time is what the kernel counted for the processes
that draw pages; memory is what is left after a garbage collection that the browser was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import psutil
from playwright.async_api import Browser, BrowserContext, CDPSession, Playwright

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOST = "hundred-nodes.localhost"
LIMIT_MS = 30_000
TURNS, COLLECTIONS, BETWEEN_SECONDS = 4, 4, 0.5  # of one look at the memory
# Waits in the page itself: what is measured is when the document has it and when the frame after that is drawn.
_WAIT = """
window.benchShown = new Promise((resolve) => {
  const look = () => {
    if (!(%s)) return;
    observer.disconnect();
    const there = performance.now();
    requestAnimationFrame(() => setTimeout(() => resolve([there, performance.now()])));
  };
  const observer = new MutationObserver(look);
  observer.observe(document, { childList: true, subtree: true, attributes: true });
});
"""

_PAINT = """
() => new Promise((resolve) => {
  new PerformanceObserver((list) => {
    const [found] = list.getEntriesByName("first-contentful-paint");
    if (found) resolve(found.startTime);
  }).observe({ type: "paint", buffered: true });
})
"""


class Chromium:
    """One browser, and the processes that belong to it."""

    def __init__(self, browser: Browser, mark: str) -> None:
        self.browser = browser
        self._mark = mark

    def _processes(self, kind: str) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for top in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if self._mark in top.cmdline():
                    found |= {one.pid: one for one in top.children(recursive=True)}
        return [one for one in found.values() if _is_kind(one, kind)]

    def cpu_seconds(self, kind: str = "renderer") -> float:
        """Of all its processes of that kind."""
        total = 0.0
        for process in self._processes(kind):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _is_kind(process: psutil.Process, kind: str) -> bool:
    try:
        return f"--type={kind}" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@contextlib.asynccontextmanager
async def chromium(playwright: Playwright) -> AsyncIterator[Chromium]:
    mark = f"--bench-mark={uuid.uuid4().hex}"
    browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS, mark])
    try:
        yield Chromium(browser, mark)
    finally:
        await browser.close()


@contextlib.asynccontextmanager
async def fresh(browser: Browser) -> AsyncIterator[BrowserContext]:
    context = await browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(LIMIT_MS)
    try:
        yield context
    finally:
        await context.close()


class Shown(NamedTuple):
    """Milliseconds since the navigation."""

    first_paint: float
    there: float  # in the document
    drawn: float


async def load(browser: Browser, address: str, condition: str) -> Shown:
    """Until `condition`, an expression of JavaScript, is true of the document."""
    async with fresh(browser) as context:
        page = await context.new_page()
        await page.add_init_script(_WAIT % condition)
        await page.goto(address, wait_until="commit")
        there, drawn = await limited(page.evaluate("() => window.benchShown"), f"{address}: {condition}")
        paint = await limited(page.evaluate(_PAINT), f"{address}: its first paint")
        return Shown(float(paint), float(there), float(drawn))


async def limited(what: Any, name: str) -> Any:
    try:
        async with asyncio.timeout(LIMIT_MS / 1000):
            return await what
    except TimeoutError:
        raise SystemExit(f"waited {LIMIT_MS / 1000:.0f} s in vain for {name}") from None


class Transfer(NamedTuple):
    """Bytes over the wire, heads included."""

    own: int
    files: int
    answers: dict[str, int]  # of the API, by path


class _Wire:
    def __init__(self) -> None:
        self.paths: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.streamed: defaultdict[str, int] = defaultdict(int)
        self._news = asyncio.Event()

    def begins(self, told: dict[str, Any]) -> None:
        self.paths[told["requestId"]] = "/" + told["request"]["url"].split("/", 3)[3].partition("#")[0]

    def grows(self, told: dict[str, Any]) -> None:
        self.streamed[told["requestId"]] += int(told["encodedDataLength"])

    def ends(self, told: dict[str, Any]) -> None:
        self.sizes[told["requestId"]] = int(told["encodedDataLength"])
        self._news.set()

    @property
    def own(self) -> list[str]:
        return [one for one, path in self.paths.items() if path == "/" or path.startswith("/web/")]

    async def until_calm(self) -> None:
        """Until the page has every file it asked for."""
        while not all(one in self.sizes for one in self.own):
            self._news.clear()
            await self._news.wait()

    def transfer(self) -> Transfer:
        own, answers = self.own, defaultdict[str, int](int)
        for one, path in self.paths.items():
            if one not in own:
                answers[path.partition("?")[0]] += self.sizes.get(one, self.streamed[one])
        return Transfer(sum(self.sizes[one] for one in own), len(own), dict(answers))


async def transfer(browser: Browser, root: str, addresses: list[str]) -> Transfer:
    """What a first visit of all of them takes, one after the other."""
    async with fresh(browser) as context:
        page = await context.new_page()
        session, wire = await context.new_cdp_session(page), _Wire()
        session.on("Network.requestWillBeSent", wire.begins)
        session.on("Network.dataReceived", wire.grows)
        session.on("Network.loadingFinished", wire.ends)
        await session.send("Network.enable")
        await page.goto(root)
        for address in addresses:
            await page.evaluate("(address) => { location.hash = address; }", address)
            await page.wait_for_selector("main#main > *")
            # Two frames: what a page asks for when it is entered has been asked for.
            await page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 100)))")
        # Without a window, a browser does not ask for the icon.
        await page.evaluate("() => fetch('/web/icon.svg').then((answer) => answer.text())")
        await limited(wire.until_calm(), "the page's own files")
        return wire.transfer()


class Sample(NamedTuple):
    """What a page holds after a garbage collection."""

    seconds: float  # since the page was opened
    heap_bytes: float
    nodes: float
    listeners: float


async def sample(session: CDPSession, seconds: float) -> Sample:
    """The least of several collections: events are read between them, and V8 counts what is new in pages of 256 kB, so
    that one collection says one of two figures by chance.
    """
    found: list[Sample] = []
    for number in range(TURNS * COLLECTIONS):
        if number and number % COLLECTIONS == 0:
            await asyncio.sleep(BETWEEN_SECONDS)
        await session.send("HeapProfiler.collectGarbage")
        heap = await session.send("Runtime.getHeapUsage")
        metrics = (await session.send("Performance.getMetrics"))["metrics"]
        counts = {one["name"]: float(one["value"]) for one in metrics}
        used = float(heap["usedSize"]) + float(heap.get("backingStorageSize", 0))
        found.append(Sample(seconds, used, counts["Nodes"], counts["JSEventListeners"]))
    return Sample(seconds, *(min(one[at] for one in found) for at in (1, 2, 3)))


class Soaked(NamedTuple):
    samples: list[Sample]
    renderer_cores: float
    gpu_cores: float
    events_per_second: float


async def soak(browser: Chromium, address: str, sent: str, condition: str, at: list[float]) -> Soaked:
    """Show one page and look at it at those seconds; CPU counts between the looks and without them."""
    async with fresh(browser.browser) as context:
        page = await context.new_page()
        session = await context.new_cdp_session(page)
        await session.send("Performance.enable")
        await page.add_init_script(_WAIT % condition)
        await page.goto(address, wait_until="commit")
        await limited(page.evaluate("() => window.benchShown"), f"{address}: {condition}")
        began, samples = asyncio.get_running_loop().time(), list[Sample]()
        seconds = renderer = gpu = 0.0
        events = 0
        for moment in at:
            before = _now(), browser.cpu_seconds(), browser.cpu_seconds("gpu-process"), await _count(sent)
            await asyncio.sleep(max(0.0, began + moment - _now()))
            after = _now(), browser.cpu_seconds(), browser.cpu_seconds("gpu-process"), await _count(sent)
            if samples:  # before the first one, the page warms up
                seconds, renderer = seconds + after[0] - before[0], renderer + after[1] - before[1]
                gpu, events = gpu + after[2] - before[2], events + after[3] - before[3]
            samples.append(await sample(session, _now() - began))
        return Soaked(samples, renderer / seconds, gpu / seconds, events / seconds)


async def _count(sent: str) -> int:
    def ask() -> int:
        with urllib.request.urlopen(sent, timeout=LIMIT_MS / 1000) as answer:
            return int(answer.read())

    return await asyncio.to_thread(ask)


def _now() -> float:
    return asyncio.get_running_loop().time()
