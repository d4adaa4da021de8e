"""Real Chromium for the tests of the page. It is the system's; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright
from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse, open_warehouse
from tests.outside import npm_place, tool
from tests.window.catalogue import Catalogue, serving
from tests.window.watching import AXE, Watched

# Without them the browser looks for its maker's servers at every start. As root it has no sandbox of its own.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


LIMIT_MS = 30_000  # of one condition; a browser beside other suites may take seconds for its first page
expect.set_options(timeout=LIMIT_MS)
ENGINES = ("speaker", "tool", "spoilt", "talker")
SMALL = {"ENGINEHOUSE_ARCHIVE_LIMIT": "1MB"}  # of a machine that cannot unpack an engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Per module: while it is open, nothing else in this thread can run a loop. So what has loops of its own at its
    start, such as a fleet, is of the session, and begins before.
    """
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=tool("chromium"), args=list(FLAGS))
        try:
            yield started
        finally:
            started.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens a page in a browser of its own: no cookies or storage of others. It fails the test on any error there."""
    pages: list[Watched] = []

    def open_page(width: int = 1280, height: int = 800, scheme: Any = "light", **more: Any) -> Watched:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **more)
        context.set_default_timeout(LIMIT_MS)
        pages.append(Watched(context.new_page()))
        return pages[-1]

    yield open_page
    faults = [fault for one in pages for fault in one.faults]
    for one in pages:
        one.page.context.close()
    assert faults == []


@pytest.fixture(scope="session")
def states() -> Iterator[str]:
    """The catalogue of states; the address of one is `states.format(name)`."""
    with serving(Catalogue()) as port:
        yield f"http://{{}}.localhost:{port}/"


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core."""
    return (npm_place(AXE) / "node_modules" / "axe-core" / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def modules(browser: Browser, states: str) -> Iterator[Callable[[str, str], Any]]:
    """Runs JavaScript with one module of the page as `it`: `modules("state.js", "it.emptyState().version")`."""
    context = browser.new_context()
    page: Page = context.new_page()
    page.goto(states.format("signed-out"))

    def run(module: str, script: str) -> Any:
        try:
            return page.evaluate(f"import('/web/{module}').then(async (it) => {{ {script} }})")
        except Error as error:
            raise AssertionError(error.message) from error

    yield run
    context.close()


@pytest.fixture(scope="session")
def window_warehouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warehouse]:
    with open_warehouse(tmp_path_factory.mktemp("warehouse")) as made:
        for name in ENGINES:
            made.offer(name, made.proxy.reference(f"{name}:latest"))
        yield made


@pytest.fixture(scope="session")
def window_fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: Callable[..., str], window_warehouse: Warehouse
) -> Iterator[Fleet]:
    """Two frontends over one PostgreSQL and one NATS, and three machines; the third unpacks next to nothing."""
    made = Fleet(tmp_path_factory.mktemp("fleet"), postgres("template1"), window_warehouse.environment)
    try:
        made.start(frontends=2, workers=2)
        made.add_worker("worker-3", made.first, environment=SMALL)
        made.until_healthy()
        yield made
    finally:
        made.end()


@pytest.fixture
def fleet(window_fleet: Fleet, window_warehouse: Warehouse) -> Fleet:
    """Whole again, whatever the test before did."""
    window_warehouse.calm()
    window_fleet.mend()
    return window_fleet


@pytest.fixture
def warehouse(window_warehouse: Warehouse) -> Warehouse:
    return window_warehouse


@pytest.fixture
def signed_in(opened: Callable[..., Watched], fleet: Fleet) -> Callable[..., Watched]:
    """Opens the page through a login link, at an address of the fleet."""

    def sign_in(url: str = "", role: str = "admin", **more: Any) -> Watched:
        code = fleet.first.post("/api/session/links", {"role": role})["code"]
        watched = opened(**more)
        watched.page.goto(f"{url or fleet.first.url}/#/login/{code}")
        watched.page.locator("nav[aria-label=Pages]").wait_for()
        return watched

    return sign_in
