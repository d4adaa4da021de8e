"""A page under watch: what its console said, which dialogs opened, and what it asked of others than its own server."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import ConsoleMessage, Dialog, Page, Request
from tests.e2e.conftest import wait_for

AXE = Path(__file__).parent / "axe"
# A refused request of the page is shown by the page; the browser says it once more.
_EXPECTED = ("Failed to load resource", "net::ERR_")


class Watched:
    def __init__(self, page: Page) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("dialog", self._opened)
        page.on("request", self._asked)

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(part in message.text for part in _EXPECTED):
            self.faults.append(f"console: {message.text}")

    def _opened(self, dialog: Dialog) -> None:
        self.faults.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _asked(self, request: Request) -> None:
        own = urlsplit(self.page.url).netloc
        asked = urlsplit(request.url)
        if own and asked.scheme in ("http", "https") and asked.netloc != own and not request.is_navigation_request():
            self.faults.append(f"asked {request.url}")

    def until(self, script: str) -> None:
        """Wait until an expression is true in the page. Asked from here: the page's policy lets nothing be evaluated
        in it later, as waiting in the page would need.
        """
        wait_for(script, lambda: self.page.evaluate(script))

    def text(self) -> str:
        return self.page.inner_text("body")
