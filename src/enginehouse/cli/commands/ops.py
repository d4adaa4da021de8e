"""`enginehouse ops`: operations, their state and their history."""

from __future__ import annotations

import re

import click

from enginehouse.cli.answers import OperationPage
from enginehouse.cli.client.connect import FrontendApi, connect, read, segment
from enginehouse.cli.client.follow import exit_code_of, follow, parked_sentence
from enginehouse.cli.client.selectors import one_at_a_time, selector_option
from enginehouse.cli.client.watching import watchable
from enginehouse.cli.options.names import node_body
from enginehouse.cli.options.shared import command, emit, emit_json, group, no_follow_option, wants_json
from enginehouse.cli.terminal import output
from enginehouse.cli.terminal.progress import brief, canary_lines, ending_lines
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.views import OperationView

SEARCHED = 500  # the frontend's largest page; older operations need their full id
SHORTEST_PREFIX = 8


@group("ops", examples=("enginehouse ops list", "enginehouse ops follow 3f2a", "enginehouse ops cancel 3f2a"))
def entry() -> None:
    """List, follow, cancel, retry and release operations."""


@command("list", examples=("enginehouse ops list", "enginehouse ops list --open"))
@watchable
@click.option("--open", "only_open", is_flag=True, help="Only open and failed operations.")
@click.option(
    "--limit",
    type=click.IntRange(1, SEARCHED),
    default=50,
    show_default=True,
    metavar="NUMBER",
    help="How many to list at most.",
)
def list_operations(only_open: bool, limit: int) -> None:
    """List operations, newest first."""
    everything = "" if only_open else "all=true&"
    answer = connect().get(f"/api/operations?{everything}limit={limit}")
    if emit_json(answer):
        return
    operations = read(answer, OperationPage).operations
    short = short_ids([one.jobID for one in operations])
    rows = [
        (
            short[one.jobID],
            f"{one.kind} {one.name}",
            one.status,
            _nodes_done(one),
            output.age_of(one.createdAt),
            one.author,
            _why(one),
        )
        for one in operations
    ]
    columns = ("ID", "WHAT", "STATUS", "NODES", "AGE", "BY", "WHY")
    nothing = "no open or failed operations" if only_open else "no operations yet"
    output.emit_table(columns, rows, nothing, is_last_cut=True)


@command("show", examples=("enginehouse ops show 3f2a", "enginehouse ops show 3f2a --json"))
@click.argument("operation_id", metavar="ID")
def show(operation_id: str) -> None:
    """Show one operation, node by node. The beginning of its ID is enough."""
    answer = find(connect(), operation_id)
    if not emit_json(answer):
        describe(answer)


@command("follow", examples=("enginehouse ops follow 3f2a", "enginehouse ops follow 3f2a --json"))
@click.argument("operation_id", metavar="ID")
def follow_operation(operation_id: str) -> int:
    """Follow one operation to its end. The beginning of its ID is enough."""
    frontend = connect()
    return exit_code_of(follow(frontend, find(frontend, operation_id)))


_NODE = click.option("--node", metavar="NODE", help="Only on this node.")


@command("cancel", examples=("enginehouse ops cancel 3f2a", "enginehouse ops cancel 3f2a --node attic"))
@click.argument("operation_id", metavar="ID")
@_NODE
@selector_option
def cancel(operation_id: str, node: str | None, selectors: tuple[str, ...]) -> None:
    """Cancel what is open of an operation. Workers stop at once and keep what they had before.

    LocalAI's workers cannot be stopped: they finish, and their rows say so until then.
    """
    frontend = connect()
    found = read(find(frontend, operation_id), OperationView)
    answer: object = None
    for one in _places(frontend, found, node, selectors):
        answer = frontend.post(f"/api/operations/{segment(found.jobID)}/cancel", node_body(one))
    if not emit_json(answer):
        describe(answer.get("operation") if isinstance(answer, dict) else answer)


@command(
    "retry",
    examples=("enginehouse ops retry 3f2a", "enginehouse ops retry 3f2a --node attic"),
)
@click.argument("operation_id", metavar="ID")
@_NODE
@selector_option
@no_follow_option
def retry(operation_id: str, node: str | None, selectors: tuple[str, ...], no_follow: bool) -> int:
    """Retry what failed or was cancelled of an operation, as a new operation."""
    frontend = connect()
    found = read(find(frontend, operation_id), OperationView)
    path = f"/api/operations/{segment(found.jobID)}/retry"
    # All are requested before the first is followed, so that Ctrl-C while following leaves none out.
    answers = [frontend.request("POST", path, node_body(one)) for one in _places(frontend, found, node, selectors)]
    return max(finish(frontend, answer, no_follow=no_follow) for answer in answers)


@command("release", examples=("enginehouse ops release 3f2a",))
@click.argument("operation_id", metavar="ID")
def release(operation_id: str) -> None:
    """Let the nodes of an upgrade follow now that wait for its canaries.

    The canaries are not watched any more, and nothing is taken back.
    """
    frontend = connect()
    answer = frontend.post(f"/api/operations/{_id(frontend, operation_id)}/release")
    if not emit_json(answer):
        describe(answer.get("operation") if isinstance(answer, dict) else answer)


@command("dismiss", examples=("enginehouse ops dismiss 3f2a", "enginehouse ops dismiss --all"))
@click.argument("operation_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="All failed operations of the open list.")
def dismiss(operation_id: str | None, everything: bool) -> None:
    """Take a failed operation off the open list. It stays in the history."""
    if (operation_id is None) != everything:
        raise click.UsageError("give the ID of an operation, or --all")
    frontend = connect()
    if operation_id is not None:
        emit(frontend.post(f"/api/operations/{_id(frontend, operation_id)}/dismiss"), "dismissed")
        return
    gone: list[str] = []
    # Page by page: a dismissed operation leaves the list.
    while failed := _failures(frontend):
        for one in failed:
            frontend.post(f"/api/operations/{segment(one)}/dismiss")
        if set(failed) <= set(gone):
            break  # an older frontend lists them for ever
        gone += failed
    sentence = f"dismissed {len(gone)} operation{'s' * (len(gone) != 1)}" if gone else "= nothing failed is open"
    emit({"dismissed": gone}, sentence)


def _failures(frontend: FrontendApi) -> list[str]:
    listed = read(frontend.get(f"/api/operations?limit={SEARCHED}"), OperationPage).operations
    return [one.jobID for one in listed if one.has_ended and not one.dismissed]


def _places(
    frontend: FrontendApi, operation: OperationView, node: str | None, selectors: tuple[str, ...]
) -> list[str | None]:
    """The nodes to ask about: all, the one that was named, or those of the operation with the labels."""
    chosen = one_at_a_time(frontend, node, selectors)
    if not selectors:
        return chosen
    within = {row.node_id for row in operation.nodes}
    found: list[str | None] = [one for one in chosen if one in within]
    if not found:
        raise NotFound(f"no node with these labels is in operation {operation.jobID}", param="selector")
    return found


def _id(frontend: FrontendApi, beginning: str) -> str:
    """The full id of the operation, as a path segment."""
    return segment(read(find(frontend, beginning), OperationView).jobID)


def finish(frontend: FrontendApi, answer: object, *, no_follow: bool) -> int:
    """Follow a new operation, or show its id; returns the exit code."""
    if not no_follow:
        return exit_code_of(follow(frontend, answer))
    operation = read(answer, OperationView)
    code = 3 if operation.leaves_out else 0
    if wants_json():
        output.emit_json(answer)
        return code
    output.say(operation.jobID)
    for excluded in operation.excluded:
        output.remark(f"left out: {excluded.node_name}: {excluded.reason}")
    output.remark(
        f"{operation.kind} {operation.name} was accepted; follow it with: enginehouse ops follow {operation.jobID}"
    )
    return code


def find(frontend: FrontendApi, beginning: str) -> object:
    """The operation whose id starts with `beginning`; a full id is looked up directly."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}", beginning):
        raise Invalid(
            f"cannot use {beginning[:40]!r} as the id of an operation: `enginehouse ops list` shows them",
            code="invalid_name",
            param="id",
        )
    try:
        return frontend.get(f"/api/operations/{segment(beginning)}")
    except NotFound:
        pass
    answer = frontend.get(f"/api/operations?all=true&limit={SEARCHED}&rows=false")
    listed = answer.get("operations", []) if isinstance(answer, dict) else []
    found = [one for one in listed if str(one.get("jobID", "")).lower().startswith(beginning.lower())]
    if len(found) == 1:
        return frontend.get(f"/api/operations/{segment(str(found[0]['jobID']))}")
    if found:
        ids = ", ".join(str(one["jobID"]) for one in found[:5])
        raise Invalid(
            f"cannot use {beginning!r}: {len(found)} ids of operations begin with it ({ids}{', …' * (len(found) > 5)})",
            code="invalid_name",
            param="id",
        )
    raise NotFound(f"cannot find an operation whose id begins with {beginning!r}: `enginehouse ops list` shows them")


def describe(answer: object) -> None:
    operation = read(answer, OperationView)
    output.emit_facts(
        [
            ("id", operation.jobID),
            ("what", f"{operation.kind} {operation.name}"),
            ("status", operation.status),
            ("by", operation.author),
            ("age", output.age_of(operation.createdAt)),
        ]
    )
    for line in (*ending_lines(operation), *canary_lines(operation)):
        output.say(line)
    if operation.isParked:
        output.remark(parked_sentence(operation))


def short_ids(ids: list[str]) -> dict[str, str]:
    """Unique prefixes of the ids, all of the same length."""
    length = SHORTEST_PREFIX
    while len({one[:length] for one in ids}) < len(set(ids)):
        length += 1
    return {one: one[:length] for one in ids}


def _why(operation: OperationView) -> str:
    """Why an operation is not done, or did not succeed."""
    if not operation.has_ended:
        return brief(operation)
    if operation.dismissed:
        return "dismissed"
    left = next((row for row in operation.nodes if row.status not in ("success", "error")), None)
    return output.shortened(operation.error) or (f"{left.node_name}: {left.error or left.status}" if left else "")


def _nodes_done(operation: OperationView) -> str:
    """How many of its nodes are done: one node may have several steps."""
    left = {row.node_id for row in operation.nodes if row.status != "success"}
    every = {row.node_id for row in operation.nodes}
    return f"{len(every - left)}/{len(every)}" if every else ""


for each in (list_operations, show, follow_operation, cancel, retry, release, dismiss):
    entry.add_command(each)
