"""What a person sees on a terminal: bars, tables, signs of waiting."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.cli.real_terminal import Terminal
from tests.cli.recorded import JOB, WAIT_SECONDS, Answer, Request, Stream, operation, recorded, row

from enginehouse.cli.terminal.output import printable

EVENTS = f"GET /api/events?operation={JOB}"
MIB = 1024**2


def test_an_install_has_one_live_bar_per_node_and_leaves_a_line_for_each(tmp_path: Path) -> None:
    held = threading.Event()
    moving = operation(
        "running",
        row("main", phase="downloading", current_bytes=MIB, total_bytes=4 * MIB, percentage=25.0),
        row("second", phase="extracting", current_bytes=3 * MIB, total_bytes=4 * MIB, percentage=75.0),
        row("third", "queued", state="waiting", error="cannot reach the index", due_in_seconds=30.0),
    )
    done = operation("succeeded", row("main", "success"), row("second", "success"), row("third", "success"))
    answers = {
        "POST /api/operations": Answer(operation("queued"), 202),
        EVENTS: [Stream([("operation", moving)], held), Stream([("operation", done)])],
        f"GET /api/operations/{JOB}": Answer(moving),
    }
    with recorded(answers) as world:  # type: ignore[arg-type]
        with Terminal(world, tmp_path, "backends", "install", "llama-cpp", "--all") as terminal:
            terminal.wait_for("main: install llama-cpp")
            terminal.wait_for("25% 1.0 MiB of 4.0 MiB")
            terminal.wait_for("75% 3.0 MiB of 4.0 MiB unpacking")
            terminal.wait_for("next try in 29 s: cannot reach the index")
            terminal.wait_for("0 of 3 done")
            # Nothing arrives any more, and still the screen moves.
            terminal.wait_for("next try in 28 s")
            held.set()
            assert terminal.exit_code() == 0
    ending = terminal.seen.rstrip().splitlines()[-3:]
    assert [line.strip() for line in ending] == [f"✓ {name}: install llama-cpp" for name in ("main", "second", "third")]


def test_a_lost_frontend_is_shown_beside_the_bars(tmp_path: Path) -> None:
    moving = operation("running", row("main", phase="downloading", current_bytes=MIB, total_bytes=4 * MIB))
    done = operation("succeeded", row("main", "success"))
    held = threading.Event()
    answers = {
        "POST /api/operations": Answer(moving, 202),
        EVENTS: [Stream([("operation", moving)], held), Stream([("operation", done)])],
    }
    with recorded(answers) as world:  # type: ignore[arg-type]
        with Terminal(world, tmp_path, "backends", "install", "llama-cpp") as terminal:
            terminal.wait_for("1.0 MiB of 4.0 MiB")
            world.stop()
            held.set()
            terminal.wait_for("trying again (1 s)")
            world.start()
            assert terminal.exit_code() == 0
    assert "✓ main: install llama-cpp" in terminal.seen


def test_a_frontend_that_takes_its_time_is_shown_to_be_waited_for(tmp_path: Path) -> None:
    held = threading.Event()

    def slow(request: Request) -> Answer | Stream:
        held.wait(WAIT_SECONDS)
        return Answer([])

    with recorded({"GET /api/nodes?limit=500": slow}) as world, Terminal(world, tmp_path, "nodes", "list") as terminal:
        terminal.wait_for(f"waiting for {world.url} …")
        terminal.wait_for("… 1 s")
        held.set()
        assert terminal.exit_code() == 0
    assert "no nodes yet; `enginehouse nodes add` says how to join one" in terminal.seen


def test_a_list_is_a_table_with_a_head(tmp_path: Path) -> None:
    nodes = [{"id": "1", "name": "[red]odd", "status": "healthy", "heartbeat_age_seconds": 61.0}]
    with (
        recorded({"GET /api/nodes?limit=500": Answer(nodes)}) as world,
        Terminal(world, tmp_path, "nodes", "list") as terminal,
    ):
        assert terminal.exit_code() == 0
    head, line = terminal.seen.strip().splitlines()
    assert head.split()[:3] == ["NAME", "STATUS", "HEARD"]
    assert line.split()[:4] == ["[red]odd", "healthy", "1m", "ago"]


def test_on_a_narrow_screen_what_all_nodes_do_is_said_once(tmp_path: Path) -> None:
    held = threading.Event()
    reason = "cannot find the address of a registry with a long name: check the name and the network"
    moving = operation(
        "running",
        row("main", phase="downloading", current_bytes=MIB, total_bytes=4 * MIB, percentage=25.0),
        row("second", "queued", state="waiting", error=reason, due_in_seconds=30.0),
    )
    done = operation("succeeded", row("main", "success"), row("second", "success"))
    answers = {
        "POST /api/operations": Answer(operation("queued"), 202),
        EVENTS: [Stream([("operation", moving)], held), Stream([("operation", done)])],
        f"GET /api/operations/{JOB}": Answer(moving),
    }
    with recorded(answers) as world:  # type: ignore[arg-type]
        with Terminal(world, tmp_path, "backends", "install", "llama-cpp", columns=60) as terminal:
            terminal.wait_for("25% 1.0 MiB of 4.0 MiB")
            # The reason has the room of the bar, and what moves stands before it.
            terminal.wait_for("next try in 29 s: cannot find the address of a")
            terminal.wait_for("install llama-cpp: 0 of 2 done")
            terminal.wait_for("next try in 28 s: ")
            live = terminal.seen
            held.set()
            assert terminal.exit_code() == 0
    assert "main: install llama-cpp" not in live
    assert "✓ main: install llama-cpp" in terminal.seen


def test_a_table_breaks_no_words_however_narrow_the_screen_is(tmp_path: Path) -> None:
    failed = operation("failed", row("main", "error"), error="main: " + "cannot do this for a long reason " * 20)
    answers = {"GET /api/operations?all=true&limit=50": Answer({"operations": [failed]})}
    for columns in (30, 60, 80):
        with recorded(answers) as world, Terminal(world, tmp_path, "ops", "list", columns=columns) as terminal:
            assert terminal.exit_code() == 0
        assert set(terminal.seen.split()) >= {"STATUS", "NODES", JOB[:8], "install", "llama-cpp", "failed"}
        # And a long reason does not push everything else off the screen.
        assert len(terminal.seen.strip().splitlines()) <= 4


def test_a_frontend_that_is_away_is_waited_for_with_a_sign(tmp_path: Path) -> None:
    with recorded({}) as world:
        pass
    with Terminal(world, tmp_path, "backends", "install", "llama-cpp") as terminal:
        terminal.wait_for(f"waiting for {world.url} …")
        terminal.wait_for("cannot reach the frontend")
        assert terminal.exit_code() == 4


def test_a_terminal_that_cannot_show_bars_gets_lines_and_answers_in_what_it_can_show(tmp_path: Path) -> None:
    moving = operation("running", row("main", phase="downloading", current_bytes=MIB, total_bytes=4 * MIB))
    done = operation("succeeded", row("main", "success"))
    nodes = [{"id": "1", "name": "main", "status": "healthy", "platform": "größe"}]
    answers = {
        "POST /api/operations": Answer(moving, 202),
        EVENTS: Stream([("operation", moving), ("operation", done)]),
        "GET /api/nodes?limit=500": Answer(nodes),
    }
    with recorded(answers) as world:  # type: ignore[arg-type]
        with Terminal(world, tmp_path, "backends", "install", "llama-cpp", PYTHONIOENCODING="ascii") as terminal:
            assert terminal.exit_code() == 0
        with Terminal(world, tmp_path, "nodes", "list", PYTHONIOENCODING="ascii") as listed:
            assert listed.exit_code() == 0
    assert terminal.seen.splitlines()[-1] == "ok main: install llama-cpp"
    assert "\\u" not in terminal.seen
    assert "gr\\xf6\\xdfe" in listed.seen


@pytest.mark.parametrize("mark", ["\u200e", "\u200f", "\u061c", "\u202e", "\u2067", "\x1b", "\x9b", "\r"])
def test_marks_that_turn_a_line_around_are_left_out_like_escapes(mark: str) -> None:
    assert printable(f"desk{mark}top") == "desktop"
