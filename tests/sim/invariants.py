"""The guarantees, each a function that looks at facts and says what is wrong with them, or nothing.

`StoreChecks` sees every committed change of a row, `WorkerChecks` everything that begins, ends and takes effect on one
machine. Both compare with a ledger of their own, never with what the product says of itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from msgspec import Struct
from tests.sim.rows import Changed, IntentRow, OperationRow
from tests.sim.trace import Violation

from enginehouse.core.wire import Command

Fail = Callable[[Violation], None]
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


def wish_is_kept_whole(before: IntentRow, after: IntentRow) -> str:
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
    return "" if before == after else f"operation {after.id} was {before} and became {after}"


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


def lane_is_kept(claimed: IntentRow, running: int) -> str:
    """Of the intents in one lane no more run at once than it is wide, on however many frontends."""
    if claimed.lane and running > claimed.lane_width:
        return f"{running} intents of lane {claimed.lane} run, at most {claimed.lane_width} may"
    return ""


class StoreChecks:
    """The ledger of everything that was committed."""

    def __init__(self, now: Callable[[], float], fail: Fail) -> None:
        self._now = now
        self._fail = fail
        self.intents: dict[str, IntentRow] = {}
        self.operations: dict[str, OperationRow] = {}
        self.ended_at: dict[str, float] = {}
        self._newest: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, str], set[str]] = {}

    def committed(self, changes: list[Changed]) -> None:
        for changed in changes:
            row = changed.after or changed.before
            if isinstance(row, IntentRow):
                self._intent(changed.before, changed.after)  # type: ignore[arg-type]  # both are of one table
            else:
                self._operation(changed.before, changed.after)  # type: ignore[arg-type]
        for (_, subject), ids in self._open.items():
            self._judge("G2", one_is_open(ids, subject))

    def _intent(self, before: IntentRow | None, after: IntentRow | None) -> None:
        if after is None:
            self._judge("G1", f"intent {before and before.id} was removed")
            return
        place = (after.node_id, after.subject)
        if before is None:
            self._newest[place] = max(self._newest.get(place, 0), after.generation)
        else:
            self._judge("G1", ended_stays_ended(before, after))
            self._judge("G1", wish_is_kept_whole(before, after))
            self._judge("G3", lease_is_respected(before, after, self._now()))
            self._judge("G4", attempts_count_up(before, after))
            self._judge("G9", stored_progress_does_not_fall(before, after))
            if before.state != "running" and after.state == "running":
                self._judge("G2", older_is_never_claimed(after, self._newest.get(place, 0)))
        self.intents[after.id] = after
        if after.lane and after.state == "running":
            running = sum(one.lane == after.lane and one.state == "running" for one in self.intents.values())
            self._judge("lanes", lane_is_kept(after, running))
        open_ones = self._open.setdefault(place, set())
        if after.is_ended:
            open_ones.discard(after.id)
            self.ended_at.setdefault(after.id, self._now())
        else:
            open_ones.add(after.id)

    def _operation(self, before: OperationRow | None, after: OperationRow | None) -> None:
        if after is None:
            self._judge("G1", f"operation {before and before.id} was removed")
            return
        if before is not None:
            self._judge("G1", request_is_kept_whole(before, after))
        self.operations[after.id] = after

    def _judge(self, guarantee: str, wrong: str) -> None:
        if wrong:
            self._fail(Violation(guarantee, wrong))


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


class Effect(Struct, frozen=True):
    generation: int
    state: str  # the digest that is there, "" for nothing


class WorkerChecks:
    """The ledger of one machine. `stopped` is the end of a worker: what it worked on, nobody works on."""

    def __init__(self, name: str, now: Callable[[], float], fail: Fail) -> None:
        self._name = name
        self._now = now
        self._fail = fail
        self._working: dict[str, list[str]] = {}
        self._commands: dict[str, Command | None] = {}
        self._begun: set[tuple[str, int]] = set()
        self._recorded: set[tuple[str, int]] = set()
        self._seen: dict[str, Pair] = {}
        self._passed: dict[tuple[str, int], Pair] = {}
        self._asked: dict[tuple[str, int], tuple[str, float]] = {}
        self._idle_since: dict[str, float] = {}
        self.effects: dict[str, list[Effect]] = {}

    def asked(self, subject: str, command: Command) -> None:
        """The worker has the command."""
        self._asked.setdefault((command.intent, command.attempt), (subject, self._now()))

    def answered(self, command: Command) -> None:
        self._asked.pop((command.intent, command.attempt), None)

    def idle_waits(self) -> dict[tuple[str, int], float]:
        """Commands that have not begun although nobody works on their subject, and since when that is so."""
        return {
            attempt: max(since, self._idle_since.get(subject, 0.0))
            for attempt, (subject, since) in self._asked.items()
            if not self._working.get(subject)
        }

    def passed(self, subject: str, command: Command) -> None:
        """The worker looked whether it has seen something newer, and found nothing. What it has seen counts as of
        then: what comes while this one is already at work stops it, and does not make its beginning wrong.
        """
        self._passed[(command.intent, command.attempt)] = self._seen.get(subject, (0, 0))

    def begin(self, subject: str, command: Command | None) -> str:
        token = f"{command.intent}/{command.attempt}" if command else "a command without an intent"
        working = self._working.setdefault(subject, [])
        working.append(token)
        self._judge("G3", one_works_at_a_time(subject, working))
        if command is not None:
            seen = self._passed.pop((command.intent, command.attempt), self._seen.get(subject, (0, 0)))
            self._judge("G2", older_never_begins(subject, command, seen))
            self._judge("G4", attempt_is_done_once(command, self._begun, self._recorded))
            self._begun.add((command.intent, command.attempt))
            self._asked.pop((command.intent, command.attempt), None)
            self._commands[subject] = command
        return token

    def end(self, subject: str, token: str) -> None:
        if token in self._working.get(subject, ()):
            self._working[subject].remove(token)
            self._idle_since[subject] = self._now()

    def is_working_on(self, subject: str) -> bool:
        return bool(self._working.get(subject))

    def took_effect(self, subject: str, state: str) -> None:
        command = self._commands.get(subject)
        self.effects.setdefault(subject, []).append(Effect(command.generation if command else 0, state))

    def journalled(self, line: bytes) -> None:
        said = json.loads(line)
        if "subject" in said:
            pair = (said.get("generation", 0), said.get("fence", 0))
            self._seen[said["subject"]] = max(pair, self._seen.get(said["subject"], (0, 0)))
        if "result" in said:
            self._recorded.add((said["result"]["intent"], said["result"]["attempt"]))

    def forgotten(self) -> None:
        """It belongs to another node now, which counts from one."""
        self._seen.clear()
        self.effects.clear()

    def stopped(self) -> None:
        self._working.clear()
        self._begun.clear()
        self._asked.clear()
        self._passed.clear()

    def _judge(self, guarantee: str, wrong: str) -> None:
        if wrong:
            self._fail(Violation(guarantee, f"{self._name}: {wrong}"))
