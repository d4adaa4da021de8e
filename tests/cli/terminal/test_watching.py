"""`--watch`: redrawn in place on a terminal, appended in a pipe, woken by events, and patient with outages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.cli.real_terminal import Terminal
from tests.cli.recorded import WAIT_SECONDS, Answer, Reaction, Recorded, Stream, environment, recorded
from tests.cli.terminal.top.real import screen

ONE = [{"id": "1", "name": "attic", "approved": True, "health": "healthy", "status": "healthy"}]
TWO = [*ONE, {"id": "2", "name": "cellar", "approved": True, "health": "offline", "status": "offline"}]
NODES = "GET /api/nodes?limit=500"


class Piped:
    def __init__(self, world: Recorded, tmp_path: Path, *words: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "enginehouse", *words],
            env={**os.environ, **environment(world, tmp_path), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def lines(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().rstrip("\n") for _ in range(count)]

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=WAIT_SECONDS)
        return self.process.returncode, errors


def variables(world: Recorded, tmp_path: Path) -> dict[str, str]:
    shown = {**os.environ, **environment(world, tmp_path)}
    return {name: value for name, value in shown.items() if name not in ("COLUMNS", "TMUX", "NO_COLOR")}


def test_in_a_pipe_a_changed_list_is_appended_after_an_event_and_an_outage_is_said_once(tmp_path: Path) -> None:
    held = threading.Event()
    changed = Stream([("hello", {}), ("node", {})], held)
    answers: dict[str, Reaction | list[Reaction]] = {
        NODES: [Answer(ONE), Answer(ONE), Answer(TWO)],
        "GET /api/events": changed,
    }
    with recorded(answers) as world:
        piped = Piped(world, tmp_path, "nodes", "list", "--watch")
        try:
            first, empty, again, second = piped.lines(4)
            assert first.split("\t")[:2] == again.split("\t")[:2] == ["attic", "healthy"]
            assert (empty, second.split("\t")[:2]) == ("", ["cellar", "offline"])
            held.set()
            world.stop()
            assert piped.process.stderr is not None
            assert "cannot reach the frontend" in piped.process.stderr.readline()
        finally:
            held.set()
            code, errors = piped.end()
    assert code == 0
    assert "Traceback" not in errors
    assert "cannot reach" not in errors, "once"


@pytest.mark.parametrize("columns", [80, 140])
def test_on_a_terminal_the_list_is_redrawn_in_place_and_ctrl_c_leaves_the_last_one(
    tmp_path: Path, columns: int
) -> None:
    with (
        recorded({NODES: [Answer(ONE), Answer(ONE), Answer(TWO)]}) as world,
        screen(variables(world, tmp_path), columns, 20, "nodes list --watch") as shown,
    ):
        text = shown.wait("the first list", "attic")
        text = shown.wait("the second node", "cellar")
        assert (text.count("NAME"), text.count("attic")) == (1, 1)
        assert all(len(line) <= columns for line in text.splitlines())
        world.stop()
        text = shown.wait("the outage", "cannot reach the frontend")
        assert text.count("attic") == 1, "the last list stays"
        shown.keys("C-c")
        assert shown.wait("the end", "exit=0").count("attic") == 1


def test_a_list_that_is_longer_than_the_terminal_says_how_much_is_left_out(tmp_path: Path) -> None:
    many = [{**ONE[0], "id": str(number), "name": f"node-{number:03}"} for number in range(60)]
    with (
        recorded({NODES: Answer(many)}) as world,
        screen(variables(world, tmp_path), 80, 12, "nodes list -w") as shown,
    ):
        text = shown.wait("the list", "more lines")
        assert "… and 51 more lines" in text
        assert "node-000" in text


def test_a_dumb_terminal_gets_plain_lists_one_after_the_other(tmp_path: Path) -> None:
    with (
        recorded({NODES: [Answer(ONE), Answer(TWO)]}) as world,
        Terminal(world, tmp_path, "nodes", "list", "-w", columns=80, TERM="dumb") as terminal,
    ):
        terminal.wait_for("attic")
        terminal.wait_for("cellar")
        terminal.interrupt()
        assert terminal.exit_code() == 0
    assert "\x1b" not in terminal.raw
    assert terminal.seen.count("attic") >= 2


def test_the_first_error_ends_it_like_a_list_that_is_shown_once(tmp_path: Path) -> None:
    with recorded({}) as world:
        pass
    piped = Piped(world, tmp_path, "ps", "-w")
    _, errors = piped.process.communicate(timeout=WAIT_SECONDS)
    assert (piped.process.returncode, "cannot reach the frontend" in errors) == (4, True)
