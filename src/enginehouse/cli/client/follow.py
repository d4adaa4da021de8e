"""Follows an operation to its end.

The operation is in the frontend's database, so a restart of the frontend only interrupts the view. Changes arrive as
events; after every interruption the operation is read once, so that no change is missed. Errors that a retry cannot
fix (no such operation, no permission) end the following.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from enginehouse.cli.client.connect import FrontendApi, read, segment
from enginehouse.cli.options.shared import wants_json
from enginehouse.cli.terminal.output import remark
from enginehouse.cli.terminal.progress import View, choose_view, ending_lines
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.intent import DRAINING
from enginehouse.core.views import OperationView

FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 2.0  # short, to notice soon that a frontend is back
PATIENCE_SECONDS = 300.0  # a restart takes seconds; a longer outage is an error
READ_SECONDS = 5.0  # timeout for reading the operation after an interruption
LONGEST_LOOK_SECONDS = 1.0  # between two looks of a following with a limit
LAST_LOOK_SECONDS = 1.0  # timeout of the look at the deadline

_EXIT_CODES = {"succeeded": 0, "partial": 3, "failed": 1, "cancelled": 1, "superseded": 1}


def exit_code_of(operation: OperationView) -> int:
    if operation.isParked:
        code = 3 if any(row.status == "error" for row in operation.nodes) else 0
    else:
        code = _EXIT_CODES.get(operation.status, 1)
    # Excluded nodes make it a partial success.
    return 3 if code == 0 and operation.leaves_out else code


def follow(
    frontend: FrontendApi,
    answer: object,
    *,
    outcome_to: Literal["stdout", "stderr"] = "stdout",
    limit_seconds: float | None = None,
) -> OperationView:
    """Show the operation in `answer` until it is over, then its outcome; returns its last state.

    With a limit it is followed until it has ended, for so long at most, even if it only waits for a node: that one may
    return in time. Ctrl-C ends the following, not the operation; the user is told so before KeyboardInterrupt is raised
    again.
    """
    operation = read(answer, OperationView)
    view = choose_view(as_json=wants_json() and outcome_to == "stdout")
    try:
        with view:
            view.show(operation.nodes, answer, waiting_text(operation))
            for answer in _changes(frontend, operation, view, limit_seconds):
                event = read(answer, OperationView)
                operation = operation.followed_by(event)
                whole = msgspec.to_builtins(operation) if event.partial else answer
                view.show(operation.nodes, whole, waiting_text(operation))
                if operation.has_ended or (operation.is_over and limit_seconds is None):
                    break
    except KeyboardInterrupt:
        remark(
            f"the operation goes on; see it with `enginehouse ops follow {operation.jobID}` "
            f"or `enginehouse ops show {operation.jobID}`"
        )
        raise
    tell = view.tell if outcome_to == "stdout" else remark
    for line in ending_lines(operation):
        tell(line)
    if operation.isParked:
        remark(parked_sentence(operation))
    return operation


def waiting_text(operation: OperationView) -> str:
    return f"{operation.kind} {operation.name}: {operation.message or operation.status}"


def parked_sentence(operation: OperationView) -> str:
    waiting = [row for row in operation.nodes if row.status == "queued"]
    names = list(dict.fromkeys(row.node_name for row in waiting))
    # A drain may wait for its node before it has anything to stop there.
    who = ", ".join(names) or (operation.name if operation.kind == "drain" else "a node")
    are, they = ("are", "they") if len(names) > 1 else ("is", "it")
    is_drained = bool(waiting) and all(row.reason == DRAINING for row in waiting)
    if is_drained:
        state, when = "drained", f"{they} {are} resumed"
    else:
        state, when = "offline", "they reconnect" if len(names) > 1 else "it reconnects"
    what = f"The {operation.kind.replace('_', ' ')}"
    return f"{who} {are} {state}. {what} starts when {when}. Follow it: enginehouse ops follow {operation.jobID}"


def _changes(
    frontend: FrontendApi, operation: OperationView, view: View, limit_seconds: float | None
) -> Iterator[object]:
    if limit_seconds is not None:
        if not operation.has_ended:
            yield from look_until(frontend, operation.jobID, view.trouble, time.monotonic() + limit_seconds)
    elif not operation.is_over:
        yield from watch(frontend, operation.jobID, view.trouble)


def look_until(
    frontend: FrontendApi, operation_id: str, trouble: Callable[[str], None], deadline: float
) -> Iterator[object]:
    """Yield the state again and again until the deadline. A stream of events would be read for longer than that."""
    pause = FIRST_PAUSE_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(LONGEST_LOOK_SECONDS, pause * 2)
        # The last look is after the deadline, so that what ended in the last pause is seen.
        left = max(LAST_LOOK_SECONDS, deadline - time.monotonic())
        try:
            answer = frontend.client.request(
                "GET", f"/api/operations/{segment(operation_id)}", None, object, timeout_seconds=min(READ_SECONDS, left)
            )
        except Unavailable:
            trouble(f"cannot reach the frontend at {frontend.url}")
        else:
            trouble("")
            yield answer


def watch(
    frontend: FrontendApi,
    operation_id: str,
    trouble: Callable[[str], None],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Iterator[object]:
    """Yield every state from now on, for ever. `trouble` gets the reason of an outage, and "" after it."""
    lost = f"cannot reach the frontend at {frontend.url}"
    pause, seen = FIRST_PAUSE_SECONDS, time.monotonic()
    while True:
        try:
            for answer in _events(frontend, operation_id):
                pause, seen = FIRST_PAUSE_SECONDS, time.monotonic()
                trouble("")
                yield answer
        except NotFound:
            pass  # this frontend has no event stream; the request below finds out whether the operation exists
        except Unavailable:
            trouble(lost)
        try:
            answer = frontend.client.request(
                "GET", f"/api/operations/{segment(operation_id)}", None, object, timeout_seconds=READ_SECONDS
            )
            seen = time.monotonic()
            trouble("")
            yield answer
        except Unavailable:
            trouble(lost)
            if time.monotonic() - seen > patience_seconds:
                raise
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_SECONDS, pause * 2)


def _events(frontend: FrontendApi, operation_id: str) -> Iterator[object]:
    with frontend.client.stream_events(f"/api/events?operation={segment(operation_id)}") as events:
        for event in events:
            if event.event == "overflow":
                return  # events were dropped: read the operation itself
            if event.event != "operation":
                continue
            try:
                answer = msgspec.json.decode(event.data)
            except msgspec.DecodeError as error:
                raise Unavailable(f"cannot read an event of {frontend.url}: {error}") from error
            if isinstance(answer, dict) and answer.get("jobID") == operation_id:
                yield answer
