"""Questions before something is done, and texts to read. None of them does anything by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.events import Key, Resize
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from enginehouse.cli.terminal.top.drawing import NO_TARGET, Row, line_row, plain, wrapped
from enginehouse.cli.terminal.top.row_list import RowList

_CSS = """
    align: center middle;
    background: transparent;
"""
_STEPS = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": 10, "pageup": -10}
_BOX = "width: 90%; max-width: 96; height: auto; max-height: 90%; border: round ansi_cyan; padding: 0 1;"


def paragraphs(*texts: str) -> Callable[[int], Sequence[Row]]:
    """Texts as rows that fit the width."""
    return lambda width: [line_row(NO_TARGET, line) for text in texts for line in wrapped(text, width)]


class Sheet(ModalScreen[bool]):
    """A text, and with `question` a choice of yes and no; without one, any of the keys closes it."""

    DEFAULT_CSS = (
        f"Sheet {{ {_CSS} }} Sheet > Vertical {{ {_BOX} }} Sheet RowList {{ height: auto; max-height: 100%; }}"
        "Sheet .title { text-style: bold; } Sheet .foot { margin-top: 1; height: auto; }"
    )

    def __init__(self, title: str, rows: Callable[[int], Sequence[Row]], question: str = "") -> None:
        super().__init__()
        self._title = title
        self._rows = rows
        self._question = question
        self.list = RowList()

    def compose(self) -> ComposeResult:
        foot = f"{self._question}  y yes · n no" if self._question else "Esc closes"
        with Vertical():
            yield Static(plain(self._title), classes="title", markup=False)
            yield self.list
            yield Static(plain(foot), classes="foot", markup=False)

    def on_mount(self) -> None:
        self._draw()

    def on_resize(self, _event: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = max(20, min(96, self.app.size.width * 9 // 10) - 6)
        rows = self._rows(width)
        lines = sum(row.height for row in rows)
        self.list.styles.height = max(1, min(lines, self.app.size.height * 9 // 10 - 5))
        self.list.show_rows(rows)

    def on_key(self, event: Key) -> None:
        key = event.character if event.is_printable and event.character else event.key
        closing = ("n", "N", "escape") if self._question else ("q", "?", "enter", "escape")
        if key in _STEPS:
            self.list.move(_STEPS[key])
        elif self._question and key in ("y", "Y"):
            self.dismiss(True)
        elif key in closing:
            self.dismiss(False)
        event.stop()


class Prompt(ModalScreen[str]):
    """A line to type; the answer is "" if it is given up. With `expected` only that is accepted."""

    DEFAULT_CSS = (
        f"Prompt {{ {_CSS} }} Prompt > Vertical {{ {_BOX} }}"
        "Prompt Static { height: auto; } Prompt Input { background: transparent; margin: 1 0; }"
    )
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "give_up", priority=True),
    ]

    def __init__(self, sentence: str, expected: str = "") -> None:
        super().__init__()
        self._sentence = sentence
        self._expected = expected

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(plain(self._sentence), markup=False)
            yield Input(placeholder=plain(self._expected).plain, compact=True)
            yield Static("Enter does it · Esc gives up", classes="foot", markup=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        given = event.value.strip()
        if self._expected and given != self._expected:
            self.query_one(".foot", Static).update("That is not the name. Nothing was done · Esc gives up")
        elif given:
            self.dismiss(given)

    def action_give_up(self) -> None:
        self.dismiss("")
