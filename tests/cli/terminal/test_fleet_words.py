"""The sentences of `top`, which are those of the page."""

from __future__ import annotations

from typing import Any

import pytest
from tests.cli.terminal.shapes import JOB, model, node, of, operation, row, send

from enginehouse.cli.terminal.fleet_state import FleetState
from enginehouse.cli.terminal.fleet_words import (
    UNKNOWN,
    bytes_of_bytes,
    clock,
    figure,
    headline,
    link,
    needs,
    nothing,
    span,
    truth,
)
from enginehouse.core.ids import OperationId

AWAY = {"state": "waiting", "reason": "node_away"}


def sentences(state: FleetState, at: float = 101.0) -> list[str]:
    return [need.sentence for need in needs(state, at)]


def operated(view: dict[str, object], **fields: object) -> FleetState:
    state = of(node("desk"))
    send(state, "operation", {**view, **fields}, 100.0)
    return state


def test_the_line_of_truth_counts_what_is_and_shows_unknown_figures_as_unknown() -> None:
    state = of(*(node(name) for name in "abcd"), node("e", health="offline"), node("new", approved=False))
    state.take_list("models", [model("qwen", "a", "b"), model("tiny", "a")], 100.0, 100.0)
    send(state, "operation", operation("running", row("a")), 100.0)
    send(state, "operation", operation("queued", isParked=True, jobID="parked"), 100.0)
    line = " · ".join(truth(state, 101.0))
    assert line == f"4 of 5 nodes healthy · 3 replicas · {UNKNOWN} req/s · {UNKNOWN} tok/s · 2 operations running"
    traffic = {"requests_per_second": 12.44, "tokens_per_second": 318.2}
    send(state, "pulse", {"at": 1.0, "traffic": traffic}, 101.0)
    assert " · 12.4 req/s · 318 tok/s · " in " · ".join(truth(state, 102.0))


def test_one_is_said_as_one_and_none_as_none() -> None:
    assert truth(of(node("a")), 100.0)[:2] == ["1 of 1 node healthy", "0 replicas"]
    assert len(truth(of(node("a")), 100.0)) == 4, "no word of operations while none runs"
    assert truth(of(node("a"), node("b", drained=True)), 100.0)[0] == "1 of 2 nodes healthy"
    assert truth(of(), 100.0)[0] == "no nodes yet"


def test_the_connection_is_live_silent_or_being_made_again() -> None:
    state = FleetState()
    assert link(state, 99.0) == "◌ connecting · no data yet"
    state.connected(100.0, is_resumed=False)
    assert link(state, 101.0) == "● live"
    assert link(state, 112.0) == "◌ reconnecting · data 12 s old"
    state.disconnected()
    assert link(state, 140.0) == "◌ reconnecting · data 40 s old"
    state.disconnected(is_refused=True)
    assert link(state, 3760.0) == "◌ not allowed · data 1 h 1 min old"


def test_a_pending_node_is_named_with_its_fingerprint() -> None:
    state = of(node("shed-pi", approved=False), node("desk"))
    assert sentences(state) == ["shed-pi asks to join (9f2c0000aaaa1111)"]
    again = of(node("shed-pi", approved=False, waits_for="its address changed"))
    assert sentences(again) == ["shed-pi asks to join again: its address changed (9f2c0000aaaa1111)"]


def test_nothing_needs_a_person_where_all_is_well() -> None:
    state = of(node("desk"), node("attic", drained=True))
    send(state, "operation", operation("succeeded", row("desk", "success")), 100.0)
    assert sentences(state) == []
    assert nothing(state, 101.0) == "Nothing needs you."
    assert nothing(state, 130.0) == "Nothing needed you 30 s ago."


def failed(*names: str) -> dict[str, object]:
    return operation("partial", *(row(name, "error", error="cannot write: disk full") for name in names))


@pytest.mark.parametrize(
    ("view", "sentence"),
    [
        (failed("a"), "Install llama-cpp: 0 of 1 done, 1 failed. a: cannot write: disk full"),
        (failed(*"abcde"), "Install llama-cpp: 0 of 5 done, 5 failed. a: cannot write: disk full"),
        (operation("failed", error="cannot place it"), "Install llama-cpp: cannot place it."),
    ],
)
def test_a_failure_says_what_failed_where_and_why(view: dict[str, object], sentence: str) -> None:
    assert sentences(operated(view)) == [sentence]


def test_a_failure_needs_nobody_once_it_was_dismissed_or_something_else_has_done_it() -> None:
    assert sentences(operated(failed("a"), dismissed=True)) == []
    again = {"jobID": "again", "createdAt": "2026-01-02T00:00:00Z"}
    for later in ({"retryOf": JOB, "status": "running", **again}, {"status": "succeeded", **again}):
        state = operated(failed("a"))
        send(state, "operation", {**operation("running", row("a")), **later}, 101.0)
        assert sentences(state) == [], later
    state = operated(operation("failed", kind="load", name="qwen", error="no"))
    assert len(sentences(state)) == 1
    send(state, "model", model("qwen", "desk"), 101.0)
    assert sentences(state) == []


def test_a_model_without_a_place_is_named_once_with_the_numbers() -> None:
    reason = "jetson has 3.9 GiB free, 5.2 GiB are needed"
    state = operated(operation("failed", kind="load", name="qwen", error=f"cannot place qwen: {reason}"))
    state.take_list("schedules", [{"model_name": "qwen", "reason": f"cannot place qwen: {reason}"}], 100.0, 100.0)
    assert sentences(state) == [f"qwen cannot be placed: {reason}"]
    state.take_list("schedules", [{"model_name": "qwen", "reason": "the engine ended"}], 101.0, 101.0)
    assert sentences(state) == ["qwen cannot be loaded: the engine ended"]


# Free MiB of 4 GiB: enough by the share of it, and in one case too little for an install.
SMALL = {"card": 300, "pi": 600}


def test_a_disk_with_less_than_a_twentieth_free_is_nearly_full() -> None:
    gibibyte = 1024**3
    state = of(node("full", available_disk=4 * gibibyte), node("roomy", available_disk=6 * gibibyte))
    assert sentences(state) == ["full has 4.0 GiB of 100.0 GiB disk free. Delete what it no longer needs."]
    small = of(
        node("card", available_disk=300 * 1024**2, total_disk=4 * gibibyte),
        node("pi", available_disk=gibibyte, total_disk=4 * gibibyte),
    )
    assert sentences(small) == ["card has 300.0 MiB of 4.0 GiB disk free. Delete what it no longer needs."]
    unknown = of(node("silent", available_disk=0, total_disk=0))
    assert sentences(unknown) == []


def test_a_node_whose_heartbeats_come_late_is_named_like_the_doctor_does() -> None:
    (need,) = needs(of(node("attic", health="unhealthy")), 101.0)
    assert need.sentence == "attic is unhealthy: its heartbeats come late. Check its load and its network."
    assert need.command == "enginehouse logs worker --node attic"


def test_a_node_that_is_away_is_named_with_what_waits_for_it() -> None:
    state = of(node("jetson", health="offline", heartbeat_age_seconds=3 * 3600.0))
    assert sentences(state) == ["jetson has been offline for 3 h 0 min."]
    for number in range(2):
        send(state, "operation", operation("queued", row("jetson", "queued", **AWAY), jobID=f"j{number}"), 100.0)
    assert sentences(state) == ["jetson has been offline for 3 h 0 min; 2 requests wait for it."]


def test_a_model_that_was_given_up_and_a_node_without_a_bus_are_named() -> None:
    given_up = {"model_id": "qwen", "replica_index": 0, "message": "ended 5 times"}
    state = of(node("desk", failed_replicas=[given_up]), node("attic", health="unhealthy", degraded=True))
    first, second = sentences(state)
    assert first == "qwen does not stay up on desk: ended 5 times"
    assert second.startswith("attic sends heartbeats, but commands do not reach it.")


def test_needs_come_most_urgent_first() -> None:
    state = of(
        node("z-new", approved=False),
        node("a-full", available_disk=1),
        node("b-away", health="offline", heartbeat_age_seconds=60.0),
    )
    send(state, "operation", failed("c"), 100.0)
    state.take_list("schedules", [{"model_name": "qwen", "reason": "cannot place qwen: no node"}], 100.0, 100.0)
    kinds = [(need.kind, need.sentence.split()[0]) for need in needs(state, 101.0)]
    assert kinds == [
        ("node", "z-new"),
        ("node", "a-full"),
        ("operation", "Install"),
        ("model", "qwen"),
        ("node", "b-away"),
    ]


def test_the_headline_of_an_operation_says_how_it_stands() -> None:
    rows = [row(name, "success") for name in "abc"]
    rows += [row("d", "error"), row("jetson", "queued", **AWAY), row("e", "queued"), row("f"), row("g", "cancelled")]
    excluded: list[dict[str, Any]] = [{"node_id": "x", "node_name": "x", "reason": "no build"}]
    state = operated(operation("running", *rows, kind="upgrade", excluded=excluded))
    said = headline(state.operations[OperationId(JOB)], state)
    stands = "3 of 8 done, 1 failed, 1 waits for jetson, 1 queued, 1 at work, 1 cancelled, 1 skipped"
    assert said == f"Upgrade llama-cpp: {stands}."


def test_sizes_rates_and_times_are_written_as_on_the_page() -> None:
    assert bytes_of_bytes(1288490188, 3328599654) == "1.2 of 3.1 GiB"
    assert bytes_of_bytes(5, 100) == "5 of 100 B"
    assert [figure(value) for value in (None, 0.0, 99.94, 318.2)] == [UNKNOWN, "0.0", "99.9", "318"]
    assert [clock(value) for value in (0.2, 48.0, 3723.0)] == ["0:01", "0:48", "1:02:03"]
    assert [span(value) for value in (59, 60, 3600, 90000)] == ["59 s", "1 min", "1 h 0 min", "1 d"]
