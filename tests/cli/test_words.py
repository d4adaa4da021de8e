"""Commands by other names, hints for wrong ones, and errors for programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.recorded import Answer, recorded, refused, run

from enginehouse.cli.main import program


def told(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(program, [*arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("node", "ls"), "nodes list"),
        (("backend", "rm"), "backends delete"),
        (("nodes", "rm"), "nodes remove"),
        (("token", "rm"), "tokens revoke"),
        (("model", "rm"), "models delete"),
        (("operations", "ls"), "ops list"),
    ],
)
def test_a_short_form_is_the_command_it_stands_for(typed: tuple[str, ...], meant: str) -> None:
    code, help_text, _ = told(*typed, "--help")
    assert (code, help_text.splitlines()[0].startswith(f"Usage: enginehouse {meant} ")) == (0, True)


def test_a_group_without_the_command_does_not_have_its_short_form() -> None:
    code, _, said = told("ops", "rm", "3f2a")
    assert (code, "there is no command 'rm'" in said) == (2, True)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (("nods", "list"), "`enginehouse nodes`"),
        (("nodes", "aprove", "x"), "`enginehouse nodes approve`"),
        (("models", "lod"), "`enginehouse models load`"),
        (("pull", "llama3"), "`enginehouse models install`"),
        (("serve",), "`enginehouse up`"),
        (("ls",), "`enginehouse models list`"),
    ],
)
def test_a_wrong_command_is_answered_with_the_one_that_may_be_meant(typed: tuple[str, ...], hint: str) -> None:
    code, out, said = told(*typed)
    assert (code, out) == (2, "")
    assert f"Did you mean {hint}" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("group", ["keys", "tokens"])
def test_a_name_without_its_flag_is_answered_with_the_flag(group: str) -> None:
    code, said, error = told(group, "create", "my app")
    assert (code, said) == (2, "")
    assert f"a name is given with --name: enginehouse {group} create --name 'my app'" in " ".join(error.split())
    assert "--name" not in told(group, "create", "one", "--name", "two")[2], "it is given"
    assert "--name" not in told(group, "list", "one")[2], "there is none"


def test_a_word_like_no_command_gets_no_guess() -> None:
    assert told("zzz")[2] == "enginehouse: there is no command 'zzz' (see `enginehouse --help`)\n"


def test_an_error_is_an_object_for_programs_and_a_sentence_for_people(tmp_path: Path) -> None:
    refusal = refused(404, "cannot find a node named 'x'", "not_found")
    with recorded({"GET /api/nodes/x": refusal}) as world:
        result = run(world, tmp_path, "nodes", "show", "x", "--json")
        plain = run(world, tmp_path, "nodes", "show", "x")
    error = json.loads(result.stdout)["error"]
    assert (error["message"], error["code"], error["exit_code"]) == ("cannot find a node named 'x'", "not_found", 5)
    assert result.exit_code == 5
    assert result.stderr == plain.stderr == "enginehouse: cannot find a node named 'x'\n"
    assert plain.stdout == ""


@pytest.mark.parametrize(
    "typed", [("nodes", "list", "--nope", "--json"), ("nodes", "show", "--json"), ("nods", "--json")]
)
def test_a_mistyped_command_is_an_object_too(typed: tuple[str, ...]) -> None:
    code, out, said = told(*typed)
    error = json.loads(out)["error"]
    assert (code, error["code"], error["exit_code"]) == (2, "invalid_usage", 2)
    assert said == f"enginehouse: {error['message']}\n"


def test_an_answer_is_not_an_error(tmp_path: Path) -> None:
    with recorded({"GET /api/tokens": Answer([])}) as world:
        result = run(world, tmp_path, "tokens", "list", "--json")
    assert (result.exit_code, json.loads(result.stdout)) == (0, [])
