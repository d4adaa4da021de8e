"""Which nodes an upgrade begins with, and when the others follow."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.action import InstallBackend, StartReplica
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.canary import (
    MISSING_SECONDS,
    Canary,
    CanaryCandidate,
    CanaryNode,
    Evidence,
    Observation,
    ServedCount,
    choose_canaries,
    choose_one,
    hardware_of,
    judge,
    observe,
    risen,
)
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import CANARY, HELD_UNTIL, Intent, Outcome
from enginehouse.core.model import Model
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation, is_parked, status_of
from enginehouse.core.replica import FailedReplica, RunningReplica
from enginehouse.core.report import Report

A, B = NodeId("a"), NodeId("b")
NOW, SWAPPED = 1000.0, 900.0
OLD = Resolved(directory="engine", uri="registry.example/engine:1", digest="sha256:old", version="1")
CANARY_NODE = CanaryNode(node_id=A, name="a", before=OLD, models=("tiny",), installed_at=SWAPPED)
LIMITS = (30.0, 900.0)
NOTHING = (ServedCount(), ServedCount())


def candidate(
    name: str, *, kind: str = "gpu", replicas: int = 1, present: bool = True, back: bool = True
) -> CanaryCandidate:
    return CanaryCandidate(node_id=NodeId(name), hardware=kind, replicas=replicas, is_present=present, can_return=back)


candidates = st.lists(
    st.builds(
        CanaryCandidate,
        node_id=st.integers(0, 40).map(lambda number: NodeId(f"n{number}")),
        hardware=st.sampled_from(["gpu", "cpu", "arm"]),
        replicas=st.integers(0, 3),
        is_present=st.booleans(),
        can_return=st.booleans(),
    ),
    unique_by=lambda one: one.node_id,
    max_size=12,
)


@given(candidates)
def test_there_is_one_canary_per_kind_that_has_an_able_node_and_only_where_it_protects_something(
    found: list[CanaryCandidate],
) -> None:
    chosen = choose_canaries(found)
    kinds = [one.hardware for one in found]
    protects = any(one.replicas for one in found) and any(kinds.count(one) > 1 for one in kinds)
    if not protects or not any(one.can_return for one in found):
        assert chosen is None
        return
    assert chosen is not None
    able = [one for one in found if one.is_present and one.can_return]
    by_id = {one.node_id: one for one in found}
    assert sorted(by_id[one].hardware for one in chosen) == sorted({one.hardware for one in able})
    for one in chosen:
        best = by_id[one]
        beside = [each for each in able if each.hardware == best.hardware]
        assert best in able
        if any(each.replicas for each in beside):
            assert best.replicas == min(each.replicas for each in beside if each.replicas)


def test_a_node_with_few_replicas_is_preferred_and_one_without_gives_no_evidence() -> None:
    some = [candidate("c", replicas=0), candidate("b", replicas=3), candidate("a", replicas=2)]
    assert choose_one(some) == "a"
    assert choose_one([candidate("a", present=False), candidate("b", back=False)]) is None


@pytest.mark.parametrize(
    "some",
    [
        [candidate("a")],
        [candidate("a"), candidate("b", kind="cpu")],
        [candidate("a", replicas=0), candidate("b", replicas=0)],
        [candidate("a", back=False), candidate("b", back=False)],
        [],
    ],
)
def test_without_anything_to_protect_all_nodes_are_upgraded_at_once(some: list[CanaryCandidate]) -> None:
    assert choose_canaries(some) is None


def test_cards_of_nearly_the_same_size_are_one_kind() -> None:
    sizes = [24 * 1024**3, 24 * 1024**3 - 5_000_000, 16 * 1024**3]
    kinds = [hardware_of(node(capacity=Capacity(gpu_vendor="nvidia", total_vram=size))) for size in sizes]
    assert kinds[0] == kinds[1] != kinds[2]


# What is seen of a canary ------------------------------------------------------------------------


def node(**fields: object) -> Node:
    shown = RunningReplica(model_id="tiny", replica_index=0, nonce="n", backend="engine", generation=1)
    new = InstalledBackend(name="engine", is_system=False, is_meta=False, digest="sha256:new")
    plain: dict[str, object] = {
        **{"id": A, "name": "a", "node_type": "backend", "public_key": "k", "approved": True, "health": "healthy"},
        **{"drained": False, "address": "", "http_address": "", "capability": "default", "platform": "linux/amd64"},
        **{"labels": {}, "max_replicas_per_model": 1, "capacity": Capacity(), "created_at": 1.0, "updated_at": 1.0},
        "last_heartbeat": NOW,
        "report": Report(boot_id="b", mark=NOW - 5, backends=(new,), replicas=(shown,)),
    }
    return Node(**(plain | fields))  # type: ignore[arg-type]


def intent(**fields: object) -> Intent:
    action = InstallBackend(backend="engine", resolved=msgspec.structs.replace(OLD, digest="sha256:new"), upgrade=True)
    plain: dict[str, object] = {
        **{"id": IntentId("i"), "node_id": A, "subject": "backend:engine", "generation": 2, "action": action},
        **{"state": "succeeded", "created_at": 1.0, "updated_at": SWAPPED, "due_at": 1.0, "attempt": 1},
        "outcome": Outcome(digest="sha256:new"),
    }
    return Intent(**(plain | fields))  # type: ignore[arg-type]


def start(**fields: object) -> Intent:
    action = StartReplica(model=Model(name="tiny", backend="engine", files=()), slot=0, directory="engine", key="k")
    plain = {"subject": "replica:tiny#0", "action": action, "generation": 1, "outcome": Outcome(nonce="n")}
    return intent(**(plain | fields))


def seen(canary: CanaryNode = CANARY_NODE, **fields: object) -> Observation:
    plain: dict[str, object] = {
        **{"now": NOW, "node": node(), "install": intent(), "is_newest": True, "directory": "engine", "ready": {"n"}}
    }
    return observe(canary, Evidence(**(plain | fields)))  # type: ignore[arg-type]


def reported(**fields: object) -> Node:
    return node(report=msgspec.structs.replace(node().report, **fields))


OUTDATED = RunningReplica(model_id="tiny", replica_index=0, nonce="n", backend="engine", outdated=True)


def test_a_canary_whose_replicas_all_run_the_new_version_is_ready() -> None:
    assert seen() == Observation()


@pytest.mark.parametrize(
    ("fields", "gone"),
    [
        ({"node": None}, "it was removed"),
        ({"node": node(approved=False)}, "it was removed"),
        ({"node": node(health="offline")}, "it is offline"),
        ({"node": node(drained=True)}, "it is drained"),
        ({"install": intent(state="cancelled")}, "there is another request for it"),
        ({"install": intent(state="superseded")}, "there is another request for it"),
        ({"is_newest": False}, "there is another request for it"),
    ],
)
def test_a_node_that_cannot_be_watched_is_no_canary(fields: dict[str, object], gone: str) -> None:
    assert seen(**fields).gone == gone  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "trouble"),
    [
        ({"install": intent(state="failed", message="no space")}, "the install failed: no space"),
        ({"starts": [start(state="failed", reason="backend_exited", message="it exited")]}, "could not be started"),
        ({"starts": [start(state="waiting", reason="backend_exited", failures=2, outcome=None)]}, "could not be"),
        ({"node": reported(failed=(FailedReplica("tiny", 0, "signal 11"),))}, "ended again and again: signal 11"),
        ({"node": reported(restarting=("tiny#0",)), "starts": [start()]}, "the engine of tiny ended"),
        ({"starts": [start(outcome=Outcome(nonce="first"))]}, "ended and was started again"),
    ],
)
def test_a_failed_start_and_an_engine_that_ended_are_blamed_on_the_version(
    fields: dict[str, object], trouble: str
) -> None:
    assert trouble in seen(**fields).trouble  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"starts": [start(state="failed", reason="insufficient_capacity")]},
        {"starts": [start(state="failed", reason="worker_restarted")]},
        # An old process that ended is not the fault of the new version.
        {"node": reported(restarting=("tiny#0",))},
        {"node": reported(failed=(FailedReplica("another", 0, "signal 11"),))},
    ],
)
def test_what_the_new_version_did_not_cause_is_not_blamed_on_it(fields: dict[str, object]) -> None:
    assert not seen(**fields).trouble  # type: ignore[arg-type]


def test_an_engine_that_was_given_up_before_the_upgrade_is_not_blamed_on_it() -> None:
    known = msgspec.structs.replace(CANARY_NODE, failed=("tiny#0",))
    assert not seen(known, node=reported(failed=(FailedReplica("tiny", 0, "signal 11"),))).trouble


@pytest.mark.parametrize(
    ("fields", "waits_for"),
    [
        ({"install": intent(state="running")}, "being installed"),
        ({"node": reported(mark=SWAPPED - 1)}, "has not reported"),
        ({"node": reported(backends=())}, "has not reported"),
        ({"node": reported(replicas=(OUTDATED,))}, "still runs the old version"),
        ({"ready": ()}, "is not ready"),
        ({"starts": [start(state="running", outcome=None)]}, "is being started"),
        ({"node": reported(replicas=()), "now": SWAPPED + MISSING_SECONDS - 1}, "is not running there"),
    ],
)
def test_a_canary_is_waited_for_until_everything_runs_the_new_version(
    fields: dict[str, object], waits_for: str
) -> None:
    assert waits_for in seen(**fields).waits_for  # type: ignore[arg-type]


def test_a_model_that_was_unloaded_meanwhile_is_not_waited_for() -> None:
    assert seen(node=reported(replicas=()), now=SWAPPED + MISSING_SECONDS) == Observation()


# The verdict -------------------------------------------------------------------------------------


def test_a_canary_passes_after_it_was_ready_for_long_enough() -> None:
    first = judge(CANARY_NODE, Observation(), NOTHING, NOW, LIMITS)
    assert (first.kind, first.ready_since) == ("wait", NOW)
    ready = msgspec.structs.replace(CANARY_NODE, ready_since=NOW)
    assert judge(ready, Observation(), NOTHING, NOW + 29.9, LIMITS).kind == "wait"
    assert judge(ready, Observation(), NOTHING, NOW + 30.0, LIMITS).kind == "pass"
    assert judge(CANARY_NODE, Observation(), NOTHING, NOW, (0.0, 900.0)).kind == "pass"


def test_a_canary_that_is_not_ready_any_more_begins_anew() -> None:
    ready = msgspec.structs.replace(CANARY_NODE, ready_since=NOW - 29)
    assert judge(ready, Observation(waits_for="x"), NOTHING, NOW, LIMITS).ready_since == 0.0


def test_a_canary_that_does_not_become_ready_is_given_up_at_the_limit_but_a_long_download_is_not() -> None:
    waits = Observation(waits_for="tiny is not ready")
    assert judge(CANARY_NODE, waits, NOTHING, SWAPPED + 899, LIMITS).kind == "wait"
    late = judge(CANARY_NODE, waits, NOTHING, SWAPPED + 900, LIMITS)
    assert (late.kind, late.reason) == ("fail", "it was not ready 900 s after the swap: tiny is not ready")
    loading = msgspec.structs.replace(CANARY_NODE, installed_at=0.0)
    assert judge(loading, waits, NOTHING, SWAPPED + 90_000, LIMITS).kind == "wait"


tallies = st.builds(
    lambda requests, share: ServedCount(requests, int(requests * share)), st.integers(0, 500), st.floats(0.0, 1.0)
)


@given(own=tallies, others=tallies, before=tallies)
def test_the_rate_has_risen_only_with_five_failures_and_a_tenth_above_what_it_is_compared_with(
    own: ServedCount, others: ServedCount, before: ServedCount
) -> None:
    compared = others if others.requests else before
    assert bool(risen(own, others, before)) == (own.failures >= 5 and own.rate > compared.rate + 0.1)


def test_failed_requests_fail_a_canary_that_looks_ready() -> None:
    ready = msgspec.structs.replace(CANARY_NODE, ready_since=NOW - 100, own=ServedCount(100, 0))
    verdict = judge(ready, Observation(), (ServedCount(20, 6), ServedCount()), NOW, LIMITS)
    assert (verdict.kind, verdict.reason) == ("fail", "6 of 20 requests failed, 30% where it was 0% before")
    assert judge(ready, Observation(), (ServedCount(20, 6), ServedCount(40, 10)), NOW, LIMITS).kind == "pass"
    assert judge(ready, Observation(), (ServedCount(20, 4), ServedCount(40, 0)), NOW, LIMITS).kind == "pass", "too few"


# The operation -----------------------------------------------------------------------------------


def operation(**fields: object) -> Operation:
    canary = Canary(hardware={A: "gpu", B: "gpu"}, nodes=(CANARY_NODE,))
    plain: dict[str, object] = {"id": OperationId("o"), "kind": "upgrade", "name": "engine", "author": "me"}
    plain |= {"created_at": 1.0, "targets": (A, B), "canary": canary}
    return Operation(**(plain | fields))  # type: ignore[arg-type]


HELD = intent(node_id=B, state="waiting", reason=CANARY, due_at=HELD_UNTIL, attempt=0, outcome=None)


def test_an_operation_runs_while_its_canary_is_watched_and_while_it_is_returned() -> None:
    assert status_of(operation(), [intent(), HELD]) == "running"
    assert status_of(operation(), [intent(state="accepted"), HELD]) == "queued"
    failed = operation(error_code="canary_failed", canary=msgspec.structs.replace(Canary(), phase="failed"))
    cancelled = msgspec.structs.replace(HELD, state="cancelled")
    assert status_of(failed, [intent(), cancelled, intent(state="running")]) == "running"
    assert status_of(failed, [intent(), cancelled, intent()]) == "failed"


def test_an_operation_whose_canary_is_away_is_parked_and_one_that_is_watched_is_not() -> None:
    away = intent(state="waiting", reason="node_away", outcome=None)
    assert is_parked(operation(), [away, HELD], {A})
    assert not is_parked(operation(), [intent(), HELD], set())
    assert not is_parked(operation(), [intent(), HELD], {B}), "the verdict still comes"
