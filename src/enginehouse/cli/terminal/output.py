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
from datetime import UTC, datetime
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
# Columns that a narrow terminal does without, the least needed first. A pipe and --json have them all.
LEAST_NEEDED = (
    *(
        "DIGEST",
        "SEEN",
        "GPU",
        "PLATFORM",
        "REVISION",
        "LICENSE",
        "FREE DISK",
        "FROM",
        "OPERATION",
        "LAST USED",
        "BUILD",
    ),
    *("USED", "BACKEND", "BY", "FREE RAM", "PREVIOUS", "LIMITS", "ROLE", "BACKENDS", "ERRORS", "FOR NODE"),
)
GAP = 2  # between two columns
USUAL_COLUMNS = 80
SHORT = 8  # characters; below that words are broken after the identifiers, which are copied
COMFORT = 26  # characters of a cell; a longer one may be wrapped
LAST = 20  # of a last column that is cut, at least
UNBROKEN = 24  # a word up to this length is never wrapped, because names and ids are copied
_DIGEST = re.compile(r"\b(sha256:[0-9a-f]{12})[0-9a-f]{52}\b")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
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
    """Print one remark to stderr; on a terminal it is wrapped between words."""
    print(wrapped(printable(text), sys.stderr), file=sys.stderr, flush=True)


def say_wrapped(text: str, first: str = "") -> None:
    """Print a line of the result that begins with `first`; on a terminal the rest is aligned after that."""
    text, room = printable(text), shutil.get_terminal_size().columns
    if not is_terminal(sys.stdout) or len(first) + len(text) <= room:
        print(first + text)
        return
    import textwrap

    indent = " " * len(first)
    print(
        textwrap.fill(
            text,
            room,
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def wrapped(text: str, stream: TextIO) -> str:
    """`text` in lines that fit the terminal; unchanged where there is none, or where it fits."""
    room = shutil.get_terminal_size().columns
    if len(text) <= room or not is_terminal(stream):
        return text
    import textwrap

    return textwrap.fill(text, room, break_long_words=False, break_on_hyphens=False)


def emit_json(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(in_one_form(document)), indent=2).decode() + "\n")


def emit_json_line(document: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(in_one_form(document)).decode() + "\n")
    sys.stdout.flush()


def in_one_form(document: object) -> object:
    """A document for programs: what identifies a thing is its `id`, and every time is RFC 3339 in UTC.

    LocalAI's routes have the id of an operation in `jobID` and its name in `id`; `jobID` stays too.
    """
    import msgspec

    return _one_form(msgspec.to_builtins(document))


def _one_form(value: object) -> object:
    if isinstance(value, list | tuple):
        return [_one_form(one) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _time(one) if _is_time(key, one) else _one_form(one) for key, one in value.items()}
    return {**found, "id": found["jobID"]} if "jobID" in found else found


def _is_time(key: object, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isinstance(key, str) and (key == "at" or key.endswith(("_at", "At")))


def _time(seconds: object) -> str:
    """Empty for a time that is not known."""
    assert isinstance(seconds, int | float)
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z") if seconds else ""


def emit_table(columns: Sequence[str], rows: Sequence[Sequence[str]], empty: str, *, is_last_cut: bool = False) -> None:
    """Print a table on a terminal; in a pipe, one line per row with tabs between fields and no header.

    On a terminal that is too narrow for all columns, the least needed ones are left out; the last is cut if asked for.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    if not is_terminal(sys.stdout):
        for row in cells:
            print("\t".join(row))
    elif not cells:
        remark(empty)
    else:
        columns, cells = _without_least_needed(columns, cells, is_last_cut=is_last_cut)
        _draw(columns, _fit_last(columns, cells) if is_last_cut else cells)


def _without_least_needed(
    columns: Sequence[str], cells: list[list[str]], *, is_last_cut: bool
) -> tuple[Sequence[str], list[list[str]]]:
    """The columns that fit beside each other without much wrapping; a column without any content goes first."""
    kept = list(range(len(columns)))
    widths = [max(len(cell) for cell in column) for column in zip(columns, *cells, strict=True)]
    comfort = [
        width if any(map(_UUID.fullmatch, column)) else min(width, COMFORT)
        for width, column in zip(widths, zip(*cells, strict=True), strict=True)
    ]
    if is_last_cut:
        comfort[-1] = min(widths[-1], LAST)
    empty = [name for name, *column in zip(columns, *cells, strict=True) if name in LEAST_NEEDED and not any(column)]
    room = shutil.get_terminal_size().columns
    for name in (*empty, *LEAST_NEEDED):
        if sum(comfort[one] + 2 for one in kept) - 2 <= room:
            break
        kept = [one for one in kept if columns[one] != name]
    return [columns[one] for one in kept], [[row[one] for one in kept] for row in cells]


def _fit_last(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The rows with the last cell truncated to the width of the terminal."""
    cells = [list(row) for row in rows]
    used = sum(2 + max(len(row[column]) for row in (columns, *cells)) for column in range(len(columns) - 1))
    room = max(LAST, shutil.get_terminal_size().columns - used)
    for row in cells:
        row[-1] = row[-1] if len(row[-1]) <= room else row[-1][: room - 1] + "…"
    return cells


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    least = [_least_width(column) for column in zip(columns, *rows, strict=True)]
    if sum(least) + GAP * (len(least) - 1) > console.width and console.width < USUAL_COLUMNS:
        _draw_wide((columns, *rows))
        return
    # On a terminal of the usual width nothing is longer than a line; the longest words are broken instead.
    ids = {one for one, column in enumerate(zip(*rows, strict=True)) if any(map(_UUID.fullmatch, column))}
    while sum(least) + GAP * (len(least) - 1) > console.width:
        widest = max(range(len(least)), key=lambda one: (one not in ids and least[one] > SHORT, least[one]))
        least[widest] -= 1
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, width in zip(columns, least, strict=True):
        table.add_column(column, overflow="fold", min_width=width)
    for row in rows:
        # Text, not str: rich would read brackets in a str as markup.
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)


def _least_width(column: Sequence[str]) -> int:
    """The width at which no word of a column is broken, unless it is very long."""
    from rich.cells import cell_len

    words = [word for cell in column for word in cell.split()]
    longest = max(map(cell_len, words), default=0)
    return longest if any(map(_UUID.fullmatch, words)) else min(UNBROKEN, longest)


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
