"""When an operation only waits for a node, so that nobody has to watch it."""

from __future__ import annotations

import msgspec
import pytest

from enginehouse.core.action import StopReplica
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import NODE_AWAY, Intent
from enginehouse.core.operation import Operation, is_parked

A, B = NodeId("a"), NodeId("b")
DRAIN = Operation(
    id=OperationId("o"), kind="drain", name="a", author="me", created_at=1.0, targets=(A,), is_steered=True
)


def stop(state: str = "accepted", **fields: object) -> Intent:
    plain: dict[str, object] = {"id": IntentId("i"), "node_id": A, "subject": "replica:m#0", "generation": 1}
    plain |= {"action": StopReplica(model="m", slot=0), "state": state, "created_at": 1.0, "updated_at": 1.0}
    plain |= {"due_at": 1.0, "attempt": 0, "fence": 0}
    return Intent(**(plain | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("stops", [[], [stop()], [stop("waiting", reason=NODE_AWAY)], [stop("succeeded")]])
def test_a_drain_waits_only_for_its_node_while_that_is_away(stops: list[Intent]) -> None:
    assert is_parked(DRAIN, stops, {A}, {A})
    assert not is_parked(DRAIN, stops, {B}, {A}), "another node is away"


def test_a_drain_at_work_is_followed() -> None:
    assert not is_parked(DRAIN, [], ())
    assert not is_parked(DRAIN, [stop("running")], {A}, {A}), "the worker may still answer"


def test_a_load_is_never_parked_because_it_may_choose_another_node() -> None:
    load = msgspec.structs.replace(DRAIN, kind="load")
    assert not is_parked(load, [stop("waiting", reason=NODE_AWAY)], {A})
