"""The state behind `top`: right whatever is lost, repeated or late, and never back."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cli.terminal.shapes import JOB, model, node, of, operation, row, send

from enginehouse.cli.terminal.fleet_state import LISTS, Arrival, FleetState
from enginehouse.cli.terminal.seen import bytes_of
from enginehouse.core.ids import NodeId, OperationId

OPERATION = OperationId(JOB)
MEBIBYTE = 1024**2


def names(state: FleetState) -> set[str]:
    return {one.name for one in state.nodes.rows.values()}


def a_run(chance: random.Random, nodes: int) -> list[dict[str, Any]]:
    """What a frontend tells of one install, in order: each event has one changed row, its summary and its revision."""
    found, revision = [], nodes
    rows = {name: row(name, "queued", state="accepted", attempt=0) for name in (f"n{each}" for each in range(nodes))}
    found.append(operation("queued", *rows.values(), revision=revision, progress=0))
    for name in sorted(rows, key=lambda _: chance.random()):
        for attempt in range(1, chance.randint(1, 3) + 1):
            done = 0
            for _ in range(chance.randint(1, 4)):
                done = min(100, done + chance.randint(0, 60))
                fields = {"state": "running", "attempt": attempt, "current_bytes": done, "total_bytes": 100}
                rows[name] = row(name, "downloading", percentage=min(99.0, done), **fields)
                found.append(_partial(rows, name, revision))
            revision += 1
            rows[name] = row(name, "queued", state="waiting", attempt=attempt, error="cannot reach it")
            found.append(_partial(rows, name, revision))
        revision += 1
        state = chance.choice(["succeeded", "failed"])
        word = "success" if state == "succeeded" else "error"
        rows[name] = row(name, word, state=state, attempt=3, percentage=100.0 if word == "success" else 0.0)
        found.append(_partial(rows, name, revision))
    return found


def _partial(rows: dict[str, dict[str, object]], name: str, revision: int) -> dict[str, Any]:
    is_over = all(one["state"] in ("succeeded", "failed") for one in rows.values())
    progress = int(sum(float(str(one["percentage"])) for one in rows.values()) / len(rows))
    status = "partial" if is_over else "running"
    return operation(status, rows[name], revision=revision, partial=True, progress=progress)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_progress_never_moves_back_however_events_are_repeated_and_delayed(seed: int, nodes: int) -> None:
    chance = random.Random(seed)
    told = a_run(chance, nodes)
    # Everything arrives in its order, as the stream promises; old events come again anywhere.
    arriving = [told[0]]
    for number, event in enumerate(told[1:], start=1):
        arriving.append(event)
        arriving += [told[chance.randrange(number + 1)] for _ in range(chance.randint(0, 2))]
    state = FleetState()
    shown: dict[str, float] = {}
    progress, ended = 0, set()
    for at, event in enumerate(arriving):
        send(state, "operation", event, float(at))
        view = state.operations[OPERATION]
        assert view.progress >= progress
        progress = view.progress
        for one in view.nodes:
            assert one.percentage >= shown.get(one.node_name, 0.0), (one.node_name, at)
            shown[one.node_name] = one.percentage
            assert one.node_name not in ended or one.state in ("succeeded", "failed"), "an end is an end"
            if one.state in ("succeeded", "failed"):
                ended.add(one.node_name)
    final = state.operations[OPERATION]
    assert final.status == "partial"
    last = {one.node_name: one.status for one in final.nodes}
    expected: dict[str, object] = {}
    for event in told:
        expected |= {str(one["node_name"]): one["status"] for one in event["nodes"]}
    assert last == expected
    assert len(final.nodes) == nodes


def test_what_one_attempt_fetched_stays_on_the_bar_when_a_later_one_begins_anew() -> None:
    state = FleetState()
    fields: dict[str, Any] = {"state": "running", "total_bytes": 100}
    first = row("a", attempt=1, percentage=60.0, current_bytes=60, **fields)
    again = row("a", attempt=2, percentage=5.0, current_bytes=5, **fields)
    for number, each in enumerate((first, again)):
        send(state, "operation", operation("running", each, revision=number), float(number))
    (seen,) = state.operations[OPERATION].nodes
    assert (seen.attempt, seen.current_bytes, seen.percentage) == (2, 5, 60.0)


def test_what_a_frontend_that_was_restarted_does_not_know_does_not_take_bytes_away() -> None:
    state = FleetState()
    fields: dict[str, Any] = {"state": "running", "attempt": 1}
    known = row("a", percentage=60.0, current_bytes=60, total_bytes=100, phase="downloading", **fields)
    send(state, "operation", operation("running", known, revision=2), 1.0)
    send(state, "operation", operation("running", row("a", **fields), revision=2), 2.0)
    (seen,) = state.operations[OPERATION].nodes
    assert (seen.current_bytes, seen.total_bytes, seen.percentage) == (60, 100, 60.0)


def test_the_bytes_of_a_share_that_is_done_still_count() -> None:
    state = FleetState()
    fields: dict[str, Any] = {"attempt": 1, "total_bytes": 10 * MEBIBYTE}
    running = [row(name, state="running", current_bytes=4 * MEBIBYTE, **fields) for name in ("a", "b")]
    send(state, "operation", operation("running", *running, revision=2), 1.0)
    assert bytes_of(state.operations[OPERATION]) == (8 * MEBIBYTE, 20 * MEBIBYTE)
    done = row("a", "success", state="succeeded", attempt=1, percentage=100.0)
    send(state, "operation", operation("running", done, revision=3, partial=True), 2.0)
    assert bytes_of(state.operations[OPERATION]) == (14 * MEBIBYTE, 20 * MEBIBYTE)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    state = FleetState()
    for second in range(5):
        one = row("a", state="running", current_bytes=second * MEBIBYTE, total_bytes=100 * MEBIBYTE)
        send(state, "operation", operation("running", one, revision=1), float(second))
    assert state.rate_of(OPERATION) == pytest.approx(MEBIBYTE)


def test_a_change_of_what_was_never_told_is_a_reason_to_list_operations() -> None:
    state = of()
    send(state, "operation", operation("running", row("a"), partial=True, revision=4), 103.0)
    assert not state.operations
    assert state.wanted_lists(103.0) == ["operations"]


def test_a_list_that_was_asked_for_before_an_event_changes_nothing_of_it() -> None:
    state = of(node("desk"), node("attic"), at=100.0)
    send(state, "node", node("desk", drained=True, updated_at="2026-01-01T00:01:00Z"), 105.0)
    send(state, "node-removed", {"id": "id-of-attic"}, 105.0)
    send(state, "node", node("new"), 105.0)
    state.take_list("nodes", [node("desk"), node("attic")], 104.0, 106.0)
    assert names(state) == {"desk", "new"}
    assert state.nodes.rows[NodeId("id-of-desk")].drained


def test_what_a_later_list_does_not_have_is_gone() -> None:
    state = of(node("desk"), node("attic"))
    state.take_list("nodes", [node("desk")], 110.0, 111.0)
    assert names(state) == {"desk"}


def test_an_older_state_of_a_node_that_comes_late_is_ignored() -> None:
    state = of(node("desk", health="offline", updated_at="2026-01-01T00:05:00Z"))
    send(state, "node", node("desk", updated_at="2026-01-01T00:04:00.5Z"), 101.0)
    assert state.nodes.rows[NodeId("id-of-desk")].health == "offline"


def test_nodes_and_models_that_a_resumed_stream_does_not_name_were_removed_meanwhile() -> None:
    state = of(node("desk"), node("attic"))
    state.take_list("models", [model("qwen", "desk"), model("old", "attic")], 100.0, 100.0)
    state.disconnected()
    state.connected(120.0, is_resumed=True)
    send(state, "model", model("qwen"), 120.0)
    send(state, "caught-up", {"nodes": ["id-of-desk"]}, 120.0)
    assert names(state) == {"desk"}
    assert set(state.models.rows) == {"qwen"}


def test_overflow_and_what_cannot_be_read_mean_that_everything_is_listed_again() -> None:
    for kind, body in (("overflow", b"{}"), ("node", b'{"id": 7}'), ("operation", b"not JSON")):
        state = of(node("desk"))
        assert state.wanted_lists(103.0) == []
        state.take_event(kind, body, 103.0)
        assert set(state.wanted_lists(103.0)) == set(LISTS), kind
        assert names(state) == {"desk"}, "what is known stays meanwhile"


def test_a_stream_that_could_not_be_resumed_is_followed_by_every_list() -> None:
    state = of(node("desk"))
    state.disconnected()
    assert state.wanted_lists(200.0) == [], "while the frontend is away nothing is asked"
    state.connected(201.0, is_resumed=False)
    assert set(state.wanted_lists(201.0)) == set(LISTS)


def test_a_list_that_could_not_be_read_is_read_again_but_not_at_once() -> None:
    state = of()
    state.take(Arrival("unread", 100.5, "models"))
    assert state.wanted_lists(100.6) == []
    assert "models" in state.wanted_lists(103.0)


def test_without_a_pulse_figures_are_unknown_and_heartbeats_come_from_lists() -> None:
    state = of(node("desk", heartbeat_age_seconds=3.0))
    assert state.traffic(101.0).requests_per_second is None
    assert state.figures(state.nodes.rows[NodeId("id-of-desk")]).used_cores is None
    assert state.heartbeat_age(NodeId("id-of-desk"), 101.0) == pytest.approx(4.0)
    assert "nodes" not in state.wanted_lists(109.0)
    assert "nodes" in state.wanted_lists(110.0)


@pytest.mark.parametrize("moments", [(1000.0, 998.0), ("2026-01-01T00:00:10Z", "2026-01-01T00:00:08.000001Z")])
def test_a_pulse_brings_figures_and_heartbeats_and_goes_stale(moments: tuple[object, object]) -> None:
    state = of(node("desk", heartbeat_age_seconds=60.0), node("attic"))
    desk = NodeId("id-of-desk")
    figures = {
        "heard_at": moments[1],
        "available_ram": 1,
        "used_cores": 2.5,
        "requests_per_second": 8.2,
        "in_flight": 1,
    }
    traffic = {"requests_per_second": 12.4, "tokens_per_second": 318.0, "time_to_first_token_seconds": None}
    pulse = {"at": moments[0], "traffic": traffic, "nodes": {desk: figures}, "models": {"qwen": traffic}}
    send(state, "pulse", pulse, 105.0)
    assert state.traffic(106.0).requests_per_second == 12.4
    assert state.traffic_of("qwen", 106.0).tokens_per_second == 318.0
    seen = state.figures(state.nodes.rows[desk])
    assert (seen.used_cores, seen.available_ram, seen.available_disk) == (2.5, 1, 50 * 1024**3)
    assert state.heartbeat_age(desk, 106.0) == pytest.approx(3.0, abs=0.1)
    # Nodes that did not change are not in the next one, and keep what the last one said.
    send(state, "pulse", {**pulse, "nodes": {}}, 110.0)
    assert state.figures(state.nodes.rows[desk]).used_cores == 2.5
    assert state.traffic(110.0 + 13).requests_per_second is None, "an old figure is no figure"


def test_a_node_event_after_the_pulse_has_the_newer_memory() -> None:
    state = of(node("desk"))
    desk = NodeId("id-of-desk")
    send(state, "pulse", {"at": 1.0, "nodes": {desk: {"heard_at": 1.0, "available_ram": 7}}}, 105.0)
    send(state, "node", node("desk", available_ram=9), 106.0)
    assert state.figures(state.nodes.rows[desk]).available_ram == 9


def test_events_of_a_later_version_change_nothing() -> None:
    state = of(node("desk"))
    state.take_event("weather", b'{"rain": true}', 101.0)
    state.take_event("pulse", msgspec.json.encode({"at": 1.0, "more": [], "traffic": {"new": 1}}), 101.0)
    assert names(state) == {"desk"}


def test_of_ended_operations_only_the_newest_are_kept() -> None:
    state = of()
    for number in range(260):
        one = operation(
            "succeeded", jobID=f"job-{number:04d}", createdAt=f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}Z"
        )
        send(state, "operation", one, 101.0)
    send(state, "operation", operation("running", row("a"), createdAt="2020-01-01T00:00:00Z"), 102.0)
    assert len(state.operations) == 201
    assert OPERATION in state.operations
    assert "job-0059" not in state.operations


def test_silence_is_told_from_a_connection_that_is_alive() -> None:
    state = of()
    assert state.is_live(103.0)
    state.heard(110.0)
    assert state.is_live(111.0)
    assert not state.is_live(119.0)
    assert state.silence(119.0) == pytest.approx(9.0)
    state.disconnected()
    state.connected(120.0, is_resumed=True)
    assert state.is_live(120.0)
