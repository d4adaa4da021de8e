"""How long `nodes drain` waits, and what it says and exits with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.recorded import JOB, WAIT_SECONDS, Answer, Stream, operation, recorded, refused, row, run

DRAIN = "POST /api/nodes/attic/drain"
NODE = {"GET /api/nodes/attic": Answer({"id": "1", "name": "attic", "status": "healthy"})}
OPERATION = f"GET /api/operations/{JOB}"
EVENTS = f"GET /api/events?operation={JOB}"
WHAT: dict[str, Any] = {"kind": "drain", "name": "attic"}
BEGUN = operation("queued", **WHAT)
STOPPING = operation("running", row("attic", action="stop chat", kind="stop_replica"), **WHAT)
DONE = operation("succeeded", row("attic", "success", action="stop chat", kind="stop_replica"), **WHAT)
AWAY = operation("queued", **WHAT, isParked=True)


def test_a_drain_that_ends_within_the_wait_says_that_it_is_safe(tmp_path: Path) -> None:
    with recorded({**NODE, DRAIN: Answer(BEGUN, 202), OPERATION: [Answer(STOPPING), Answer(DONE)]}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "20s")
    assert (result.exit_code, result.stderr.count("not safe")) == (0, 0)
    assert result.stdout.splitlines() == ["✓ attic: stop chat", "attic is drained and safe to stop"]


def test_a_node_that_was_drained_looks_like_nothing_was_done(tmp_path: Path) -> None:
    node = Answer({"id": "1", "name": "attic", "status": "draining", "drained": True})
    with recorded({"GET /api/nodes/attic": node, DRAIN: Answer(BEGUN, 202), OPERATION: Answer(DONE)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "20s")
    assert result.stdout.splitlines()[-1] == "= attic was drained already; it is safe to stop"


@pytest.mark.parametrize("state", [STOPPING, AWAY])
def test_a_drain_that_does_not_end_in_time_exits_with_3_and_goes_on(tmp_path: Path, state: dict[str, object]) -> None:
    begun = time.monotonic()
    with recorded({**NODE, DRAIN: Answer(state, 202), OPERATION: Answer(state)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "0.5")
    assert result.exit_code == 3
    assert 0.5 <= time.monotonic() - begun < WAIT_SECONDS
    assert "attic is not safe to stop after 0.5 s; the drain goes on" in result.stderr
    assert "safe to stop" not in result.stdout


def test_a_node_that_returns_within_the_wait_is_waited_for(tmp_path: Path) -> None:
    with recorded(
        {**NODE, DRAIN: Answer(AWAY, 202), OPERATION: [Answer(AWAY), Answer(STOPPING), Answer(DONE)]}
    ) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "20")
    assert (result.exit_code, "safe to stop" in result.stdout) == (0, True)


def test_without_a_wait_nobody_waits_for_a_node_that_is_away(tmp_path: Path) -> None:
    with recorded({**NODE, DRAIN: Answer(AWAY, 202)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic")
    assert result.exit_code == 0
    assert "attic is offline. The drain starts when it reconnects." in result.stderr
    assert "safe to stop" not in result.stdout
    assert [one.method for one in world.requests] == ["GET", "POST"]


def test_without_a_wait_a_drain_is_followed_to_its_end(tmp_path: Path) -> None:
    events: list[tuple[str, object] | str] = [("operation", STOPPING), ("operation", DONE)]
    with recorded({**NODE, DRAIN: Answer(BEGUN, 202), EVENTS: Stream(events)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "attic is drained and safe to stop")


def test_a_frontend_that_is_away_for_a_moment_is_asked_again(tmp_path: Path) -> None:
    lost = refused(503, "cannot serve now", "unavailable")
    with recorded({**NODE, DRAIN: Answer(BEGUN, 202), OPERATION: [lost, Answer(DONE)]}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "20")
    assert result.exit_code == 0
    assert "cannot reach the frontend" in result.stderr


def test_a_drain_that_failed_in_time_has_the_exit_code_of_its_operation(tmp_path: Path) -> None:
    failed = operation("failed", row("attic", "error", action="stop chat", error="disk full"), **WHAT)
    with recorded({**NODE, DRAIN: Answer(BEGUN, 202), OPERATION: Answer(failed)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", "20")
    assert result.exit_code == 1


@pytest.mark.parametrize("options", [("--wait", "-1"), ("--wait", "soon"), ("--wait", "5", "--no-follow")])
def test_a_wait_without_a_meaning_is_refused_before_anything_is_drained(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with recorded({**NODE, DRAIN: Answer(BEGUN, 202)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", *options)
    assert (result.exit_code, world.requests) == (2, [])


@pytest.mark.parametrize("duration", ["soon", "-1", "1x"])
def test_a_wait_that_is_no_duration_is_refused_before_anything_is_drained(tmp_path: Path, duration: str) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "--wait", duration)
        assert result.exit_code == 2
        assert "duration" in result.stderr
        assert world.requests == []
