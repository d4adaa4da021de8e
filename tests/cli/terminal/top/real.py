"""A small cluster of real processes for `top`: one frontend on SQLite, a worker, a registry to install from."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import PROGRAM, wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse, open_warehouse

from enginehouse.cli.client.connect import FrontendApi
from enginehouse.cli.client.live import LiveCluster
from enginehouse.cli.terminal.top.app import TopApp
from enginehouse.link.client import FrontendClient

LIMIT_SECONDS = 30.0
NAMES = ("engine-a", "engine-b", "engine-c", "engine-d")


class Town:
    """The cluster and what it can install."""

    def __init__(self, fleet: Fleet, warehouse: Warehouse) -> None:
        self.fleet = fleet
        self.warehouse = warehouse
        self.clients = ExitStack()

    @property
    def environment(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLORTERM", "TMUX")},
            "ENGINEHOUSE_URL": self.fleet.first.url,
            "ENGINEHOUSE_TOKEN": self.fleet.tokens["admin"],
            "ENGINEHOUSE_DATA": str(self.fleet.root / "client"),
            "LANG": "C.UTF-8",
        }

    def app(self) -> TopApp:
        client = FrontendClient(self.fleet.first.url, self.fleet.tokens["admin"], user_agent="tests")
        self.clients.callback(client.close)
        return TopApp(LiveCluster(FrontendApi(client, is_quiet=True)))


@contextmanager
def running_town(root: Path) -> Iterator[Town]:
    (root / "warehouse").mkdir()
    with open_warehouse(root / "warehouse") as warehouse:
        for name in NAMES:
            warehouse.offer(name, warehouse.proxy.reference(f"{name}:latest"))
        fleet = Fleet(root, f"sqlite:///{root / 'enginehouse.db'}", warehouse.environment)
        try:
            fleet.start(frontends=1, workers=1)
            town = Town(fleet, warehouse)
            with town.clients:
                yield town
        finally:
            fleet.end()


class Screen:
    """A command, `top` unless another is given, in a real terminal that tmux draws."""

    def __init__(self, environment: dict[str, str], columns: int, lines: int, words: str = "top") -> None:
        # Paths of sockets have a hundred characters at most.
        self._place = Path(tempfile.mkdtemp(prefix="eh-tmux-"))
        command = f"'{PROGRAM}' {words}; echo exit=$?; cat"
        size = ("-x", str(columns), "-y", str(lines))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "-s", "top", command, environment=environment)

    def _tmux(self, *arguments: str, environment: dict[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._place / "socket"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def text(self, *more: str) -> str:
        return self._tmux("capture-pane", "-p", "-t", "top", *more)

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", "-t", "top", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-t", "top", "-x", str(columns), "-y", str(lines))

    def wait(self, what: str, *texts: str) -> str:
        """What is on the screen once all of these texts are."""
        try:
            found: str = wait_for(what, lambda: self._with(texts), LIMIT_SECONDS)
        except pytest.fail.Exception as failure:
            raise AssertionError(f"{failure}\n{self.text()}") from None
        return found

    def _with(self, texts: tuple[str, ...]) -> str:
        shown = self.text()
        return shown if all(text in shown for text in texts) else ""

    def close(self) -> None:
        self._tmux("kill-server")
        shutil.rmtree(self._place, ignore_errors=True)


@contextmanager
def screen(environment: dict[str, str], columns: int = 100, lines: int = 30, words: str = "top") -> Iterator[Screen]:
    if shutil.which("tmux") is None:
        message = "tmux is not installed: `make setup-dev` installs it"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    made = Screen(environment, columns, lines, words)
    try:
        yield made
    finally:
        made.close()


async def until(pilot: Any, what: str, probe: Callable[[], Any]) -> Any:
    """The first true answer, looked for between the frames of the view."""
    import time

    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := probe()):
        assert time.monotonic() < deadline, f"waited in vain for: {what}\n{seen(pilot.app)}"
        await pilot.pause(0.02)
    return found


def seen(app: TopApp) -> str:
    """Everything that the view shows, as text; the top-most dialog too."""
    from textual.widgets import Static

    from enginehouse.cli.terminal.top.row_list import RowList

    parts = []
    for shown in app.screen_stack:
        for widget in shown.query("*"):
            if isinstance(widget, RowList):
                parts.append(widget.plain)
            elif isinstance(widget, Static):
                parts.append(str(widget.render()))
    return "\n".join(parts)
