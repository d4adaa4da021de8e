"""Small deliberate faults in the real code, each of which some guarantee must catch.

A suite that passes on all of these would prove nothing. Here are faults in the order of things: what is stored,
claimed, refused and told; those of what is believed and of what is left out are in `lapses`. Some were there once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from random import Random
from typing import Any

import msgspec
from sqlalchemy import select
from tests.sim.lapses import LAPSES, QUICK, delete_at_once, request
from tests.sim.mutation import Mutant, Patch
from tests.sim.options import SimRequest
from tests.sim.resting import RESTING
from tests.sim.unchanged import UNCHANGED

from enginehouse.core import intent, report
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Change, Intent, Outcome
from enginehouse.core.progress import Progress
from enginehouse.frontend import acceptance as accepting
from enginehouse.frontend.watching import board
from enginehouse.store import claims, operations, supersession
from enginehouse.store import intents as store_intents
from enginehouse.store.db import Connection
from enginehouse.store.schema import intents
from enginehouse.worker.commands.journal import Journal
from enginehouse.worker.locks import Locks

BAD_BUS: dict[str, float] = {"late_rate": 0.3, "reorder_rate": 0.5, "duplicate_rate": 0.3}
CROWD: dict[str, float] = {
    **BAD_BUS,
    "reorder_rate": 0.9,
    "frontends": 3,
    "nodes": 2,
    "old_nodes": 0,
    "install_seconds": 5.0,
}
SLOW: dict[str, float] = {"nodes": 2, "install_seconds": 10.0, "safety_seconds": 12.0}
DOUBLED: dict[str, float] = {
    **{**QUICK, "nodes": 8, "install_seconds": 10.0, "safety_seconds": 12.0},
    **{"duplicate_rate": 0.6, "late_rate": 0.9, "late_seconds": 12.0, "reorder_rate": 0.9, "drop_rate": 0.3},
}
BAD_STORE: dict[str, float] = {"unknown_rate": 0.1}


# G1 ------------------------------------------------------------------------------------------------


def _accepted_in_memory() -> list[Patch]:
    real = accepting.Acceptance.accept

    async def accept(self: accepting.Acceptance, *arguments: Any) -> str:
        try:
            return await real(self, *arguments)
        except Unavailable:
            return str(uuid.uuid4())

    return [(accepting.Acceptance, "accept", accept)]


def _told_after_the_commit() -> list[Patch]:
    """The request fails when watchers cannot be told, although it was stored."""
    return [(board, "suppress", lambda *_: contextlib.nullcontext())]


def _late_reply_overwrites() -> list[Patch]:
    real = operations.lock_intents

    def as_if_running(connection: Connection, intent_ids: Iterable[IntentId]) -> dict[IntentId, Intent]:
        found = real(connection, intent_ids)
        return {one: msgspec.structs.replace(row, state="running") for one, row in found.items()}

    return [(operations, "lock_intents", as_if_running)]


# G2 ------------------------------------------------------------------------------------------------


def _no_fence_check() -> list[Patch]:
    return [(Journal, "check", lambda self, subject, command: None)]


def _nothing_is_superseded() -> list[Patch]:
    return [(supersession, "apply", lambda connection, before, change: before)]


def _failure_is_success() -> list[Patch]:
    def after_outcome(before: Intent, outcome: Outcome, now: float, jitter: float) -> Change:
        return Change(kind="succeed", now=now, outcome=outcome)

    return [(intent, "after_outcome", after_outcome)]


# G3 ------------------------------------------------------------------------------------------------


def _lease_is_ignored() -> list[Patch]:
    def take_over(connection: Connection, owner: str, now: float, lease_until: float) -> list[Intent]:
        others = select(intents).where(intents.c.state == "running", intents.c.owner != owner)
        change = Change(kind="take_over", now=now, owner=owner, lease_until=lease_until)
        return claims._take(connection, others, change, {})

    return [(claims, "take_over", take_over)]


def _no_lock() -> list[Patch]:
    @contextlib.asynccontextmanager
    async def hold(self: Locks, name: str, *, exclusive: bool = True) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield

    return [(Locks, "hold", hold)]


# G4 ------------------------------------------------------------------------------------------------


def _results_are_forgotten() -> list[Patch]:
    return [(Journal, "result_of", lambda self, intent, attempt: None)]


def _key_is_ignored() -> list[Patch]:
    return [(accepting, "once", lambda work, request, body: work)]


# G5 ------------------------------------------------------------------------------------------------


def _one_lock_for_all() -> list[Patch]:
    real = Locks.hold

    def hold(self: Locks, name: str, *, exclusive: bool = True) -> Any:
        return real(self, "everything", exclusive=exclusive)

    return [(Locks, "hold", hold)]


def _one_at_a_time() -> list[Patch]:
    """Nothing is sent while anything runs anywhere."""
    real = claims.claim_due

    def claim_due(connection: Connection, *arguments: Any) -> list[Intent]:
        if connection.execute(select(intents.c.id).where(intents.c.state == "running").limit(1)).first():
            return []
        return real(connection, *arguments)

    return [(claims, "claim_due", claim_due)]


def _several(chance: Random) -> tuple[SimRequest, ...]:
    """Of which none has to do with the others."""
    names = ("alpha", "beta", "gamma")
    return tuple(
        request(number, chance.uniform(1.0, 2.0), "install", f"one@{name}") for number, name in enumerate(names)
    )


def _several_with_keys(chance: Random) -> tuple[SimRequest, ...]:
    return tuple(msgspec.structs.replace(one, is_keyed=True) for one in _several(chance))


def _lost_is_never_noticed() -> list[Patch]:
    return [(report, "lost", lambda said, intent: False)]


# G9 ------------------------------------------------------------------------------------------------


def _progress_without_order() -> list[Patch]:
    return [(board, "is_newer", lambda candidate, known: True)]


def _less_is_newer() -> list[Patch]:
    def is_newer(candidate: Progress, known: Progress | None) -> bool:
        return known is None or (candidate.attempt, candidate.sequence) > (known.attempt, known.sequence)

    return [(board, "is_newer", is_newer), (store_intents, "is_newer", is_newer)]


def _row_without_order() -> list[Patch]:
    real = store_intents.set_progress

    def set_progress(connection: Connection, heard: Mapping[IntentId, Progress], owner: str, now: float) -> None:
        real(connection, heard, owner, math.inf)  # whoever holds it

    return [
        (store_intents, "is_newer", lambda candidate, known: True),
        (store_intents, "set_progress", set_progress),
    ]


def _nothing_is_caught_up() -> list[Patch]:
    async def catch_up_step(self: board.Board) -> None:
        await asyncio.sleep(0)

    return [(board.Board, "catch_up_step", catch_up_step)]


MUTANTS = (
    Mutant("a request is accepted in memory", ("G1",), _accepted_in_memory, BAD_STORE),
    Mutant("a stored request is refused", ("G1",), _told_after_the_commit, BAD_STORE),
    Mutant("a late reply overwrites the end", ("G1",), _late_reply_overwrites),
    Mutant("the journal does not compare fences", ("G2",), _no_fence_check, {**QUICK, **BAD_BUS}, delete_at_once, ()),
    Mutant("a newer request leaves the older open", ("G2",), _nothing_is_superseded),
    Mutant("a failure is taken for success", ("G2", "G10"), _failure_is_success, {"failing_rate": 0.5}),
    Mutant("a lease is taken before it ends", ("G3",), _lease_is_ignored),
    Mutant("a subject has no lock", ("G3", "G2"), _no_lock, QUICK, delete_at_once),
    Mutant("results are forgotten", ("G4",), _results_are_forgotten, BAD_BUS),
    Mutant("an idempotency key is ignored", ("G4",), _key_is_ignored, BAD_STORE, _several_with_keys),
    Mutant("all subjects share one lock", ("G5",), _one_lock_for_all, SLOW, _several),
    Mutant("one node waits for another", ("G5",), _one_at_a_time, SLOW, _several),
    Mutant("a lost command is never noticed", ("end",), _lost_is_never_noticed),
    Mutant("progress is taken in any order", ("G9",), _progress_without_order, CROWD, _several),
    Mutant("progress is ordered by its number alone", ("G9",), _less_is_newer, DOUBLED, _several, ()),
    Mutant("progress is stored in any order", ("G9",), _row_without_order, CROWD, _several),
    Mutant("a frontend tells only what it did itself", ("G9",), _nothing_is_caught_up, BAD_BUS),
    *LAPSES,
    *UNCHANGED,
    *RESTING,
)
