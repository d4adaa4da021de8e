"""What the guarantees are judged by: ledgers of everything that really happened.

`StoreChecks` sees every committed change of a row, `WorkerChecks` everything that begins, ends and takes effect on one
machine. Both judge at the moment of the change, and ask nothing of the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from msgspec import Struct
from tests.sim.invariants import (
    Pair,
    attempt_is_done_once,
    attempts_count_up,
    ended_stays_ended,
    every_ended_is_told,
    intent_is_kept_whole,
    lane_is_kept,
    lease_is_respected,
    older_is_never_claimed,
    older_never_begins,
    one_is_open,
    one_works_at_a_time,
    request_is_kept_whole,
    same_work_is_joined,
    stored_progress_does_not_fall,
)
from tests.sim.rows import Changed, IntentRow, OperationRow
from tests.sim.trace import Violation

from enginehouse.core.wire import Command

Fail = Callable[[Violation], None]


class StoreChecks:
    """The ledger of everything that was committed."""

    def __init__(self, now: Callable[[], float], fail: Fail, fleet: int, prove: Callable[[IntentRow], None]) -> None:
        self._now = now
        self._fail = fail
        self._fleet = fleet
        self._prove = prove  # called with every intent that succeeds
        self.intents: dict[str, IntentRow] = {}
        self.operations: dict[str, OperationRow] = {}
        self.ended_at: dict[str, float] = {}
        self._made_by: dict[str, str] = {}  # intent -> the operation that was stored together with it
        self._running: dict[str, set[str]] = {}  # operation -> those of its own intents that run
        self._newest: dict[tuple[str, str], int] = {}
        self._open: dict[tuple[str, str], set[str]] = {}
        self._touched: set[tuple[str, str]] = set()
        self.steered: set[str] = set()  # loads under way
        self.steered_until: dict[str, float] = {}
        self.open_count = 0  # intents that have not ended
        self.take_overs = 0

    def committed(self, changes: list[Changed]) -> None:
        made = [one.after.id for one in changes if isinstance(one.after, OperationRow) and one.before is None]
        if made:
            added = [one.after.id for one in changes if isinstance(one.after, IntentRow) and one.before is None]
            self._made_by.update(dict.fromkeys(added, made[0]))
        for changed in changes:
            row = changed.after or changed.before
            if isinstance(row, IntentRow):
                self._intent(changed.before, changed.after)  # type: ignore[arg-type]  # both are of one table
            else:
                self._operation(changed.before, changed.after)  # type: ignore[arg-type]
        for place in self._touched:
            self._judge("G2", one_is_open(self._open[place], place[1]))
        self._touched.clear()

    def _intent(self, before: IntentRow | None, after: IntentRow | None) -> None:
        if after is None:
            self._judge("G1", f"intent {before and before.id} was removed")
            return
        place = (after.node_id, after.subject)
        if before is None:
            self._newest[place] = max(self._newest.get(place, 0), after.generation)
            for older in self.intents.values():
                if (older.node_id, older.subject, older.generation) == (*place, after.generation - 1):
                    self._judge("G4", same_work_is_joined(older, after) if older.state == "superseded" else "")
        else:
            self._judge("G1", ended_stays_ended(before, after))
            self._judge("G1", intent_is_kept_whole(before, after))
            self._judge("G3", lease_is_respected(before, after, self._now()))
            self._judge("G4", attempts_count_up(before, after))
            self._judge("G9", stored_progress_does_not_fall(before, after))
            self.take_overs += before.state == after.state == "running" and before.owner != after.owner
            if before.state != "running" and after.state == "running":
                self._judge("G2", older_is_never_claimed(after, self._newest.get(place, 0)))
        self.intents[after.id] = after
        if after.state == "succeeded" and (before is None or before.state != "succeeded"):
            self._prove(after)
        self._note_running(after)
        self._touched.add(place)
        open_ones = self._open.setdefault(place, set())
        if after.is_ended:
            self.open_count -= after.id in open_ones
            open_ones.discard(after.id)
            self.ended_at.setdefault(after.id, self._now())
        else:
            self.open_count += after.id not in open_ones
            open_ones.add(after.id)

    def _note_running(self, after: IntentRow) -> None:
        operation_id = self._made_by.get(after.id, "")
        if not operation_id:
            return  # a step of a load, which has no width
        running = self._running.setdefault(operation_id, set())
        if after.state == "running":
            running.add(after.id)
            if len(running) > 1:
                operation = self.operations[operation_id]
                self._judge("lanes", lane_is_kept(operation, len(running), self._fleet))
        else:
            running.discard(after.id)

    def _operation(self, before: OperationRow | None, after: OperationRow | None) -> None:
        if after is None:
            self._judge("G1", f"operation {before and before.id} was removed")
            return
        if before is not None:
            self._judge("G1", request_is_kept_whole(before, after))
            if before.is_steered and not after.is_steered:
                self.steered_until[after.id] = self._now()
        self.operations[after.id] = after
        if after.is_steered:
            self.steered.add(after.id)
        else:
            self.steered.discard(after.id)

    def _judge(self, guarantee: str, wrong: str) -> None:
        if wrong:
            self._fail(Violation(guarantee, wrong))


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
        self._states: dict[str, list[tuple[float, str]]] = {}  # since when what was so, of whichever node

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
        self.judge("G3", one_works_at_a_time(subject, working))
        if command is not None:
            seen = self._passed.pop((command.intent, command.attempt), self._seen.get(subject, (0, 0)))
            self.judge("G2", older_never_begins(subject, command, seen))
            self.judge("G4", attempt_is_done_once(command, self._begun, self._recorded))
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
        self.became(subject, state)

    def became(self, subject: str, state: str) -> None:
        """What `subject` is about is so from now on; "" for absent."""
        self._states.setdefault(subject, [(0.0, "")]).append((self._now(), state))

    def seen_since(self, subject: str, since: float) -> set[str]:
        """Everything that was so at some moment from `since` on."""
        found: set[str] = set()
        for began, state in reversed(self._states.get(subject, [(0.0, "")])):
            found.add(state)
            if began <= since:
                break
        return found

    def has_taken_effect(self, subject: str, generation: int, state: str) -> bool:
        return any(one.generation >= generation and one.state == state for one in self.effects.get(subject, ()))

    def absent_since(self, subject: str) -> float:
        """0 where it was never there."""
        return self._states.get(subject, [(0.0, "")])[-1][0]

    def told_of_ended(self, doing: str, ended: Collection[str], told: Collection[str]) -> None:
        self.judge("G13", every_ended_is_told(doing, ended, told))

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

    def judge(self, guarantee: str, wrong: str) -> None:
        if wrong:
            self._fail(Violation(guarantee, f"{self._name}: {wrong}"))
