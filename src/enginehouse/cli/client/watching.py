"""`--watch`: a list that is shown again and again.

On a terminal it is redrawn in place, below what was there before; in a pipe a changed list is appended after an empty
line. It is read again after an event of the server, and every two seconds. A server that is away is said below the last
list, and asked again. Ctrl-C is how watching ends: the last list stays.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import click

from enginehouse.cli.client.connect import FrontendApi, connected_quietly
from enginehouse.cli.terminal import output
from enginehouse.core.errors import EnginehouseError, Unavailable

PERIOD_SECONDS = 2.0  # ages and memory change without an event
PAUSE_SECONDS = 0.3  # a busy cluster has many events a second, and people read slower
SILENCE_SECONDS = 12.0
_QUIET_EVENTS = ("", "hello", "pulse")


class _Page(io.StringIO):
    """What a command prints, as it would print it on the stream behind."""

    def __init__(self, behind: io.TextIOBase) -> None:
        super().__init__()
        self._behind = behind

    def isatty(self) -> bool:
        return self._behind.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute of other streams
        return getattr(self._behind, "encoding", None) or "ascii"


def watchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--watch`, which shows the list again and again until Ctrl-C."""

    @functools.wraps(function)
    def once_or_again(*arguments: Any, is_watched: bool = False, **more: Any) -> Any:
        if not is_watched:
            return function(*arguments, **more)
        return watch(lambda: function(*arguments, **more))

    add = click.option("-w", "--watch", "is_watched", is_flag=True, help="Show it again after every change.")
    return add(once_or_again)


def watch(show: Callable[[], object]) -> int:
    """Call `show` again and again until Ctrl-C. Its first error ends it; a later outage does not."""
    with connected_quietly() as frontend:
        changed = threading.Event()
        threading.Thread(target=_listen, args=(frontend, changed), daemon=True).start()
        screen = _Screen() if output.is_terminal(sys.stdout) else _Appended()
        with contextlib.suppress(KeyboardInterrupt):
            screen.show(_page(show))
            while True:
                changed.wait(PERIOD_SECONDS)
                changed.clear()
                try:
                    screen.show(_page(show))
                except Unavailable as error:
                    screen.trouble(error.message)
                time.sleep(PAUSE_SECONDS)
    return 0


def _page(show: Callable[[], object]) -> str:
    page = _Page(sys.stdout)  # type: ignore[arg-type]
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(page):
        show()
    return page.getvalue()


def _listen(frontend: FrontendApi, changed: threading.Event) -> None:
    """Wake the watcher after every event; without events (an old server, an outage) its period is enough."""
    while True:
        try:
            with frontend.client.stream_events("/api/events", silence_seconds=SILENCE_SECONDS) as events:
                for event in events:
                    if event.event not in _QUIET_EVENTS:
                        changed.set()
        except Unavailable:
            pass
        except EnginehouseError:
            return  # this token may not see events
        time.sleep(PERIOD_SECONDS)


class _Screen:
    """Redraws in place: moves up over what it drew last, and erases what is left below."""

    def __init__(self) -> None:
        self._drawn = 0
        self._last = ""

    def show(self, page: str) -> None:
        self._last = page
        self._draw(page.splitlines())

    def trouble(self, text: str) -> None:
        self._draw([*self._last.splitlines(), "", f"{output.printable(text)} Trying again."])

    def _draw(self, lines: list[str]) -> None:
        size = shutil.get_terminal_size()
        if len(lines) > size.lines - 1:
            left = len(lines) - (size.lines - 2)
            lines = [*lines[: size.lines - 2], f"… and {left} more lines"]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        # Without wrapping: a line that is too long would take two, and the next frame would begin in the wrong place.
        body = "".join(f"{line}\x1b[K\n" for line in lines)
        sys.stdout.write(f"{up}\r\x1b[?7l{body}\x1b[J\x1b[?7h")
        sys.stdout.flush()
        self._drawn = len(lines)


class _Appended:
    """Prints each list that differs from the last one after an empty line, and an outage once."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._trouble = False

    def show(self, page: str) -> None:
        self._trouble = False
        if page != self._last:
            sys.stdout.write(page if self._last is None else f"\n{page}")
            sys.stdout.flush()
        self._last = page

    def trouble(self, text: str) -> None:
        if not self._trouble:
            output.remark(f"{text} Trying again.")
        self._trouble = True
