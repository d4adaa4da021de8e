"""The commands that look, against a real cluster: in a real terminal of 140 and 80 columns, and in a pipe."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.terminal.top.real import Town, running_town, screen
from tests.e2e.conftest import PROGRAM


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with running_town(tmp_path_factory.mktemp("town")) as made:
        yield made


def piped(town: Town, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**town.environment, **variables}
    return subprocess.run([PROGRAM, *words], env=environment, capture_output=True, text=True, timeout=60)


def without_columns(town: Town) -> dict[str, str]:
    return {name: value for name, value in town.environment.items() if name != "COLUMNS"}


@pytest.mark.parametrize("columns", [140, 80])
@pytest.mark.parametrize(
    ("words", "texts"),
    [
        ("status", ("1 of 1 node healthy", "Nothing needs you.", "● ")),
        ("ps", ("nothing runs",)),
        ("doctor", ("✓ nats", "answers", "✓ reach")),
        ("logs frontend -n 5", ("INFO",)),
        ("logs worker -n 5", ("worker.joined",)),
        ("nodes list", ("NAME", "STATUS", "healthy")),
    ],
)
def test_each_is_whole_on_a_terminal(town: Town, columns: int, words: str, texts: tuple[str, ...]) -> None:
    with screen(without_columns(town), columns, 40, words) as shown:
        text = shown.wait(words, "exit=", *texts)
    assert "Traceback" not in text
    if not words.startswith("logs"):  # a line of a log is not wrapped by us
        assert all(len(line) <= columns for line in text.splitlines())


def test_a_pipe_gets_whole_lines_and_no_escapes_and_a_dumb_terminal_neither(town: Town) -> None:
    for words in (("status",), ("doctor",), ("ps",), ("logs", "-n", "3"), ("nodes", "list")):
        for term in ("xterm-256color", "dumb"):
            result = piped(town, *words, TERM=term)
            assert result.returncode == 0, result.stderr
            assert "\x1b" not in result.stdout + result.stderr


def test_the_doctor_reaches_every_node_and_says_so_to_programs(town: Town) -> None:
    found = json.loads(piped(town, "doctor", "--json").stdout)
    assert found["needs_person"] is False
    assert {"disk", "kernel", "graphics", "server", "clock", "database", "nats", "node", "reach"} <= {
        one["area"] for one in found["findings"]
    }


def test_a_worker_keeps_its_log_for_whoever_runs_the_cluster_and_no_token_is_in_it(town: Town, tmp_path: Path) -> None:
    (worker,) = town.fleet.nodes()
    lines = piped(town, "logs", "worker", "--node", worker["name"], "--json").stdout.splitlines()
    assert any("worker.joined" in json.loads(line)["text"] for line in lines)
    text = piped(town, "logs", "frontend", "-n", "1000").stdout + "\n".join(lines)
    assert not any(token in text for token in town.fleet.tokens.values())


def test_a_server_is_logged_in_to_and_used_from_a_machine_without_any_data(town: Town, tmp_path: Path) -> None:
    laptop = {
        **{name: value for name, value in town.environment.items() if not name.startswith("ENGINEHOUSE_")},
        "HOME": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_DATA_HOME": str(tmp_path / "share"),
    }

    def run(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *words], env=laptop, input=stdin, capture_output=True, text=True, timeout=60)

    url, token = town.fleet.first.url, town.fleet.tokens["admin"]
    assert run("login", url, "--name", "home", stdin="wrong\n").returncode == 4
    done = run("login", url, "--name", "home", stdin=f"{token}\n")
    assert done.stdout == f"home: {url}, signed in as admin\n", done.stderr
    assert run("nodes", "list").stdout.split("\t")[1] == "healthy"
    assert run("--context", "local", "nodes", "list").returncode == 4
    assert run("logout").returncode == 0
    assert run("nodes", "list").returncode == 4
