"""Operations: two lines each in the list, and one of them node by node."""

from __future__ import annotations

import re

from rich.text import Text

from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.cli.terminal.fleet_words import bytes_of_bytes, clock, counted, headline, title
from enginehouse.cli.terminal.progress import next_try, phase_words, why
from enginehouse.cli.terminal.seen import bytes_of
from enginehouse.cli.terminal.top.drawing import (
    BAD,
    MUTED,
    NO_TARGET,
    PILL_WIDTH,
    PILLS,
    WARN,
    Row,
    Target,
    bar,
    cell,
    joined,
    line_row,
    name_width,
    pill,
    plain,
    since,
    wrapped,
)
from enginehouse.core.ids import OperationId
from enginehouse.core.intent import CANARY, DRAINING, NODE_AWAY
from enginehouse.core.progress import format_bytes
from enginehouse.core.views import NodeRow, OperationView

EMPTY = "No operations yet."
BUSY = "The worker has not answered for {}; it is still working. Nothing is sent twice."
_SILENT = re.compile(r"^no progress for (\d+ s);")  # how the frontend says it
_STATUS_PILLS = {
    "queued": "queued",
    "running": "running",
    "succeeded": "success",
    "partial": "partly",
    "failed": "error",
    "cancelled": "cancelled",
    "superseded": "superseded",
}
_FETCHING = ("install_backend", "pull_model")


def rows(state: FleetState, at: float, width: int) -> list[Row]:
    """Those that run first, then those that wait, then those that have ended; the newest first of each."""
    names = {_pill_of_all(one) for one in state.operations.values()}
    mark = max((len(PILLS[name][1]) + 2 for name in names), default=0)
    newest = sorted(state.operations.values(), key=lambda one: (one.createdAt, one.jobID), reverse=True)
    return [
        _row(one, state, max(PILL_WIDTH, mark)) for one in sorted(newest, key=lambda one: (one.has_ended, one.isParked))
    ]


def _row(operation: OperationView, state: FleetState, mark: int) -> Row:
    words = f"{operation.kind} {operation.name} {operation.status} {operation.jobID} {operation.author}"
    words += " " + " ".join({row.node_name for row in operation.nodes})

    def draw(width: int) -> list[Text]:
        return [_first(operation, state, width, mark), _second(operation, state, width)]

    return Row(Target("operation", operation.jobID), words, 2, draw)


def _pill_of_all(operation: OperationView) -> str:
    return "parked" if operation.isParked else _STATUS_PILLS.get(operation.status, "queued")


def _first(operation: OperationView, state: FleetState, width: int, mark: int) -> Text:
    style = MUTED if operation.has_ended else "bold"
    length = 10 if width < 100 else 20
    name = max(14, width - mark - 16 - length - 9)
    percent = 100 if operation.status == "succeeded" else operation.progress
    return joined(
        pill(_pill_of_all(operation), mark),
        cell(title(operation, state), name, style),
        cell(done_of(operation), 16, style),
        bar(percent / 100, length, MUTED) if operation.has_ended else bar(percent / 100, length),
        cell(f"{percent} %", 5, style, right=True),
    )


def _second(operation: OperationView, state: FleetState, width: int) -> Text:
    if operation.has_ended:
        age = since(operation.finishedAt or operation.createdAt)
        text = f"{operation.jobID[:8]}  {age}, by {operation.author}"
        if operation.dismissed:
            text += ", dismissed"
        error = output.shortened(operation.error)
        return cell(f"  {text}" + (f"  {error}" if error else ""), width, BAD if _is_failure(operation) else MUTED)
    parts = [part for part in (transfer(operation, state), headline(operation, state).partition(": ")[2]) if part]
    age = f"{operation.jobID[:8]}  {since(operation.createdAt)}, by {operation.author}"
    return cell("  " + "  ".join([age, *parts]), width, MUTED)


def _is_failure(operation: OperationView) -> bool:
    return operation.status in ("failed", "partial") and not operation.dismissed


def done_of(operation: OperationView) -> str:
    """`2 of 5 nodes`; steps, where a node has several."""
    rows = operation.nodes
    if not rows:
        return operation.message or operation.status
    done = sum(row.status == "success" for row in rows)
    return f"{done} of {counted(len(rows), 'step' if operation.kind == 'load' else 'node')}"


def transfer(operation: OperationView, state: FleetState) -> str:
    """Bytes of bytes, the rate, and the time left."""
    done, total = bytes_of(operation)
    if not total:
        return ""
    rate = state.rate_of(operation.jobID)
    # Until every node has said how much it has to fetch, their sum would be a denominator that grows.
    is_whole = all(row.kind not in _FETCHING or row.total_bytes or not row.is_open for row in operation.nodes)
    text = bytes_of_bytes(done, total) if is_whole else f"{format_bytes(done)} so far"
    if rate > 0:
        text += f"  {format_bytes(int(rate))}/s"
        text += f"  {clock((total - done) / rate)} left" if total > done and is_whole else ""
    return text


def details(state: FleetState, operation_id: str, at: float, width: int) -> list[Row]:
    """The sentence, the total, then every node: what is on the first row acts on all, a node's row on that node."""
    operation = state.operations.get(OperationId(operation_id))
    if operation is None:
        return [line_row(NO_TARGET, plain("This operation is not known."))]
    target = Target("operation", operation.jobID)
    style = MUTED if operation.has_ended else "bold"
    found = [line_row(target, line) for line in wrapped(headline(operation, state), width, style=style)[:1]]
    found += [line_row(NO_TARGET, line) for line in wrapped(headline(operation, state), width, style=style)[1:]]
    asked = f"asked by {operation.author} {since(operation.createdAt)} as {operation.jobID}"
    found += [line_row(NO_TARGET, line) for line in wrapped(asked, width, style=MUTED)]
    if moved := transfer(operation, state):
        found.append(
            line_row(NO_TARGET, joined(bar(operation.progress / 100, 20), plain(f"{operation.progress} %  {moved}")))
        )
    name = name_width((row.node_name for row in operation.nodes), width)
    for row in operation.nodes:
        found += _node_rows(operation, row, width, name)
    for excluded in operation.excluded:
        first = joined(pill("skipped"), plain(excluded.node_name))
        found += [line_row(Target("operation", operation.jobID, excluded.node_name), first)]
        found += [line_row(NO_TARGET, line) for line in wrapped(excluded.reason, width, "   ", MUTED)]
    if operation.error and not operation.nodes:
        found += [line_row(NO_TARGET, line) for line in wrapped(operation.error, width, "   ", BAD)]
    return found


def _node_rows(operation: OperationView, row: NodeRow, width: int, name: int) -> list[Row]:
    total = row.total_bytes or 0
    done = total if row.status == "success" else row.current_bytes or 0
    figures = bytes_of_bytes(done, total) if total else ""
    percent = 100.0 if row.status == "success" else row.percentage
    first = joined(
        pill(pill_of(row)),
        cell(row.node_name, name, "bold" if row.is_open else ""),
        bar(percent / 100, 10),
        cell(f"{percent:.0f} %", 5, right=True),
        cell(figures, 19),
        cell(phase_words(row) if row.status == "downloading" else row.action, max(8, width - name - 52), MUTED),
    )
    found = [line_row(Target("operation", operation.jobID, row.node_name), first, words=row.node_name)]
    text, style = explained(row)
    return [*found, *(line_row(NO_TARGET, line) for line in wrapped(text, width, "   ", style))] if text else found


def pill_of(row: NodeRow) -> str:
    match row.status:
        case "downloading" if row.phase in ("starting", "loading"):
            return row.phase
        case "downloading" if row.kind not in _FETCHING and not row.file_name:
            return "working"
        case "downloading" if not row.phase:
            return "installing"
        case "downloading":
            return {"extracting": "installing"}.get(row.phase, "downloading")
        case "running_on_worker":
            return "busy"
        case "success" | "error" | "cancelled" | "superseded":
            return row.status
        case _:
            return "queued"


def explained(row: NodeRow) -> tuple[str, str]:
    """What is to be said below a row: the error in full, what it waits for, the attempt and the next try."""
    attempt = f"attempt {row.attempt}" if row.attempt > 1 else ""
    if row.status == "running_on_worker":
        silent = _SILENT.match(row.error)
        return BUSY.format(silent[1] if silent else "a while"), WARN
    if row.status in ("error", "cancelled", "superseded"):
        return "; ".join(part for part in (why(row) or "no reason was given", attempt) if part), BAD
    if row.status != "queued":
        return attempt, MUTED
    if row.reason in (NODE_AWAY, DRAINING, CANARY):
        is_away = row.reason == NODE_AWAY
        return f"waits for {row.node_name}, which is offline" if is_away else why(row), MUTED
    return "; ".join(part for part in (why(row), attempt, next_try(row, row.due_in_seconds)) if part), WARN
