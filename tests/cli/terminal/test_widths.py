"""Every list on a terminal of 80 and of 140 columns: no line is longer, and no word of a name is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.looked_at import ANSWERS, LISTS
from tests.cli.real_terminal import Terminal
from tests.cli.recorded import Answer, recorded
from tests.cli.test_main import ALL

from enginehouse.cli.terminal.output import UNBROKEN, _least_width


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_each_list_fits_the_terminal(tmp_path: Path, words: tuple[str, ...], columns: int) -> None:
    with recorded(ANSWERS) as world, Terminal(world, tmp_path, *words, columns=columns) as terminal:
        assert terminal.exit_code() == 0, terminal.seen
    lines = terminal.seen.replace("\r", "").splitlines()
    assert len(lines) > 1
    assert [line for line in lines if len(line.rstrip()) > columns] == []
    assert "Traceback" not in terminal.seen


def test_no_list_was_forgotten() -> None:
    # Those without a server are looked at where they are tested: their galleries are on this machine.
    here = {"gallery", "local", "service"}
    listing = {path for path in ALL if path and path[-1] in ("list", "ps", "status", "audit") and path[0] not in here}
    assert {path[:2] for path in LISTS} >= listing


def test_the_columns_that_are_needed_least_are_left_out_first(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        with Terminal(world, tmp_path, "backends", "list", columns=80) as terminal:
            assert terminal.exit_code() == 0
        with Terminal(world, tmp_path, "backends", "list", columns=140) as wide:
            assert wide.exit_code() == 0
    assert terminal.seen.split()[:4] == ["NAME", "NODE", "STATUS", "VERSION"]
    assert "DIGEST" not in terminal.seen
    assert "DIGEST" in wide.seen


def test_an_identifier_that_is_copied_keeps_its_width() -> None:
    assert _least_width(["ID", "ce9e1dcf-b219-41af-a308-a4377c9172c4"]) == 36
    assert _least_width(["NAME", "n" * 63]) == UNBROKEN


@pytest.mark.parametrize("words", [("gallery", "list", "--backend-galleries", "[]"), ("local", "list")], ids=" ".join)
def test_what_is_listed_without_a_server_fits_too(tmp_path: Path, words: tuple[str, ...]) -> None:
    with recorded({}) as world, Terminal(world, tmp_path, *words, columns=80) as terminal:
        assert terminal.exit_code() == 0, terminal.seen
    assert all(len(line) <= 80 for line in terminal.seen.replace("\r", "").splitlines())


def test_names_of_the_greatest_length_are_broken_rather_than_lines(tmp_path: Path) -> None:
    name = "n" * 63
    replica = {"model": "m" * 80, "node_id": "1", "node_name": name, "state": "ready", "backend": "b" * 60}
    with (
        recorded({"GET /api/replicas": Answer([replica])}) as world,
        Terminal(world, tmp_path, "replicas", "list", columns=80) as terminal,
    ):
        assert terminal.exit_code() == 0
    lines = terminal.seen.replace("\r", "").splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert sum(line.count("n") for line in lines) >= 63


def test_errors_and_remarks_are_wrapped_between_words(tmp_path: Path) -> None:
    with recorded({}) as world, Terminal(world, tmp_path, "logs", "a", "b", "c", columns=40) as terminal:
        assert terminal.exit_code() == 2
    lines = terminal.seen.replace("\r", "").splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 40 for line in lines)
