"""Logging in to servers: what is stored, for whom it is readable, and what is refused without a change."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.cli.real_terminal import Terminal
from tests.cli.recorded import Answer, Recorded, recorded, refused

from enginehouse.cli.main import program

ADMIN = {"GET /api/session": Answer({"name": "admin", "role": "admin"}), "GET /api/models": Answer([])}


def run(tmp_path: Path, *arguments: str, stdin: str | None = None, **environ: str) -> Result:
    clean = {name: "" for name in ("ENGINEHOUSE_URL", "ENGINEHOUSE_TOKEN", "ENGINEHOUSE_DATA", "ENGINEHOUSE_CONTEXT")}
    home = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_DATA_HOME": str(tmp_path / "data"), "COLUMNS": "120"}
    return CliRunner().invoke(program, list(arguments), input=stdin, env={**clean, **home, **environ})


def stored(tmp_path: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tmp_path / "config" / "enginehouse" / "contexts.json").read_text())
    return found


def sent_token(world: Recorded) -> str:
    return world.requests[-1].headers["Authorization"]


def test_a_token_from_stdin_is_checked_stored_for_its_owner_and_used(tmp_path: Path) -> None:
    with recorded(ADMIN) as world:
        result = run(tmp_path, "login", world.url, "--name", "home", stdin="the-token\n")
        assert (result.exit_code, result.stdout) == (0, f"home: {world.url}, signed in as admin\n")
        assert sent_token(world) == "Bearer the-token"
        path = tmp_path / "config" / "enginehouse" / "contexts.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert run(tmp_path, "models", "list").exit_code == 0
        assert sent_token(world) == "Bearer the-token"
        listed = run(tmp_path, "contexts", "list")
        assert "the-token" not in listed.stdout + listed.stderr + result.stdout + result.stderr
        assert f"home\tcurrent\t{world.url}" in listed.stdout


def test_a_wrong_token_or_a_server_that_is_away_stores_nothing(tmp_path: Path) -> None:
    wrong = {"GET /api/session": refused(401, "cannot accept this token", "unauthenticated")}
    with recorded(wrong) as world:
        assert run(tmp_path, "login", world.url, stdin="wrong\n").exit_code == 4
    away = run(tmp_path, "login", world.url, stdin="any\n")
    assert (away.exit_code, "cannot reach" in away.stderr) == (4, True)
    assert run(tmp_path, "login", "http://h", stdin="").exit_code == 4 or not (tmp_path / "config").exists()
    assert not (tmp_path / "config").exists()


def test_a_token_that_may_only_use_models_is_accepted_as_such(tmp_path: Path) -> None:
    answers = {
        "GET /api/session": refused(403, "cannot do this with the role `user`", "forbidden"),
        "GET /version": Answer({"version": "1"}),
    }
    with recorded(answers) as world:
        result = run(tmp_path, "login", world.url, "--name", "home", stdin="t\n")
    assert result.stdout == f"home: {world.url}, signed in as user\n"


def test_a_terminal_is_asked_and_shows_nothing_of_the_token(tmp_path: Path) -> None:
    config = str(tmp_path / "config")
    words = ("login", "URL", "--name", "home")
    with (
        recorded(ADMIN) as world,
        Terminal(
            world,
            tmp_path,
            *(world.url if word == "URL" else word for word in words),
            XDG_CONFIG_HOME=config,
            ENGINEHOUSE_URL="",
            ENGINEHOUSE_TOKEN="",
        ) as terminal,
    ):
        terminal.wait_for("token for")
        terminal.type("typed-token\n")
        terminal.wait_for("signed in as admin")
        assert terminal.exit_code() == 0
        assert "typed-token" not in terminal.raw
    assert sent_token(world) == "Bearer typed-token"


def test_contexts_are_chosen_for_one_command_for_good_and_forgotten(tmp_path: Path) -> None:
    with recorded(ADMIN) as one, recorded(ADMIN) as two:
        run(tmp_path, "login", one.url, "--name", "one", stdin="of-one\n")
        run(tmp_path, "login", two.url, "--name", "two", "--no-use", stdin="of-two\n")
        assert stored(tmp_path)["current"] == "one"
        run(tmp_path, "--context", "two", "models", "list")
        assert sent_token(two) == "Bearer of-two"
        run(tmp_path, "models", "list", ENGINEHOUSE_CONTEXT="two")
        assert len(two.requests) == 3
        assert run(tmp_path, "contexts", "use", "two").stdout == "context: one → two\n"
        assert run(tmp_path, "contexts", "use", "two").stdout == "= two is already the current context\n"
        assert run(tmp_path, "logout").exit_code == 0
        assert stored(tmp_path) == {"current": "", "contexts": {"one": {"url": one.url, "token": "of-one"}}}
        assert run(tmp_path, "contexts", "remove", "one").exit_code == 0
        assert run(tmp_path, "contexts", "remove", "one").exit_code == 5
        assert run(tmp_path, "logout").exit_code == 2


@pytest.mark.parametrize("name", ["local", "../x", ""])
def test_a_name_that_cannot_be_one_is_refused_before_anything_is_asked(tmp_path: Path, name: str) -> None:
    with recorded(ADMIN) as world:
        assert run(tmp_path, "login", world.url, "--name", name, stdin="t\n").exit_code == 2
        assert world.requests == []
