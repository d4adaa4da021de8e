"""How answers look: tables on a terminal, tab-separated lines in a pipe, JSON when asked for.

What was asked for goes to stdout, remarks to stderr. Names and reasons come from other machines, so nothing is
written before its control characters are taken out: a node must not be able to steer somebody's terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TextIO

from enginehouse.core.progress import format_bytes

_STYLES = {
    "healthy": "green",
    "loaded": "green",
    "success": "green",
    "succeeded": "green",
    "pending": "yellow",
    "unhealthy": "yellow",
    "draining": "yellow",
    "loading": "yellow",
    "queued": "yellow",
    "running": "cyan",
    "partial": "yellow",
    "offline": "red",
    "failed": "red",
    "broken": "red",
}
UNBROKEN = 24  # a word that is at most so long is never broken: names and ids are read and copied whole
_DIGEST = re.compile(r"\b(sha256:[0-9a-f]{12})[0-9a-f]{52}\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, lines: bool = False) -> str:
    """`text` without what could move a cursor; newlines and tabs stay only where `lines` says so."""
    text = _CONTROL.sub("", text)
    return text if lines else re.sub(r"[\t\n]+", " ", text)


def shortened(text: str) -> str:
    """`text` with the digests in it as short as everywhere else; `--json` has them whole."""
    return _DIGEST.sub(r"\1", text)


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def say(text: str, *, lines: bool = False) -> None:
    """One line of the answer."""
    print(printable(text, lines=lines))


def remark(text: str) -> None:
    """One line beside the answer."""
    print(printable(text), file=sys.stderr, flush=True)


def emit_json(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def emit_json_line(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """On a terminal a table; in a pipe one line per row, fields separated by tabs, without a head."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):
        for row in cells:
            print("\t".join(row))
    elif not cells:
        remark(empty)
    else:
        _draw(columns, cells)


def fit_last(columns: Sequence[str], rows: Sequence[Sequence[str]], least: int = 20) -> list[list[str]]:
    """The rows with the last cell cut to what a terminal has room for: a thousand paragraphs are no list. In a pipe
    they stay as they are.
    """
    cells = [list(row) for row in rows]
    if not cells or not is_terminal(sys.stdout):
        return cells
    used = sum(2 + max(len(row[column]) for row in (columns, *cells)) for column in range(len(columns) - 1))
    room = max(least, shutil.get_terminal_size().columns - used)
    for row in cells:
        row[-1] = row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"
    return cells


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    least = -2
    for column, *cells in zip(columns, *rows, strict=True):
        longest = max((cell_len(word) for cell in (column, *cells) for word in cell.split()), default=0)
        width = min(UNBROKEN, longest)
        table.add_column(column, overflow="fold", min_width=width)
        least += width + 2
    if least > console.width:
        _draw_wide((columns, *rows))
        return
    for row in rows:
        # Text, not str: brackets in a name are not markup.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _draw_wide(rows: Sequence[Sequence[str]]) -> None:
    """On a screen that is too narrow for whole words, lines run on into the next: better than words in pieces."""
    from rich.cells import cell_len

    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def emit_facts(facts: Sequence[tuple[str, str]]) -> None:
    """The properties of one thing, those without a value left out."""
    shown = [(name, value) for name, value in facts if value]
    if not is_terminal(sys.stdout):
        for name, value in shown:
            print(f"{name}\t{printable(value)}")
        return
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name:<{width}}  {printable(value)}")


def age(seconds: float) -> str:
    """How long ago, in one unit: nobody reads the second one."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_of(moment: str) -> str:
    """The age of an RFC 3339 time; the text itself where it is not one."""
    try:
        return age(time.time() - datetime.fromisoformat(moment).timestamp())
    except ValueError:
        return moment


def size(count: int) -> str:
    return format_bytes(count) if count else ""


def duration(seconds: float) -> str:
    """`42 s`, `3 min`: for waits that are told in advance."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
