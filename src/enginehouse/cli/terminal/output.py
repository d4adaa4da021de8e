"""Formats output: tables on a terminal, tab-separated lines in a pipe, JSON with --json.

Results go to stdout, remarks to stderr. Names and reasons come from other machines, so control characters are removed
before anything is written: a node must not be able to control the user's terminal.
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
UNBROKEN = 24  # a word up to this length is never wrapped, because names and ids are copied
_DIGEST = re.compile(r"\b(sha256:[0-9a-f]{12})[0-9a-f]{52}\b")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str, *, lines: bool = False) -> str:
    """`text` without control characters; newlines and tabs are kept only if `lines` is set."""
    text = _CONTROL.sub("", text)
    return text if lines else re.sub(r"[\t\n]+", " ", text)


def shortened(text: str) -> str:
    """`text` with short digests; `--json` shows them in full."""
    return _DIGEST.sub(r"\1", text)


def short_digest(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]


def is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") != "dumb"


def can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def say(text: str, *, lines: bool = False) -> None:
    """Print one line of the result to stdout."""
    print(printable(text, lines=lines))


def remark(text: str) -> None:
    """Print one remark to stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def emit_json(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n")


def emit_json_line(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    """Print a table on a terminal; in a pipe, one line per row with tabs between fields and no header."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):
        for row in cells:
            print("\t".join(row))
    elif not cells:
        remark(empty)
    else:
        _draw(columns, cells)


def fit_last(columns: Sequence[str], rows: Sequence[Sequence[str]], least: int = 20) -> list[list[str]]:
    """The rows with the last cell truncated to the width of the terminal; unchanged in a pipe."""
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
        # Text, not str: rich would read brackets in a str as markup.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _draw_wide(rows: Sequence[Sequence[str]]) -> None:
    """Print a table on a terminal that is too narrow: the terminal wraps lines, but words stay whole."""
    from rich.cells import cell_len

    widths = [max(cell_len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        print("  ".join(padded).rstrip())


def emit_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print the properties of one thing; those without a value are omitted."""
    shown = [(name, value) for name, value in facts if value]
    if not is_terminal(sys.stdout):
        for name, value in shown:
            print(f"{name}\t{printable(value)}")
        return
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name:<{width}}  {printable(value)}")


def age(seconds: float) -> str:
    """An age in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{max(0, int(seconds))}s"


def age_of(moment: str) -> str:
    """The age of an RFC 3339 time; the text itself if it is not one."""
    try:
        return age(time.time() - datetime.fromisoformat(moment).timestamp())
    except ValueError:
        return moment


def size(count: int) -> str:
    return format_bytes(count) if count else ""


def duration(seconds: float) -> str:
    """A duration such as `42 s` or `3 min`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
