"""Live bars on a terminal, one per row of an operation.

rich redraws them periodically, so countdowns and spinners move while no event arrives. The view erases itself at its
end; the outcome is printed elsewhere.
"""

from __future__ import annotations

import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.progress import describe, next_try, subject, why
from enginehouse.cli.terminal.rates import Meter
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeRow

FRAMES_PER_SECOND = 8.0
BAR_WIDTH = 24
_STYLES = {"success": "green", "error": "red", "running_on_worker": "yellow", "queued": "yellow"}


class Bars:
    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._rows: list[NodeRow] | None = None
        self._waiting = ""
        self._shown_at = 0.0
        self._meters: dict[str, Meter] = {}
        self._spinner = Spinner("dots")
        self._moving = Spinner("dots")
        self._trouble = ""
        self._trouble_since = 0.0
        # Last, because its constructor already calls `_render`.
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=FRAMES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Bars:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def show(self, rows: list[NodeRow], answer: object, waiting: str = "") -> None:
        now = time.monotonic()
        for row in rows:
            if row.status == "downloading" and row.total_bytes:
                self._meters.setdefault(row.intent, Meter()).note(now, row.current_bytes or 0)
        self._rows, self._waiting, self._shown_at = rows, waiting, now

    def trouble(self, text: str) -> None:
        if text and not self._trouble:
            self._trouble_since = time.monotonic()
        self._trouble = text

    def tell(self, line: str) -> None:
        output.say(line)

    def _render(self) -> RenderableType:
        rows = self._rows
        if rows is None:
            return self._spinner
        shared = self._shared_action(rows)
        parts = self._lines(self._visible(rows), shared) if rows else [self._line(self._waiting)]
        if len(rows) > 1 or shared:
            done = sum(not row.is_open for row in rows)
            figures = f"{done} of {len(rows)} done"
            parts.append(Text(output.printable(f"{shared}: {figures}" if shared else figures), style="dim"))
        if self._trouble:
            seconds = int(time.monotonic() - self._trouble_since)
            parts.append(Text(output.printable(f"{self._trouble}; trying again ({seconds} s)"), style="yellow"))
        return Group(*parts)

    def _shared_action(self, rows: list[NodeRow]) -> str:
        """The action that all rows share, if there is no room for it in each row; then rows show only their nodes."""
        doing = {row.action for row in rows}
        longest = max((len(subject(row)) for row in rows), default=0)
        return doing.pop() if longest > self._console.size.width // 3 and len(doing) == 1 else ""

    def _lines(self, rows: list[NodeRow], shared: str) -> list[RenderableType]:
        # Fixed widths: otherwise rich shrinks the marks and the bars to make room for long reasons.
        screen = self._console.size.width
        names = [output.printable(row.node_name if shared else subject(row)) for row in rows]
        name = min(max(len(one) for one in names), screen // 3)
        bar = min(BAR_WIDTH, screen // 5)
        words = max(1, screen - 1 - name - bar - 3)
        lines: list[RenderableType] = []
        for row, named in zip(rows, names, strict=True):
            mark, *cells = self._cells(row)
            # A row without a bar uses that space for its reason, which is longer than figures.
            widths = (1, name, bar, words) if len(cells) == 2 else (1, name, bar + 1 + words)
            line = Table.grid(padding=(0, 1, 0, 0))
            for width in widths:
                line.add_column(width=width, no_wrap=True, overflow="ellipsis")
            line.add_row(mark, Text(named), *cells)
            lines.append(line)
        return lines

    def _line(self, text: str) -> RenderableType:
        self._spinner.update(text=Text(output.printable(text)))
        return self._spinner

    def _visible(self, rows: list[NodeRow]) -> list[NodeRow]:
        """All rows, or those that fit on the screen: first active and failed ones, then queued, then finished."""
        room = max(3, self._console.size.height - 4)
        if len(rows) <= room:
            return rows
        return sorted(rows, key=lambda row: (row.status == "success", row.status == "queued"))[:room]

    def _cells(self, row: NodeRow) -> tuple[RenderableType, ...]:
        """The mark, the bar if there is one, and the text."""
        style = _STYLES.get(row.status, "")
        words = Text(output.printable(self._words(row)), style=style)
        match row.status:
            case "success":
                return Text("✓", style=style), self._bar(row, 100.0), words
            case "downloading" | "running_on_worker":
                return self._moving.render(time.monotonic()), self._bar(row, row.percentage), words
            case "queued":
                return Text("…", style=style), words
            case _:
                return Text("✗", style=style), words

    def _bar(self, row: NodeRow, percentage: float) -> ProgressBar:
        unknown = row.status != "success" and not row.total_bytes
        total = None if unknown else 100.0
        return ProgressBar(total=total, completed=percentage, pulse=unknown)

    def _words(self, row: NodeRow) -> str:
        due = row.due_in_seconds
        if due is not None:
            due -= time.monotonic() - self._shown_at
        if when := next_try(row, due):
            return f"{when}: {why(row)}"  # the countdown first, so that a long reason does not hide it
        text = describe(row, due)
        if row.status != "downloading" or not row.total_bytes:
            return text
        rate = self._meters[row.intent].rate() if row.intent in self._meters else 0.0
        done = row.current_bytes or 0
        left = (row.total_bytes - done) / rate if rate > 0 else 0.0
        speed = f", {format_bytes(int(rate))}/s" if rate > 0 else ""
        speed += f", {output.duration(left)} left" if left >= 1 else ""
        figures = f"{format_bytes(done)} of {format_bytes(row.total_bytes)}{speed}"
        return f"{row.percentage:3.0f}% {figures} {text}"
