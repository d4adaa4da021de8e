"""A list of rows with a cursor, of which only the lines on the screen are drawn.

The cursor stays on what it is about when rows come, go and move. Rows without a target only explain others, so the
cursor passes over them; where no row has one, it scrolls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from enginehouse.cli.terminal.top.drawing import MUTED, NEWS, NO_TARGET, Row, Target, plain

MARGIN = 2  # columns, for the mark of the cursor


class RowList(ScrollView, can_focus=True):
    DEFAULT_CSS = "RowList { background: transparent; scrollbar-size-vertical: 1; overflow-x: hidden; }"

    def __init__(self, empty: str = "", *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.empty = empty
        self.rows: Sequence[Row] = ()
        self._tops: list[int] = [0]
        self._cursor = 0
        self._drawn: dict[int, Sequence[Text]] = {}

    @property
    def target(self) -> Target:
        """What the cursor is on."""
        return self.rows[self._cursor].target if self._cursor < len(self.rows) else NO_TARGET

    @property
    def plain(self) -> str:
        """Everything in the list, as text."""
        return "\n".join(line.plain for row in self.rows for line in row.draw(self._width - MARGIN))

    def show_rows(self, rows: Sequence[Row]) -> None:
        before, place = self.target, self._cursor
        self.rows = rows
        self._tops = [0, *accumulate(row.height for row in rows)]
        self._drawn = {}
        if before != NO_TARGET and not (place < len(rows) and rows[place].target == before):
            place = next((number for number, row in enumerate(rows) if row.target == before), place)
        self._cursor = self._nearest(min(place, max(0, len(rows) - 1)))
        self.virtual_size = Size(self._width, self._tops[-1])
        self.refresh()

    def move(self, step: int) -> bool:
        """Move the cursor by rows; False if there is none in that direction."""
        numbers = [number for number, row in enumerate(self.rows) if row.target != NO_TARGET]
        if not numbers:
            before = self.scroll_offset.y
            self.scroll_to(y=before + step, animate=False)
            return self.scroll_offset.y != before
        place = bisect_right(numbers, self._cursor) - 1
        wanted = min(len(numbers) - 1, max(0, place + step))
        is_moved = numbers[wanted] != self._cursor
        self._cursor = numbers[wanted]
        self._follow_cursor(is_last=wanted == len(numbers) - 1)
        return is_moved

    def select(self, target: Target) -> None:
        self._cursor = next((number for number, row in enumerate(self.rows) if row.target == target), self._cursor)
        self._follow_cursor(is_last=False)

    def to_start(self) -> None:
        self._cursor = self._nearest(0)
        self.scroll_to(y=0, animate=False)

    def _nearest(self, place: int) -> int:
        """The next row from `place` on that the cursor may be on, or else the one before."""
        around = (*range(place, len(self.rows)), *range(place - 1, -1, -1))
        return next((number for number in around if self.rows[number].target != NO_TARGET), 0)

    def _follow_cursor(self, *, is_last: bool) -> None:
        # What explains the row comes after it, up to the next row with a target.
        end = next(
            (number for number in range(self._cursor + 1, len(self.rows)) if self.rows[number].target != NO_TARGET),
            len(self.rows),
        )
        top = self._tops[self._cursor]
        if self._cursor == self._nearest(0):
            top = 0
        bottom = self._tops[-1] if is_last else self._tops[end]
        height = max(1, min(bottom - top, self.size.height))
        self.scroll_to_region(Region(0, top, 1, height), animate=False, force=True)
        self.refresh()

    @property
    def _width(self) -> int:
        return max(20, self.scrollable_content_region.width or self.size.width)

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        number = bisect_right(self._tops, line) - 1
        if number >= len(self.rows):
            text = plain(self.empty if not self.rows and y == 0 else "", MUTED)
            return self._strip(text, "  ")
        if number not in self._drawn:
            self._drawn[number] = self.rows[number].draw(self._width - MARGIN)
        lines, offset = self._drawn[number], line - self._tops[number]
        is_here = self.has_focus and number == self._cursor and self.rows[number].target != NO_TARGET
        return self._strip(lines[offset] if offset < len(lines) else Text(), "▌ " if is_here else "  ")

    def _strip(self, text: Text, mark: str) -> Strip:
        line = Text.assemble((mark, NEWS), text, no_wrap=True, end="")
        strip = Strip(line.render(self.app.console)).adjust_cell_length(self._width)
        # The filter that removes colours takes no segment without a style.
        return Strip([Segment(part.text, part.style or Style.null()) for part in strip], strip.cell_length)
