"""Real Chromium for the tests of the page. It is the system's; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Error, Page, sync_playwright
from tests.outside import npm_place, tool
from tests.window.catalogue import Catalogue, serving
from tests.window.watching import AXE, Watched

# Without them the browser looks for its maker's servers at every start. As root it has no sandbox of its own.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
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
        context.set_default_timeout(20_000)
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


@pytest.fixture(scope="session")
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
