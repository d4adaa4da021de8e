"""What the command line refuses, and how it passes on what the frontend refuses: one sentence and an exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.cli.recorded import Answer, recorded, refused, run

from enginehouse.cli.main import program


@pytest.mark.parametrize(
    "arguments",
    [
        ("backends", "delete", "llama-cpp"),
        ("backends", "install", "llama-cpp", "--all", "--node", "a"),
        ("backends", "install"),
        ("nodes", "approve"),
        ("ops", "list", "--limit", "0"),
        ("tokens", "create", "--role", "king"),
        ("nodes", "list", "--nonsense"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_two(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, *arguments)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("enginehouse: ")
    assert world.requests == []


@pytest.mark.parametrize("name", ["*", ">", "a/b", "a b", "x" * 300, "..", ".x", "a\nb", ""])
@pytest.mark.parametrize(
    "command",
    [
        ("nodes", "show"),
        ("nodes", "approve"),
        ("backends", "install"),
        ("backends", "install", "llama-cpp", "--node"),
        ("models", "load", "tiny-chat", "--node"),
    ],
)
def test_a_bad_name_is_refused_before_anything_is_sent(tmp_path: Path, command: tuple[str, ...], name: str) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, *command, name)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert world.requests == []


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, 4), (403, 4), (404, 5), (409, 1), (422, 2), (400, 2), (413, 2), (500, 4), (502, 4), (503, 4)],
)
def test_a_refusal_of_the_frontend_is_its_sentence_and_the_exit_code_of_its_class(
    tmp_path: Path, status: int, code: int
) -> None:
    with recorded({"GET /api/nodes?limit=500": refused(status, "cannot do this: because", "x")}) as world:
        result = run(world, tmp_path, "nodes", "list")
    assert result.exit_code == code
    hint = "; give one with --token @FILE, --token - or ENGINEHOUSE_TOKEN" if status == 401 else ""
    assert result.stderr == f"enginehouse: cannot do this: because{hint}\n"
    assert result.stdout == ""


def test_a_frontend_that_is_not_there_is_one_sentence_and_exit_code_four(tmp_path: Path) -> None:
    with recorded({}) as world:
        pass
    result = run(world, tmp_path, "nodes", "list")
    assert result.exit_code == 4
    assert result.stderr.startswith(f"enginehouse: cannot reach the frontend at {world.url}")


@pytest.mark.parametrize("answer", [Answer(b"<html>"), Answer({"not": "a list"}), Answer([{"no": "name"}])])
def test_an_answer_that_cannot_be_read_is_one_sentence(tmp_path: Path, answer: Answer) -> None:
    with recorded({"GET /api/nodes?limit=500": answer}) as world:
        result = run(world, tmp_path, "nodes", "list")
    assert result.exit_code == 4
    assert result.stderr.startswith("enginehouse: cannot read the answer")


def test_what_a_node_says_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = {"id": "1", "name": "main", "platform": "\x1b[2Jlinux\r\n\tx\u202e\x9b"}
    with recorded({"GET /api/nodes?limit=500": Answer([evil])}) as world:
        result = run(world, tmp_path, "nodes", "list")
    assert "\x1b" not in result.stdout
    assert len(result.stdout.splitlines()) == 1
    assert len(result.stdout.split("\t")) == 10


def test_joining_without_a_token_says_how_to_get_one(tmp_path: Path) -> None:
    arguments = ["join", "http://127.0.0.1:1", "--data", str(tmp_path)]
    result = CliRunner().invoke(program, arguments, env={"ENGINEHOUSE_TOKEN": ""})
    assert result.exit_code == 2
    assert "enginehouse tokens create --role join" in result.stderr


def test_on_a_machine_that_has_joined_the_way_to_its_server_is_said(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"id": "x", "name": "attic"}')
    result = CliRunner().invoke(program, ["nodes", "list", "--data", str(tmp_path)])
    assert result.exit_code == 4
    assert "this machine is a node" in result.stderr
    assert "enginehouse login URL" in result.stderr


def not_found(noun: str, name: str, param: str) -> Answer:
    error = {"message": f"cannot find a {noun} named {name!r}", "code": "not_found", "param": param}
    return Answer({"error": error}, 404)


def test_an_unknown_name_brings_up_the_nearest_that_the_server_has(tmp_path: Path) -> None:
    answers = {
        "GET /api/nodes": Answer([{"id": "1", "name": "attic"}, {"id": "2", "name": "box"}]),
        "GET /api/nodes/atic": not_found("node", "atic", "node"),
        "GET /api/nodes/zzz": not_found("node", "zzz", "node"),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "nodes", "show", "atic", "--json")
        other = run(world, tmp_path, "nodes", "show", "zzz")
    assert result.exit_code == 5
    assert result.stderr == "enginehouse: cannot find a node named 'atic'. Did you mean 'attic'?\n"
    assert json.loads(result.stdout)["error"]["message"].endswith("Did you mean 'attic'?")
    assert other.stderr == "enginehouse: cannot find a node named 'zzz'\n"


@pytest.mark.parametrize("command", [("ps",), ("replicas", "list")])
def test_a_list_of_a_node_that_does_not_exist_is_not_an_empty_list(tmp_path: Path, command: tuple[str, ...]) -> None:
    answers = {
        "GET /api/nodes?limit=500": Answer([]),
        "GET /api/replicas": Answer([]),
        "GET /api/operations": Answer({"operations": [], "next": ""}),
        "GET /api/nodes/atic": not_found("node", "atic", "node"),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, *command, "--node", "atic")
    assert result.exit_code == 5
    assert result.stdout == ""
