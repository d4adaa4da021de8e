"""What rows are drawn with: cells of a fixed width, bars, pills.

Every text passes `plain`: names and errors come from other machines, so they are neither markup nor escapes. A state
has a mark and a word beside its colour.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from enginehouse.cli.terminal.fleet_words import UNKNOWN, ago
from enginehouse.cli.terminal.output import printable
from enginehouse.core.progress import format_bytes

MUTED = "bright_black"
OK, NEWS, WARN, BAD = "green", "cyan", "yellow", "red"

# A state of a node or of a share of an operation: mark, word, colour.
PILLS = {
    "queued": ("○", "Queued", MUTED),
    "downloading": ("◐", "Downloading", NEWS),
    "installing": ("◑", "Installing", NEWS),
    "starting": ("◑", "Starting", NEWS),
    "loading": ("◑", "Loading", NEWS),
    "working": ("◑", "Working", NEWS),
    "running": ("◐", "Running", NEWS),
    "parked": ("◌", "Waiting for nodes", MUTED),
    "busy": ("◔", "Worker busy", WARN),
    "success": ("●", "Done", OK),
    "error": ("✕", "Failed", BAD),
    "partly": ("◪", "Partly", WARN),
    "skipped": (UNKNOWN, "Skipped", MUTED),
    "cancelled": ("⊘", "Cancelled", MUTED),
    "superseded": ("⊘", "Superseded", MUTED),
}
PILL_WIDTH = 13
BARRED = 24  # columns from which on an amount has a bar beside its figures


class Target(NamedTuple):
    """What a row is about; `node` is the name of one node of an operation, or "" for all of it."""

    kind: str
    id: str
    node: str = ""


NO_TARGET = Target("", "")


class Row(NamedTuple):
    """A row of a list. It is drawn only where it is seen; `words` is what a search looks at."""

    target: Target
    words: str
    height: int
    draw: Callable[[int], Sequence[Text]]


def plain(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True)


def cell(text: str, width: int, style: str = "", *, right: bool = False) -> Text:
    """`text` in exactly `width` columns, with `…` where it does not fit."""
    text = printable(text)
    size = cell_len(text)
    if size > width:
        text = f"{set_cell_size(text, width - 1)}…" if width > 0 else ""
    elif right:
        text = " " * (width - size) + text
    else:
        text += " " * (width - size)
    return Text(text, style=style, no_wrap=True)


def joined(*parts: Text, gap: str = " ") -> Text:
    return Text(gap, no_wrap=True).join(parts)


def pill(name: str, width: int = PILL_WIDTH) -> Text:
    mark, word, colour = PILLS[name]
    return cell(f"{mark} {word}", width, colour)


def bar(fraction: float | None, width: int, colour: str = NEWS) -> Text:
    """Filled as far as `fraction`; dotted where that is unknown."""
    if fraction is None:
        return Text("╌" * width, style=MUTED)
    full = round(min(1.0, max(0.0, fraction)) * width)
    return Text.assemble(("▓" * full, colour), ("░" * (width - full), MUTED))


def used(label: str, free: int | None, total: int, width: int) -> Text:
    """`RAM ▓▓▓░░ 9.1/23.5 GiB` in exactly `width` columns; a dash where the machine did not report it."""
    if not total or free is None:
        return cell(f"{label} {UNKNOWN}", width, MUTED)
    taken = max(0, total - free)
    colour = BAD if free < total * 0.05 else WARN if free < total * 0.15 else NEWS
    figures = amounts(taken, total)
    room = width - len(label) - len(figures) - 2
    # As wide as the column allows, whatever its figures are, so that all rows have a bar or none has.
    drawn = [bar(taken / total, min(room, 10), colour)] if width >= BARRED and room >= 3 else []
    parts = [plain(label, MUTED), *drawn, plain(figures)]
    found = joined(*parts)
    found.pad_right(max(0, width - found.cell_len))
    return found


def amounts(done: int, total: int) -> str:
    """Two sizes in the unit of the second: `9.1/23.5 GiB`."""
    whole, _, unit = format_bytes(total).partition(" ")
    factor = total / float(whole) if float(whole) else 1.0
    return f"{done / factor:.0f}/{whole} {unit}" if unit == "B" else f"{done / factor:.1f}/{whole} {unit}"


def wrapped(text: str, width: int, indent: str = "", style: str = "") -> list[Text]:
    """All of a text, in as many lines as it takes."""
    lines = textwrap.wrap(printable(text), max(10, width - len(indent)), break_on_hyphens=False) or [""]
    return [Text(indent + line, style=style, no_wrap=True) for line in lines]


def since(moment: str) -> str:
    """How long ago an RFC 3339 time was; the text itself if it is not one."""
    try:
        return ago(time.time() - datetime.fromisoformat(moment).timestamp())
    except ValueError:
        return moment


def name_width(names: Iterable[str], width: int) -> int:
    """Columns for the longest of these names, within a third of the width."""
    return max(8, min(width // 3, max((cell_len(printable(name)) for name in names), default=0)))


def line_row(target: Target, line: Text, *, words: str = "") -> Row:
    return Row(target, words or line.plain, 1, lambda width: [line])


def facts(pairs: Sequence[tuple[str, str]], width: int) -> list[Row]:
    """Properties of one thing, each in full; those without a value are omitted."""
    label = max((len(name) for name, value in pairs if value), default=0) + 2
    rows = []
    for name, value in pairs:
        for number, line in enumerate(wrapped(value, width - label) if value else ()):
            first = cell(name if number == 0 else "", label, MUTED)
            rows.append(line_row(NO_TARGET, joined(first, line, gap="")))
    return rows
