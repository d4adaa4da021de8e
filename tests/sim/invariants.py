"""The guarantees, each a function that looks at facts and says what is wrong with them, or nothing.

The facts are those of the ledgers, never what the product says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Collection

import msgspec
from tests.sim.rows import IntentRow, OperationRow

from enginehouse.core.wire import Command

Pair = tuple[int, int]


# Rows ----------------------------------------------------------------------------------------------


def ended_stays_ended(before: IntentRow, after: IntentRow) -> str:
    """G1: it ends in exactly one way, and nothing changes that end."""
    if before.is_ended and (before.state, before.outcome, before.attempt, before.fence) != (
        after.state,
        after.outcome,
        after.attempt,
        after.fence,
    ):
        return f"intent {after.id} had ended as {before.state} and became {after.state}"
    return ""


def intent_is_kept_whole(before: IntentRow, after: IntentRow) -> str:
    """G1: every parameter it was given can be read to the end."""
    if (before.node_id, before.subject, before.generation, before.action) != (
        after.node_id,
        after.subject,
        after.generation,
        after.action,
    ):
        return f"intent {after.id} is no longer what was asked for"
    return ""


def request_is_kept_whole(before: OperationRow, after: OperationRow) -> str:
    """G1: an operation's target, kind, name and requester never change."""
    same = msgspec.structs.replace(after, is_steered=before.is_steered) == before
    return "" if same else f"operation {after.id} was {before} and became {after}"


def older_is_never_claimed(after: IntentRow, newest_generation: int) -> str:
    """G2: an older one never starts after a newer was accepted."""
    if after.generation < newest_generation:
        return (
            f"intent {after.id} of generation {after.generation} was claimed after generation {newest_generation} "
            f"of {after.subject} had been accepted"
        )
    return ""


def one_is_open(open_ones: set[str], subject: str) -> str:
    """G2: accepting a newer one closes the older in the same transaction."""
    return "" if len(open_ones) <= 1 else f"{subject} has {len(open_ones)} open intents: {sorted(open_ones)}"


def same_work_is_joined(older: IntentRow, newer: IntentRow) -> str:
    """G4: whoever asks for the build that is being installed joins that, whatever name was used."""
    first, second = json.loads(older.action), json.loads(newer.action)
    for one in (first, second):
        one.pop("backend", None)
        one.get("resolved", {}).pop("meta", None)
    if first["type"] == "install_backend" and first == second:
        return f"intent {newer.id} superseded {older.id}, which was the same work"
    return ""


def lease_is_respected(before: IntentRow, after: IntentRow, now: float) -> str:
    """G3: nobody takes a running intent whose owner's lease has not ended, and whoever takes one has a higher fence."""
    if (before.state, after.state) == ("running", "running") and before.owner != after.owner:
        if before.lease_until >= now:
            return f"{after.owner} took intent {after.id} while {before.owner} held its lease"
        if after.fence <= before.fence:
            return f"{after.owner} took intent {after.id} over without a higher fence"
    if before.state != "running" and after.state == "running" and after.fence <= before.fence:
        return f"intent {after.id} was claimed without a higher fence"
    return ""


def attempts_count_up(before: IntentRow, after: IntentRow) -> str:
    """G4: every sending has a number of its own."""
    claimed = before.state != "running" and after.state == "running"
    if after.attempt != before.attempt + (1 if claimed else 0):
        return (
            f"intent {after.id} went from attempt {before.attempt} to {after.attempt} ({before.state} to {after.state})"
        )
    return ""


def stored_progress_does_not_fall(before: IntentRow, after: IntentRow) -> str:
    """G9: within an attempt the numbers of the row do not fall either."""
    if not before.progress or not after.progress or before.progress == after.progress:
        return ""
    old, new = json.loads(before.progress), json.loads(after.progress)
    if old.get("attempt", 0) != new.get("attempt", 0):
        return ""
    if new.get("done_bytes", 0) < old.get("done_bytes", 0):
        return f"the progress of intent {after.id} fell from {before.progress} to {after.progress}"
    return ""


def lane_is_kept(operation: OperationRow, running: int, fleet: int) -> str:
    """Of the intents of one operation no more run at once than it was asked to, of an upgrade without a word about that
    a quarter of the fleet; on however many frontends.
    """
    asked = json.loads(operation.asked).get("max_parallel", 0)
    width = asked or (max(1, fleet // 4) if operation.kind == "upgrade" else 0)
    if width and running > width:
        return f"{running} intents of operation {operation.id} ({operation.kind}) run, at most {width} may"
    return ""


# Machines ------------------------------------------------------------------------------------------


def one_works_at_a_time(subject: str, working: list[str]) -> str:
    """G3: at most one of install, upgrade and delete works on a subject of a node at any moment."""
    return "" if len(working) <= 1 else f"{working} work on {subject} at the same time"


def older_never_begins(subject: str, command: Command, seen: Pair) -> str:
    """G2: nothing begins on a machine that has seen something newer for the same subject."""
    if (command.generation, command.fence) < seen:
        return f"generation {command.generation} (fence {command.fence}) of {subject} began after {seen} had been seen"
    return ""


def attempt_is_done_once(command: Command, begun: set[tuple[str, int]], recorded: set[tuple[str, int]]) -> str:
    """G4: an attempt begins once in the life of a worker, and never after its result was written down."""
    attempt = (command.intent, command.attempt)
    if attempt in recorded:
        return f"attempt {attempt} began again although its result is in the journal"
    if attempt in begun:
        return f"attempt {attempt} began twice"
    return ""


def every_ended_is_told(doing: str, ended: Collection[str], told: Collection[str]) -> str:
    """G13: what was stopped on the way is named, so that nothing is sent there any more."""
    untold = set(ended) - set(told)
    return f"{doing} stopped {sorted(untold)} and told of {sorted(told)}" if untold else ""


def success_was_so(intent: IntentRow, wanted: str, seen: Collection[str]) -> str:
    """G10: what is called done was so at some moment between the request and the word."""
    if wanted in seen:
        return ""
    return (
        f"intent {intent.id} succeeded, but from its acceptance on {intent.subject} was never "
        f"{wanted or 'absent'}, only {sorted(seen)}"
    )
