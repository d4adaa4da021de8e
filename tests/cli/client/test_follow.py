"""Following an operation: live, through breaks, to every kind of end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.recorded import (
    JOB,
    WAIT_SECONDS,
    Answer,
    Stream,
    environment,
    operation,
    recorded,
    refused,
    row,
    run,
)

from enginehouse.cli.client.connect import read
from enginehouse.cli.terminal.output import in_one_form
from enginehouse.cli.terminal.progress import Lines, describe, phase_words
from enginehouse.cli.terminal.rates import Meter
from enginehouse.core.views import NodeRow, OperationView

EVENTS = f"GET /api/events?operation={JOB}"
OPERATION = f"GET /api/operations/{JOB}"
REQUEST = "POST /api/operations"
INSTALL = ("backends", "install", "llama-cpp", "--all")
QUEUED = operation("queued", row("main", "queued"), row("second", "queued"))
HALF = operation(
    "running",
    row("main", "success", percentage=100.0),
    row("second", phase="downloading", current_bytes=1048576, total_bytes=4194304, percentage=25.0),
)
DONE = operation("succeeded", row("main", "success"), row("second", "success"))


def hello(*states: object) -> list[tuple[str, object] | str]:
    return [("hello", {}), ": keep-alive\n\n", *(("operation", state) for state in states)]


def test_an_install_is_followed_to_its_end_and_each_node_has_its_line(tmp_path: Path) -> None:
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(QUEUED, HALF, DONE))}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == ["✓ main: install llama-cpp", "✓ second: install llama-cpp"]
    assert "second: install llama-cpp: downloading: 1.0 MiB of 4.0 MiB (25%)" in result.stderr
    assert world.bodies("/api/operations") == [{"kind": "install", "name": "llama-cpp"}]
    assert world.requests[0].headers["Authorization"] == "Bearer secret-token"


def test_a_connection_that_breaks_in_the_middle_is_only_a_pause(tmp_path: Path) -> None:
    answers = {
        REQUEST: Answer(QUEUED, 202),
        EVENTS: [Stream(hello(QUEUED), "cut"), Stream(hello(HALF, DONE))],
        OPERATION: Answer(HALF),
    }
    with recorded(answers) as world:  # type: ignore[arg-type]
        result = run(world, tmp_path, *INSTALL)
        world.wait_for("/api/events", 2)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_what_happened_during_a_break_is_seen_without_an_event(tmp_path: Path) -> None:
    with recorded(
        {REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(QUEUED), "cut"), OPERATION: Answer(DONE)}
    ) as world:
        assert run(world, tmp_path, *INSTALL).exit_code == 0


def test_a_frontend_without_events_is_asked_again_and_again(tmp_path: Path) -> None:
    answers = {REQUEST: Answer(QUEUED, 202), OPERATION: [Answer(HALF), Answer(DONE)]}
    with recorded(answers) as world:  # type: ignore[arg-type]
        assert run(world, tmp_path, *INSTALL).exit_code == 0


def test_a_frontend_that_is_killed_and_restarted_is_only_a_pause(tmp_path: Path) -> None:
    held = threading.Event()
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(QUEUED), held)}) as world:
        process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", *INSTALL],
            env=environment(world, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        world.wait_for("/api/events")
        world.stop()
        held.set()
        seen = ""
        while "trying again" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        world.answers[OPERATION] = Answer(HALF)
        world.answers[EVENTS] = Stream(hello(HALF, DONE))
        world.start()
        stdout, stderr = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, stderr
    assert "connected again" in stderr
    assert stdout.splitlines() == ["✓ main: install llama-cpp", "✓ second: install llama-cpp"]


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        (
            operation("partial", row("a", "success"), row("b", "error", error="cannot write: disk full")),
            3,
            "✗ b: install llama-cpp: cannot write: disk full",
        ),
        (operation("failed", row("a", "error", reason="no_space")), 1, "✗ a: install llama-cpp: no_space"),
        (operation("failed", error="cannot place tiny-chat: no node"), 1, "✗ cannot place tiny-chat: no node"),
        (operation("cancelled", row("a", "cancelled")), 1, "✗ a: install llama-cpp: cancelled"),
        (operation("superseded", row("a", "superseded")), 1, "✗ a: install llama-cpp: superseded"),
    ],
)
def test_the_exit_code_tells_how_it_ended(tmp_path: Path, end: dict[str, object], code: int, line: str) -> None:
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(end))}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert result.exit_code == code
    assert line in result.stdout.splitlines()


def test_a_request_for_a_node_that_is_away_is_kept_and_nobody_has_to_wait(tmp_path: Path) -> None:
    parked = operation(
        "queued",
        row("main", "success"),
        row("second", "queued", state="waiting", reason="node_away"),
        isParked=True,
    )
    with recorded({REQUEST: Answer(parked, 202)}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert result.exit_code == 0
    assert "… second: install llama-cpp: queued: second is offline" in result.stdout
    assert (
        f"second is offline. The install starts when it reconnects. Follow it: enginehouse ops follow {JOB}"
        in result.stderr
    )


def test_a_parked_operation_in_which_a_node_failed_is_not_a_success(tmp_path: Path) -> None:
    parked = operation("queued", row("main", "error"), row("second", "queued", reason="node_away"), isParked=True)
    with recorded({REQUEST: Answer(parked, 202)}) as world:
        assert run(world, tmp_path, *INSTALL).exit_code == 3


def test_a_healable_error_shows_its_reason_and_the_next_try(tmp_path: Path) -> None:
    waiting = operation(
        "queued", row("main", "queued", state="waiting", error="cannot reach the index", due_in_seconds=42.0)
    )
    done = operation("succeeded", row("main", "success"))
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(waiting, done))}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert "waiting: cannot reach the index; next try in 42 s" in result.stderr


def test_nodes_that_were_left_out_are_named_with_the_reason(tmp_path: Path) -> None:
    excluded = [{"node_id": "x", "node_name": "jetson", "reason": "it has no build for linux/arm64"}]
    with recorded({REQUEST: Answer({**DONE, "excluded": excluded}, 202)}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert "- jetson: left out: it has no build for linux/arm64" in result.stdout


def test_json_gives_one_line_per_state_and_nothing_else_on_stdout(tmp_path: Path) -> None:
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(QUEUED, HALF, DONE))}) as world:
        result = run(world, tmp_path, *INSTALL, "--json")
    states = [json.loads(line) for line in result.stdout.splitlines()]
    assert states == in_one_form([QUEUED, HALF, DONE])


def test_no_follow_gives_the_id_and_says_how_to_follow(tmp_path: Path) -> None:
    with recorded({REQUEST: Answer(QUEUED, 202)}) as world:
        result = run(world, tmp_path, *INSTALL, "--no-follow")
        as_json = run(world, tmp_path, *INSTALL, "--no-follow", "--json")
    assert result.stdout == f"{JOB}\n"
    assert f"enginehouse ops follow {JOB}" in result.stderr
    assert json.loads(as_json.stdout) == in_one_form(QUEUED)


def test_an_operation_that_is_gone_ends_the_following(tmp_path: Path) -> None:
    with recorded({REQUEST: Answer(QUEUED, 202)}) as world:
        result = run(world, tmp_path, *INSTALL)
    assert result.exit_code == 5
    assert result.stderr.count("enginehouse: cannot find") == 1


def test_losing_the_right_to_see_it_ends_the_following(tmp_path: Path) -> None:
    answers = {REQUEST: Answer(QUEUED, 202), EVENTS: refused(401, "cannot know who asks", "unauthenticated")}
    with recorded(answers) as world:
        assert run(world, tmp_path, *INSTALL).exit_code == 4


def test_ctrl_c_ends_the_watching_and_says_that_the_operation_goes_on(tmp_path: Path) -> None:
    held = threading.Event()
    with recorded({REQUEST: Answer(QUEUED, 202), EVENTS: Stream(hello(HALF), held)}) as world:
        process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", *INSTALL],
            env=environment(world, tmp_path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        seen = ""
        while "downloading" not in seen:
            line = process.stderr.readline()
            assert line, seen
            seen += line
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=WAIT_SECONDS)
        held.set()
    assert process.returncode == 130
    assert f"the operation goes on; see it with `enginehouse ops follow {JOB}`" in stderr
    assert "Traceback" not in stderr


class Script:
    """Lines as they would be written, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.written: list[str] = []
        self.lines = Lines(self.written.append, lambda: self.now)

    def show(self, *rows: dict[str, object]) -> int:
        before = len(self.written)
        answer = operation("running", *rows)
        self.lines.show(read(answer, OperationView).nodes, answer)
        return len(self.written) - before


def test_in_a_pipe_bytes_alone_are_told_at_most_every_two_seconds() -> None:
    script = Script()
    assert script.show(row(phase="downloading", current_bytes=1, total_bytes=100)) == 1
    script.now += 1
    assert script.show(row(phase="downloading", current_bytes=2, total_bytes=100)) == 0
    script.now += 1
    assert script.show(row(phase="downloading", current_bytes=3, total_bytes=100)) == 1
    assert script.show(row(phase="extracting", current_bytes=3, total_bytes=100)) == 1


def test_rows_that_move_at_the_same_time_take_turns() -> None:
    script = Script()
    script.show(*(row(name, phase="downloading", current_bytes=1, total_bytes=9) for name in ("a", "b")))
    for done in (2, 3, 4, 5):
        script.now += 2
        assert (
            script.show(*(row(name, phase="downloading", current_bytes=done, total_bytes=9) for name in ("a", "b")))
            == 1
        )
    assert [line[0] for line in script.written] == ["a", "b", "a", "b", "a", "b"]


def test_the_same_state_again_is_not_told_again() -> None:
    script = Script()
    assert script.show(row("a", "queued")) == 1
    script.now += 60
    assert script.show(row("a", "queued")) == 0


def test_a_rate_is_taken_over_the_last_seconds_and_starts_anew_with_an_attempt() -> None:
    meter = Meter()
    for second in range(10):
        meter.note(float(second), second * 1000)
    assert meter.rate() == pytest.approx(1000)
    meter.note(10.0, 0)
    assert meter.rate() == 0


def told(**fields: object) -> NodeRow:
    return read(row(**fields), NodeRow)  # type: ignore[arg-type]


def test_a_removal_looks_nothing_up() -> None:
    words = {
        action: phase_words(told(action=action, phase="resolving")) for action in ("delete a", "remove b", "stop c")
    }
    assert set(words.values()) == {"working"}
    assert phase_words(told(action="install a", phase="resolving")) == "looking up"


def test_digests_are_told_as_short_as_in_lists() -> None:
    long = "quay.io/acme/engine:latest@sha256:" + "0123456789ab" + "c" * 52
    short = "quay.io/acme/engine:latest@sha256:0123456789ab"
    assert phase_words(told(action="install a", phase="downloading", file_name=long)) == f"downloading {short}"
    failed = told(status="error", error=f"cannot find {long}: check its name")
    assert describe(failed, None) == f"cannot find {short}: check its name"


def test_a_delete_that_found_nothing_says_so(tmp_path: Path) -> None:
    rows = (
        row("main", "success", action="delete a"),
        row("second", "success", action="delete a", note="already_absent"),
    )
    with recorded({REQUEST: Answer(operation("succeeded", *rows), 202)}) as world:
        result = run(world, tmp_path, "backends", "delete", "a", "--all")
    assert result.stdout.splitlines() == ["✓ main: delete a", "= second: delete a: it was not there"]


@pytest.mark.parametrize(
    ("excluded", "asked", "code"),
    [
        ({"reason": "it waits for approval"}, {}, 0),
        ({"reason": "it is not installed there"}, {"nodes": ["main", "attic"]}, 3),
        ({"reason": "its worker did not say", "code": "unknown"}, {}, 3),
    ],
    ids=["of all", "by name", "unknown"],
)
@pytest.mark.parametrize("no_follow", [(), ("--no-follow",)])
def test_what_is_left_out_of_what_was_asked_for_is_no_plain_success(
    tmp_path: Path, excluded: dict[str, object], asked: dict[str, object], code: int, no_follow: tuple[str, ...]
) -> None:
    done = operation(
        "succeeded", row("main", "success"), excluded=[{"node_id": "x", "node_name": "attic", **excluded}], asked=asked
    )
    with recorded({REQUEST: Answer(done, 202)}) as world:
        result = run(world, tmp_path, *INSTALL, *no_follow)
    assert result.exit_code == code
    assert "left out" in result.stdout + result.stderr
