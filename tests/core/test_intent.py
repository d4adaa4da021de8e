"""The state table of intents, and what a worker's last word does to one."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core import intent as intents
from enginehouse.core.action import RemoveBackend, StartReplica
from enginehouse.core.errors import Conflict
from enginehouse.core.intent import MAX_FAILURES, OPEN, TABLE, Change, ChangeKind, Intent, Outcome, State
from enginehouse.core.model import Model

STATES: tuple[State, ...] = get_args(State)
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)


def make(state: State = "accepted", **fields: object) -> Intent:
    plain: dict[str, object] = {
        "id": "i",
        "node_id": "n",
        "subject": "backend:x",
        "generation": 1,
        "action": RemoveBackend(backend="x", directory="x"),
        "state": state,
        "created_at": 1.0,
        "updated_at": 1.0,
        "due_at": 1.0,
    }
    return Intent(**(plain | fields))  # type: ignore[arg-type]


def test_the_table_has_exactly_the_rows_of_the_design() -> None:
    design: set[tuple[State, State]] = {
        ("accepted", "running"),
        ("waiting", "running"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "running"),
        ("running", "waiting"),
        ("accepted", "succeeded"),
        ("waiting", "succeeded"),
        ("waiting", "waiting"),  # a release
        *((state, end) for state in OPEN for end in ("cancelled", "superseded")),
    }
    assert {(before, after) for (before, _), after in TABLE.items()} == design


@given(st.sampled_from(STATES), st.lists(st.sampled_from(KINDS), max_size=8))
def test_no_change_leaves_an_ended_state(state: State, kinds: list[ChangeKind]) -> None:
    intent = make(state)
    for kind in kinds:
        try:
            after = intents.apply(intent, Change(kind=kind, now=2.0))
        except Conflict:
            assert (intent.state, kind) not in TABLE
            continue
        assert intent.is_open
        assert after.version == intent.version + 1
        assert after.fence >= intent.fence
        intent = after


def test_a_claim_is_a_new_attempt_with_a_new_fence() -> None:
    claimed = intents.apply(
        make("waiting", attempt=2, fence=5), Change(kind="claim", now=3.0, owner="a", lease_until=9)
    )
    assert (claimed.attempt, claimed.fence, claimed.owner, claimed.dispatched_at) == (3, 6, "a", 3.0)


def test_a_take_over_keeps_the_attempt_and_moves_the_fence() -> None:
    taken = intents.apply(make("running", attempt=2, fence=5, owner="a"), Change(kind="take_over", now=3.0, owner="b"))
    assert (taken.attempt, taken.fence, taken.owner) == (2, 6, "b")


def test_a_node_that_is_away_never_uses_up_the_attempts() -> None:
    intent = make()
    for _ in range(5 * MAX_FAILURES):
        intent = intents.apply(intent, Change(kind="claim", now=2.0))
        intent = intents.apply(intent, Change(kind="wait", now=2.0, reason=intents.NODE_AWAY))
    assert (intent.state, intent.failures) == ("waiting", 0)


def test_a_healable_error_waits_and_fails_only_at_the_cap() -> None:
    intent = make()
    outcome = Outcome(code="upstream_error", message="no", can_heal=True)
    for number in range(MAX_FAILURES):
        intent = intents.apply(intent, Change(kind="claim", now=2.0))
        intent = intents.apply(intent, intents.after_outcome(intent, outcome, 2.0, 0.5))
        assert intent.state == ("failed" if number == MAX_FAILURES - 1 else "waiting")
    assert (intent.reason, intent.message, intent.failures) == ("upstream_error", "no", MAX_FAILURES)


def test_an_error_that_cannot_heal_fails_at_once() -> None:
    running = make("running", attempt=1)
    change = intents.after_outcome(running, Outcome(code="digest_mismatch", message="no"), 2.0, 0.5)
    assert intents.apply(running, change).state == "failed"


def test_a_start_that_finds_no_core_left_fails_at_once_so_that_another_node_is_asked() -> None:
    model = Model(name="m", backend="b", files=())
    running = make("running", action=StartReplica(model=model, slot=0, directory="b", key="k"))
    change = intents.after_outcome(running, Outcome(code="insufficient_capacity", can_heal=True), 2.0, 0.5)
    assert change.kind == "fail"
    change = intents.after_outcome(running, Outcome(code="backend_exited", can_heal=True), 2.0, 0.5)
    assert change.kind == "wait"


@given(st.integers(0, 100), st.floats(0, 1))
def test_the_backoff_grows_within_its_bounds(failures: int, jitter: float) -> None:
    pause = intents.backoff_seconds(failures, jitter)
    assert 0.8 <= pause <= 360.0
    assert intents.backoff_seconds(failures + 1, jitter) >= pause


def test_a_change_that_the_table_lacks_is_named() -> None:
    with pytest.raises(Conflict) as caught:
        intents.apply(make("succeeded"), Change(kind="cancel", now=2.0))
    assert caught.value.message == "cannot cancel intent i: it is succeeded"
