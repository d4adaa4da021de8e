"""Pictures of every page in every state of the catalogue: light, dark and on a phone.

`make screenshots` writes them into `screenshots/`, which is not committed, and those of the README into
`docs/pictures/`.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser, sync_playwright  # noqa: E402
from tests.window.catalogue import PAGES, Catalogue, serving  # noqa: E402
from tests.window.conftest import FLAGS  # noqa: E402
from tests.window.states import SCENES  # noqa: E402

ALL, KEPT = ROOT / "screenshots", ROOT / "docs" / "pictures"
LOOKS = {"light": (1280, 860), "dark": (1280, 860), "phone": (360, 780)}
OPERATION = "operations/00000001-0000-4000-8000-000000000000"
# What the README shows: scene, address, look.
MAIN = {
    "fleet": ("mixed", "fleet", "light"),
    "operation": ("mixed", OPERATION, "dark"),
    "backends": ("mixed", "backends", "light"),
    "phone": ("mixed", "fleet", "phone"),
}


def shots() -> Iterator[tuple[str, str]]:
    yield from ((scene, "fleet") for scene in SCENES)
    yield from (("mixed", address) for address in (*PAGES[1:], OPERATION, "nodes/desk", "nodes/jetson", "access/usage"))


def take(browser: Browser, port: int, scene: str, address: str, look: str, path: Path) -> None:
    width, height = LOOKS[look]
    scheme = "dark" if look == "dark" else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(f"http://{scene}.localhost:{port}/#/{address}")
    page.wait_for_selector("#app main")
    if scene != "loading":
        page.get_by_text("Reading").first.wait_for(state="detached")  # two say so while nothing is known
    page.screenshot(path=path)
    context.close()


def main() -> int:
    ALL.mkdir(exist_ok=True)
    KEPT.mkdir(exist_ok=True)
    with serving(Catalogue()) as port, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        # First: the states grow older while they are served.
        for name, (scene, address, look) in MAIN.items():
            take(browser, port, scene, address, look, KEPT / f"{name}.png")
        for scene, address in shots():
            for look in LOOKS:
                path = ALL / f"{scene}-{address.replace('/', '-')[:20]}-{look}.png"
                take(browser, port, scene, address, look, path)
        browser.close()
    print(f"{len(list(ALL.glob('*.png')))} pictures in {ALL}, {len(MAIN)} in {KEPT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
