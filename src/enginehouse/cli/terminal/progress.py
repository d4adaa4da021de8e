"""Views of an operation while it is followed: lines in a pipe, JSON lines with --json, bars on a terminal.

A view gets every state and decides what to show. Lines are printed when a state or phase changes, and otherwise at most
every two seconds, however many nodes report. Bars are in `bars.py`, because only they need rich.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from enginehouse.cli.terminal import output
from enginehouse.core.backend import ALREADY
from enginehouse.core.intent import CANARY, DRAINING, MAX_FAILURES, NODE_AWAY
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeRow, OperationView

LINE_SECONDS = 2.0

# Remarks of workers on a success that may be unexpected.
ABSENT = "already_absent"  # the note of a removal that had nothing to remove
_CANNOT = re.compile(r"^cannot [^:;.]{1,80}: (it )?")
_RETRIED = re.compile(r"; [^;]*\bretried automatically$")
_PHASES = {"": "working", "resolving": "looking up", "extracting": "unpacking"}


class View(Protocol):
    def __enter__(self) -> object: ...

    def __exit__(self, *exc: object) -> None: ...

    def show(self, rows: list[NodeRow], answer: object, waiting: str = "") -> None:
        """Show the rows of an operation, or without any what it waits for; `answer` is all of it."""

    def trouble(self, text: str) -> None:
        """Show why no state arrives at the moment; "" when states arrive again."""

    def tell(self, line: str) -> None:
        """Show one line of the outcome."""


def choose_view(*, as_json: bool) -> View:
    if as_json:
        return JsonLines()
    # A terminal that cannot show these characters would get escapes instead, which overflow and wrap its lines.
    if output.is_terminal(sys.stderr) and output.can_show("✓✗…⠋━", sys.stderr):
        from enginehouse.cli.terminal.bars import Bars

        return Bars()
    return Lines()


def phase_words(row: NodeRow) -> str:
    # Every command starts in this phase, but only those that fetch something look anything up.
    is_fetched = row.action.partition(" ")[0] in ("install", "upgrade", "place")
    phase = "" if row.phase == "resolving" and not is_fetched else row.phase
    words = _PHASES.get(phase, phase)
    return f"{words} {output.shortened(row.file_name)}" if row.file_name else words


def next_try(row: NodeRow, due_in_seconds: float | None) -> str:
    """When a row that waits after an error is retried; "" for any other row."""
    if row.status != "queued" or row.reason in (NODE_AWAY, DRAINING, CANARY) or not (row.error or row.reason):
        return ""
    # At zero the retry is about to start, so the countdown is replaced.
    soon = due_in_seconds is None or due_in_seconds < 1
    which = f"try {row.failures + 1} of {MAX_FAILURES}" if 0 < row.failures < MAX_FAILURES else "next try"
    return "trying again" if soon else f"{which} in {output.duration(due_in_seconds or 0)}"


def why(row: NodeRow) -> str:
    return output.shortened(row.error or row.reason)


def describe(row: NodeRow, due_in_seconds: float | None) -> str:
    """The state of a row in words, with the reason and the time of the next retry."""
    match row.status:
        case "success":
            return "done"
        case "queued" if row.reason == NODE_AWAY:
            return f"queued: {row.node_name} is offline"
        case "queued" if row.reason == DRAINING:
            return f"queued: {row.node_name} is drained"
        case "queued" if row.reason == CANARY:
            return f"held: {why(row)}"
        case "queued" if row.error or row.reason:
            return f"waiting: {why(row)}; {next_try(row, due_in_seconds)}"
        case "queued":
            return "queued"
        case "downloading":
            return phase_words(row)
        case "running_on_worker":
            return "still running on the worker, which has been silent for a while"
        case "error":
            return why(row) or "failed without a reason"
        case "cancelled" | "superseded":
            return output.shortened(row.error) or row.status
        case _:
            return row.status


def with_bytes(row: NodeRow) -> str:
    """The description with the figures that a bar would show."""
    text = describe(row, row.due_in_seconds)
    if row.status == "downloading" and row.total_bytes:
        done, total = format_bytes(row.current_bytes or 0), format_bytes(row.total_bytes)
        text = f"{text}: {done} of {total} ({row.percentage:.0f}%)"
    return text


def subject(row: NodeRow) -> str:
    return f"{row.node_name}: {row.action}" if row.action else row.node_name


def ending_lines(operation: OperationView) -> Iterator[str]:
    """One line per row with its outcome, then the excluded nodes, then an error that belongs to no row."""
    marks = {"success": "✓", "error": "✗", "cancelled": "✗", "superseded": "✗"}
    plain = {"success": "ok", "error": "FAILED", "cancelled": "FAILED", "superseded": "FAILED"}
    fancy = output.can_show("✓✗…", sys.stdout) and output.can_show("✓✗…", sys.stderr)
    if not operation.nodes and operation.status == "succeeded":
        yield f"{'✓' if fancy else 'ok'} {operation.kind.replace('_', ' ')} {operation.name}"
    for row in operation.nodes:
        if row.status == "success" and row.note.startswith(ALREADY):
            yield f"= {row.node_name}: {row.action.partition(' ')[2] or row.action} is {output.shortened(row.note)}"
            continue
        if row.status == "success" and row.note == ABSENT:
            yield f"= {subject(row)}: it was not there"
            continue
        mark = marks.get(row.status, "…") if fancy else plain.get(row.status, "...")
        end = _end_of(row) if row.status == "success" else f": {describe(row, row.due_in_seconds)}"
        yield f"{mark} {subject(row)}{end}"
    for excluded in operation.excluded:
        yield f"- {excluded.node_name}: left out: {excluded.reason}"
    shown = {row.error for row in operation.nodes}
    if operation.status == "failed" and operation.error and not any(one and one in operation.error for one in shown):
        yield f"{'✗' if fancy else 'FAILED'} {operation.error}"


def _end_of(row: NodeRow) -> str:
    """What a success changed, as its worker says it."""
    return f" {output.shortened(row.note)}" if row.note.startswith(("from ", "now ")) else ""


def brief(operation: OperationView) -> str:
    """Why an open operation is not done yet, in one line: "attic: needs 103 MiB, 59 free; try 5 of 10 in 14 s"."""
    waiting = [row for row in operation.nodes if row.status == "queued" and (row.error or row.reason)]
    for row in sorted(waiting, key=lambda row: row.reason in (NODE_AWAY, DRAINING, CANARY)):
        if row.reason in (NODE_AWAY, DRAINING):
            text = f"{row.node_name} is {'offline' if row.reason == NODE_AWAY else 'drained'}"
        elif row.reason == CANARY:
            text = f"{row.node_name}: {why(row)}"
        else:
            text = f"{row.node_name}: {_bare(why(row))}; {next_try(row, row.due_in_seconds)}"
        more = len({one.node_name for one in waiting}) - 1
        return f"{text} (and {more} more)" if more else text
    moving = [row for row in operation.nodes if row.status in ("downloading", "running_on_worker")]
    if not moving:
        return operation.message if operation.message not in ("", operation.status) and not operation.nodes else ""
    slowest = min(moving, key=lambda row: row.percentage)
    figure = f" {slowest.percentage:.0f}%" if slowest.total_bytes else ""
    return f"{slowest.node_name}: {phase_words(slowest)}{figure}"


def _bare(reason: str) -> str:
    """A reason without the "cannot start tiny-chat: " that the first column says already, and without the promise to
    try again, which the number of the next try keeps.
    """
    return _RETRIED.sub("", _CANNOT.sub("", reason))


def canary_lines(operation: OperationView) -> Iterator[str]:
    """How the canaries of an upgrade are doing, while they are watched."""
    if operation.canary is not None and operation.canary.phase == "watching":
        for one in operation.canary.nodes:
            yield f"canary {one.node_name}: {one.state}{f' ({one.waits_for})' if one.waits_for else ''}"


class Lines:
    """Prints one plain line per change to stderr."""

    def __init__(
        self, write: Callable[[str], None] = output.remark, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._write = write
        self._monotonic = monotonic
        self._seen: dict[str, tuple[object, ...]] = {}
        self._printed: dict[str, str] = {}
        self._written_at = 0.0
        self._trouble = ""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, rows: list[NodeRow], answer: object, waiting: str = "") -> None:
        moved: list[NodeRow] = []
        for row in rows:
            seen = (row.status, row.phase, row.reason, row.error, row.attempt)
            if self._seen.get(row.intent) != seen:
                self._seen[row.intent] = seen
                # The outcome of a row is printed at the end, with the others.
                if row.is_open:
                    self._print(row)
            elif row.is_open and self._printed.get(row.intent) != with_bytes(row) and row.current_bytes:
                moved.append(row)
        if moved and self._monotonic() - self._written_at >= LINE_SECONDS:
            self._print(min(moved, key=lambda row: list(self._printed).index(row.intent)))

    def _print(self, row: NodeRow) -> None:
        # The last printed row is last in the dict, so that rows with progress take turns.
        self._printed.pop(row.intent, None)
        self._printed[row.intent] = with_bytes(row)
        self._written_at = self._monotonic()
        self._write(f"{subject(row)}: {with_bytes(row)}")

    def trouble(self, text: str) -> None:
        if bool(text) != bool(self._trouble):
            self._write(f"{text}; trying again" if text else "connected again")
        self._trouble = text

    def tell(self, line: str) -> None:
        output.say(line)


class JsonLines:
    """Prints every state of the operation as one line of JSON to stdout; remarks go to stderr."""

    def __init__(self) -> None:
        self._last: object = None
        self._trouble = False

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def show(self, rows: list[NodeRow], answer: object, waiting: str = "") -> None:
        # After an interruption the same state may be read again.
        if answer != self._last:
            output.emit_json_line(answer)
        self._last = answer

    def trouble(self, text: str) -> None:
        if text and not self._trouble:
            output.remark(f"{text}; trying again")
        self._trouble = bool(text)

    def tell(self, line: str) -> None:
        pass
