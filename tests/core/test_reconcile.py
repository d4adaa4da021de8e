"""What is loaded and stopped so that models have the replicas that are wanted."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.pace import USUAL
from enginehouse.core.reconcile import (
    LOADS_PER_PASS,
    ModelFacts,
    ModelPlan,
    ServingReplica,
    can_grow,
    must_move,
    plan_model,
    quiet_until,
    retry_seconds,
)
from enginehouse.core.schedule import LoadInfo, Schedule, ScheduleRequest, checked, with_kept, without_kept

A, B, C, ANY = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("")
NOW = 10_000.0
UPGRADED, DRAINED = "its backend was upgraded", "its node is drained"


def replica(
    at: NodeId, *, slot: int = 0, created: float = 0.0, used: float = 0.0, busy: int = 0, old: str = ""
) -> ServingReplica:
    return ServingReplica(
        node_id=at,
        slot=slot,
        created_at=created,
        last_used=used,
        in_flight=busy,
        nonce=f"{at}{slot}",
        outdated=old,
        leaves_node=old == DRAINED,
    )


def plan(
    schedule: Schedule | None = None,
    *replicas: ServingReplica,
    info: LoadInfo | None = None,
    loading: tuple[NodeId, ...] = (),
    matching: tuple[NodeId, ...] = (A, B, C),
    selected: tuple[NodeId, ...] = (),
    now: float = NOW,
    leaving: int = 0,
    queued: int = 0,
    disturbed_ago: float | None = None,
) -> ModelPlan:
    return plan_model(
        ModelFacts(
            now=now,
            info=info or LoadInfo(model="m"),
            schedule=schedule,
            replicas=replicas,
            loading=loading,
            matching=matching,
            leaving=leaving,
            queued=queued,
            disturbed_ago=disturbed_ago,
            selected=selected,
        )
    )


def wanted(**fields: object) -> Schedule:
    return Schedule(model_name="m", **fields)  # type: ignore[arg-type]


def test_what_is_missing_is_loaded_whatever_there_was_before() -> None:
    assert plan(wanted(min_replicas=2)).loads == (ANY, ANY)
    assert plan(wanted(min_replicas=2), replica(A)).loads == (ANY,)
    assert plan(wanted(min_replicas=2), replica(A), loading=(ANY,)) == ModelPlan()
    assert plan(wanted(min_replicas=9)).loads == (ANY,) * LOADS_PER_PASS


def test_what_an_operator_loaded_is_wanted_until_it_is_unloaded() -> None:
    kept = with_kept(LoadInfo(model="m"), None)
    assert plan(info=kept).loads == (ANY,)
    assert plan(None, replica(B), info=kept) == ModelPlan()
    there = with_kept(LoadInfo(model="m"), A)
    assert plan(info=there).loads == (A,)
    assert plan(info=there, matching=(B, C)) == ModelPlan()  # the node is away: it is waited for
    both = with_kept(there, None)
    assert plan(None, replica(A), info=both) == ModelPlan()
    assert plan(info=without_kept(both, None)) == ModelPlan()
    assert without_kept(with_kept(there, B), A).kept == (B,)


def test_a_spread_model_has_one_replica_on_each_node_and_follows_the_nodes() -> None:
    spread = wanted(spread_all=True)
    assert plan(spread, replica(A)).loads == (B, C)
    assert plan(spread, replica(A), loading=(B,)).loads == (C,)
    doubled = plan(spread, replica(A), replica(A, slot=1), replica(B), replica(C))
    assert doubled.stops == (replica(A, slot=1),)
    both = plan(spread, replica(A), replica(A, slot=1), replica(B))
    assert (both.loads, [one.slot for one in both.stops]) == ((C,), [1]), "where there is no room for C as well"
    left = plan(spread, replica(A), replica(B), replica(C), matching=(A, B))
    assert left.stops == (replica(C),)


def test_a_load_that_cannot_be_is_tried_once_per_cooldown() -> None:
    cooling = LoadInfo(model="m", failures=1, retry_at=NOW + 5)
    assert plan(wanted(min_replicas=1), info=cooling) == ModelPlan()
    assert plan(wanted(min_replicas=1), info=cooling, now=NOW + 6).loads == (ANY,)
    assert [retry_seconds(number) for number in (1, 2, 3, 50)] == [15, 30, 60, 300]


def test_another_replica_is_added_while_all_are_busy_and_up_to_the_maximum() -> None:
    between = wanted(min_replicas=1, max_replicas=3)
    assert plan(between, replica(A, busy=2)).loads == (ANY,)
    assert plan(between, replica(A, busy=2), replica(B, used=NOW)) == ModelPlan()
    assert plan(between, replica(A, busy=2), loading=(ANY,)) == ModelPlan()
    just_now = LoadInfo(model="m", scaled_at=NOW - USUAL.scale_up_seconds + 1)
    assert plan(between, replica(A, busy=1), info=just_now) == ModelPlan()
    full = [replica(at, busy=1) for at in (A, B, C)]
    assert plan(between, *full) == ModelPlan()
    assert plan(wanted(), replica(A, busy=1)) == ModelPlan()


def test_a_queue_and_lost_prefixes_are_reasons_for_another_replica() -> None:
    growing = wanted(min_replicas=1, max_replicas=2)
    assert plan(growing, replica(A), queued=3).reason == "3 requests wait for it"
    assert plan(growing, replica(A), disturbed_ago=59.0).is_scaled
    assert not plan(growing, replica(A), disturbed_ago=61.0).is_scaled, "that was long ago"
    scaled = LoadInfo(model="m", scaled_at=NOW - 20.0)
    assert plan(growing, replica(A), info=scaled, disturbed_ago=19.0).is_scaled
    assert not plan(growing, replica(A), info=scaled, disturbed_ago=21.0).is_scaled, "it had its effect"
    for reason in ({"queued": 3}, {"disturbed_ago": 1.0}):
        assert plan(growing, replica(A), replica(B), **reason).loads == ()
        assert plan(wanted(), replica(A), **reason).loads == ()


def test_the_newest_idle_replica_goes_first_and_one_per_delay() -> None:
    """F-053."""
    old, new = replica(A, created=1.0, used=1.0), replica(B, created=2.0, used=1.0)
    found = plan(wanted(min_replicas=1), old, new)
    assert (found.stops, found.is_scaled) == ((new,), True)
    assert plan(wanted(min_replicas=2), old, new) == ModelPlan()
    recent = LoadInfo(model="m", scaled_at=NOW - USUAL.scale_down_seconds + 1)
    assert plan(wanted(min_replicas=1), old, new, info=recent) == ModelPlan()
    used = msgspec.structs.replace(new, last_used=NOW - 1)
    assert plan(wanted(min_replicas=1), old, used).stops == (old,)
    assert plan(wanted(min_replicas=1), msgspec.structs.replace(old, in_flight=1), used) == ModelPlan()


@pytest.mark.parametrize("period", [0.5, 0.9, 1.0, 1.1, 2.0])
def test_load_that_comes_and_goes_about_as_fast_as_the_delay_changes_the_scale_once_per_delay(period: float) -> None:
    """F-053. The load is a sine of so many delays, for twenty periods, and each request needs a replica for itself."""
    between = wanted(min_replicas=1, max_replicas=3)
    seconds = period * USUAL.scale_down_seconds
    there = [replica(A)]
    info = LoadInfo(model="m")
    changes: list[tuple[float, int]] = []
    for tick in range(int(20 * seconds / 5)):
        now = NOW + 5.0 * tick
        busy = round(1.5 + 1.5 * math.sin(2 * math.pi * (now - NOW) / seconds))
        there = [
            msgspec.structs.replace(one, in_flight=int(at < busy), last_used=now if at < busy else one.last_used)
            for at, one in enumerate(there)
        ]
        found = plan(between, *there, info=info, now=now)
        if not found.is_scaled:
            assert found == ModelPlan()
            continue
        changes.append((now, len(found.loads) - len(found.stops)))
        info = msgspec.structs.replace(info, scaled_at=now)
        unused = [one for one in there if not one.in_flight and now - one.last_used >= USUAL.scale_down_seconds]
        assert [*found.stops] == sorted(unused, key=lambda one: -one.created_at)[: len(found.stops)], "the newest"
        there = [one for one in there if one not in found.stops]
        free = [at for at in (A, B, C) if at not in {one.node_id for one in there}]
        there += [replica(free[0], created=now, used=now) for _ in found.loads]
        assert 1 <= len(there) <= 3
    assert max(sum(change for _, change in changes[: number + 1]) for number in range(len(changes))) == 2
    for (before, _), (after, change) in itertools.pairwise(changes):
        assert after - before >= (USUAL.scale_up_seconds if change > 0 else USUAL.scale_down_seconds)


def test_the_last_replica_stops_only_where_the_schedule_allows_zero() -> None:
    idle = replica(A, used=NOW - 100)
    assert plan(wanted(), idle) == ModelPlan()
    assert plan(wanted(idle_seconds=60), idle).stops == (idle,)
    assert plan(wanted(idle_seconds=200), idle) == ModelPlan()
    assert plan(wanted(idle_seconds=60), msgspec.structs.replace(idle, in_flight=1)) == ModelPlan()
    assert plan(wanted(idle_seconds=60), idle, info=with_kept(LoadInfo(model="m"), None)) == ModelPlan()


def test_replicas_leave_nodes_that_the_selector_no_longer_matches_when_they_are_quiet() -> None:
    moved = wanted(min_replicas=1, node_selector={"zone": "x"})
    assert plan(moved, replica(A), replica(B), matching=(B,)).stops == (replica(A),)
    assert plan(moved, replica(A, busy=1), replica(B), matching=(B,)).stops == ()
    assert plan(wanted(max_replicas=1), replica(A, created=1.0), replica(B, created=2.0)).stops == (
        replica(B, created=2.0),
    )


def test_a_replica_that_does_not_belong_leaves_also_where_its_successor_finds_no_place() -> None:
    moved = wanted(min_replicas=2, node_selector={"zone": "x"})
    assert plan(moved, replica(A), matching=()) == ModelPlan(loads=(ANY, ANY), stops=(replica(A),))
    waiting = LoadInfo(model="m", failures=1, retry_at=NOW + 1)
    assert plan(moved, replica(A), info=waiting, matching=()) == ModelPlan(stops=(replica(A),))
    assert plan(moved, replica(A, busy=1), info=waiting, matching=()) == ModelPlan()


def test_a_node_that_is_silent_or_has_no_known_build_keeps_what_runs_there() -> None:
    one, other = replica(A, used=NOW), replica(B, used=NOW)
    for schedule in (wanted(node_selector={"zone": "x"}), wanted(spread_all=True)):
        assert plan(schedule, one, other, matching=(B,), selected=(A, B)) == ModelPlan()
        assert plan(schedule, one, other, matching=(B,), selected=(B,)).stops == (one,)


def test_what_was_loaded_by_hand_beyond_the_maximum_does_not_come_and_go() -> None:
    both = with_kept(with_kept(LoadInfo(model="m"), A), B)
    single = wanted(min_replicas=1, max_replicas=1)
    assert plan(single, replica(A), info=both) == ModelPlan()
    assert plan(single, info=both).loads == (A,)
    assert plan(single, info=both, loading=(A,)) == ModelPlan()


@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.integers(0, 2), st.floats(0, NOW), st.integers(0, 1)), max_size=5
    ),
    st.sets(st.sampled_from([A, B, C])),
)
@settings(deadline=None)
def test_a_plan_never_goes_below_the_minimum_or_above_the_maximum_and_stops_nothing_that_is_busy(
    lowest: int, highest: int, there: list[tuple[NodeId, int, float, int]], matching: set[NodeId]
) -> None:
    if highest and lowest > highest:
        return
    unique = {(at, slot): replica(at, slot=slot, created=used, used=used, busy=busy) for at, slot, used, busy in there}
    found = plan(wanted(min_replicas=lowest, max_replicas=highest), *unique.values(), matching=tuple(sorted(matching)))
    assert not any(one.in_flight for one in found.stops)
    assert not (found.loads and found.stops)
    after = len(unique) + len(found.loads) - len(found.stops)
    assert not found.stops or after >= lowest
    assert not found.loads or not highest or after <= highest


@pytest.mark.parametrize(
    "fields",
    [
        {"model_name": " "},
        {"min_replicas": -1},
        {"min_replicas": 3, "max_replicas": 2},
        {"spread_all": True, "min_replicas": 1},
        {"route_policy": "random"},
        {"min_prefix_match": 1.5},
        {"balance_rel_threshold": 0.5},
        {"balance_abs_threshold": -1},
        {"idle_seconds": -1},
        {"node_selector": {"": "x"}},
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        checked(ScheduleRequest(**({"model_name": "m"} | fields)), None)  # type: ignore[arg-type]


def test_the_fields_about_prefixes_keep_their_value_when_they_are_absent() -> None:
    before = checked(ScheduleRequest(model_name="m", route_policy="prefix_cache", min_prefix_match=0.5), None)
    after = checked(ScheduleRequest(model_name="m", min_replicas=1), before)
    assert (after.route_policy, after.min_prefix_match, after.min_replicas) == ("prefix_cache", 0.5, 1)


def test_outdated_replicas_are_replaced_one_after_the_other_the_least_busy_first() -> None:
    old, busy = replica(A, old=UPGRADED), replica(B, busy=3, old=UPGRADED)
    assert plan(None, busy, old) == ModelPlan(replaced=old, reason=UPGRADED)
    assert plan(None, busy, old, loading=(A,)) == ModelPlan(), "one at a time"
    assert plan(None, busy, replica(A, slot=1), leaving=1) == ModelPlan(), "until the old one has stopped"
    assert plan(None, busy, replica(A, slot=1)).replaced == busy
    assert plan(None, replica(A), replica(B)).replaced is None


def test_a_replacement_that_failed_is_tried_again_later_and_the_old_replica_stays() -> None:
    failed = LoadInfo(model="m", failures=1, retry_at=NOW + 5)
    assert plan(None, replica(A, old=UPGRADED), info=failed) == ModelPlan()
    assert plan(None, replica(A, old=UPGRADED), info=failed, now=NOW + 5).replaced is not None


def test_the_outdated_replica_is_the_one_too_many_while_it_is_replaced() -> None:
    old, new = replica(A, old=UPGRADED), replica(A, slot=1, created=NOW)
    assert plan(wanted(min_replicas=1, max_replicas=1), old, new).stops == (old,)
    assert plan(wanted(spread_all=True), old, new, matching=(A,)).stops == (old,)


@pytest.mark.parametrize(
    ("schedule", "kept", "used", "others", "moves"),
    [
        (None, (), 0.0, 0, False),  # nobody wants or uses it
        (None, (), NOW - 1, 0, True),
        (None, (), NOW - 1, 1, False),
        (None, (A,), 0.0, 0, True),
        (None, (A, B), 0.0, 1, False),
        (Schedule(model_name="m", min_replicas=2), (), 0.0, 1, True),
        (Schedule(model_name="m", min_replicas=2), (), 0.0, 2, False),
    ],
)
def test_a_replica_leaves_a_drained_node_at_once_only_if_enough_others_serve(
    schedule: Schedule | None, kept: tuple[NodeId, ...], used: float, others: int, moves: bool
) -> None:
    own = replica(A, used=used, old=DRAINED)
    replicas = [own, *[replica(B, slot=number) for number in range(others)]]
    facts = ModelFacts(now=NOW, info=LoadInfo(model="m", kept=kept), schedule=schedule, replicas=replicas)
    assert must_move(facts, own) is moves
    is_replaced = plan_model(msgspec.structs.replace(facts, matching=(B, C))).replaced == own
    assert is_replaced is moves


_TIMES = st.floats(NOW - 400, NOW)
_REPLICAS = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.integers(0, 1), _TIMES, st.integers(0, 1), st.booleans()), max_size=4
)


@st.composite
def some_facts(draw: st.DrawFn) -> ModelFacts:
    there = {
        (at, slot): replica(at, slot=slot, created=used, used=used, busy=busy, old=UPGRADED if is_old else "")
        for at, slot, used, busy, is_old in draw(_REPLICAS)
    }
    schedule = wanted(
        min_replicas=draw(st.integers(0, 2)),
        max_replicas=draw(st.sampled_from([0, 2, 3])),
        spread_all=draw(st.integers(0, 5)) == 0,
        node_selector=draw(st.sampled_from([{}, {"zone": "a"}])),
        idle_seconds=draw(st.sampled_from([0.0, 60.0, 500.0])),
    )
    kept = draw(st.lists(st.sampled_from([A, ANY]), max_size=2, unique=True))
    info = LoadInfo(
        model="m",
        kept=tuple(kept),
        scaled_at=draw(st.one_of(st.just(0.0), _TIMES)),
        retry_at=draw(st.sampled_from([0.0, NOW - 1, NOW + 20, NOW + 300])),
    )
    matching = sorted(draw(st.sets(st.sampled_from([A, B, C]))))
    return ModelFacts(
        now=NOW,
        info=info,
        schedule=draw(st.sampled_from([schedule, None])),
        replicas=tuple(there.values()),
        matching=matching,
        selected=sorted({*matching, *draw(st.sets(st.sampled_from([A, B, C])))}),
        leaving=draw(st.sampled_from([0, 0, 0, 1])),
    )


@given(some_facts(), st.floats(0.0, 1.0), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 1))
@settings(deadline=None, max_examples=600)
def test_what_has_nothing_to_do_has_not_before_the_moment_it_says(
    facts: ModelFacts, part: float, used: list[bool], busy: int
) -> None:
    until = quiet_until(facts)
    if plan_model(facts) != ModelPlan() or until <= NOW:
        return
    later = NOW + part * (min(until, NOW + 1000.0) - NOW)
    if later >= until:
        return
    changed = [
        msgspec.structs.replace(one, last_used=later, in_flight=busy) if is_used else one
        for one, is_used in zip(facts.replicas, used, strict=False)
    ]
    after = msgspec.structs.replace(facts, now=later, replicas=tuple(changed))
    if can_grow(after) and all(one.in_flight for one in after.replicas):
        return  # requests are looked for by other means
    assert plan_model(after) == ModelPlan()


def test_the_moment_is_when_something_is_due() -> None:
    def until(schedule: Schedule | None, *there: ServingReplica, info: LoadInfo | None = None) -> float:
        known = info or LoadInfo(model="m")
        every = (A, B, C)
        return quiet_until(
            ModelFacts(now=NOW, info=known, schedule=schedule, replicas=there, matching=every, selected=every)
        )

    used = replica(A, used=NOW - 10)
    assert until(wanted(min_replicas=1), used) == math.inf
    assert until(wanted(idle_seconds=60), used) == NOW + 50
    assert until(None, used, replica(B, used=NOW - 100)) == NOW + USUAL.scale_down_seconds - 100
    assert until(wanted(min_replicas=2), used, info=LoadInfo(model="m", retry_at=NOW + 5)) == NOW + 5
    assert until(wanted(max_replicas=1), used, replica(B, busy=1)) == NOW  # it stops when it is no longer busy
