"""`enginehouse completion`: what a shell offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.recorded import JOB, WAIT_SECONDS, Answer, Recorded, environment, operation, recorded

from enginehouse.cli.options.live_names import kind_of

NODES = Answer([{"id": "1", "name": "attic"}, {"id": "2", "name": "box"}])
MODELS = Answer([{"name": "tiny-chat"}, {"name": "smollm2"}])
# What bash does with the script when somebody presses Tab, without a terminal.
PRESS_TAB = """
eval "$("$ENGINEHOUSE" completion bash)"
COMP_WORDS=($TYPED) COMP_CWORD=$PLACE
_enginehouse_completion "$ENGINEHOUSE"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(world: Recorded, tmp_path: Path, *words: str, variables: dict[str, str] | None = None) -> set[str]:
    """What bash offers for the last of the words."""
    program = tmp_path / "enginehouse"
    if not program.exists():
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m enginehouse "$@"\n')
        program.chmod(0o755)
    typed = " ".join(("enginehouse", *(word or "''" for word in words)))
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB],
        env={
            **environment(world, tmp_path),
            "PATH": os.environ["PATH"],
            "ENGINEHOUSE": str(program),
            "TYPED": typed,
            "PLACE": str(len(words)),
            **(variables or {}),
        },
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_the_names_that_the_server_has(tmp_path: Path) -> None:
    answers = {"GET /api/nodes": NODES, "GET /api/models": MODELS, "GET /backends": Answer([{"Name": "llama-cpp"}])}
    with recorded(answers) as world:
        assert offered(world, tmp_path, "no") == {"nodes"}
        assert offered(world, tmp_path, "nodes", "dr") == {"drain"}
        assert "--model" in offered(world, tmp_path, "replicas", "list", "--m")
        assert offered(world, tmp_path, "nodes", "drain", "a") == {"attic"}
        assert offered(world, tmp_path, "models", "load", "t") == {"tiny-chat"}
        assert offered(world, tmp_path, "models", "load", "tiny-chat", "--node", "b") == {"box"}
        assert offered(world, tmp_path, "run", "s") == {"smollm2"}
        assert offered(world, tmp_path, "backends", "rollback", "l") == {"llama-cpp"}
        assert offered(world, tmp_path, "logs", "t") == {"tiny-chat"}
        assert offered(world, tmp_path, "logs", "f") == {"frontend"}
        assert offered(world, tmp_path, "contexts", "use", "l") == {"local"}


def test_operations_are_completed_by_id(tmp_path: Path) -> None:
    page = Answer({"operations": [operation("running")], "next": ""})
    with recorded({"GET /api/operations?rows=false&limit=50": page}) as world:
        assert offered(world, tmp_path, "ops", "cancel", JOB[:4]) == {JOB}


def test_without_a_server_there_are_no_names_and_no_words(tmp_path: Path) -> None:
    with recorded({}) as world:
        gone = {"ENGINEHOUSE_URL": "http://127.0.0.1:9"}
        assert offered(world, tmp_path, "nodes", "drain", "a", variables=gone) == set()
        assert offered(world, tmp_path, "nodes", "drain", "a", variables={"ENGINEHOUSE_URL": "nonsense"}) == set()
        assert offered(world, tmp_path, "nodes", "drain", "a") == set()  # a server that refuses


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script_of_their_own_and_the_same_names(tmp_path: Path, shell: str) -> None:
    with recorded({"GET /api/nodes": NODES}) as world:

        def ask(*arguments: str, **variables: str) -> str:
            return subprocess.run(
                [sys.executable, "-m", "enginehouse", *arguments],
                env={**environment(world, tmp_path), **variables},
                capture_output=True,
                text=True,
                timeout=WAIT_SECONDS,
                check=False,
            ).stdout

        assert f"_ENGINEHOUSE_COMPLETE={shell}_complete" in ask("completion", shell)
        words = {"zsh": ("enginehouse nodes drain a", "3"), "fish": ("enginehouse nodes drain a", "a")}[shell]
        given = {"COMP_WORDS": words[0], "COMP_CWORD": words[1], "_ENGINEHOUSE_COMPLETE": f"{shell}_complete"}
        assert "attic" in ask(**given)


@pytest.mark.parametrize(
    ("path", "parameter", "kind"),
    [
        ("enginehouse local install", "backend", ""),
        ("enginehouse models add", "name", ""),
        ("enginehouse models copy", "new_name", ""),
        ("enginehouse backends install", "name", "available"),
        ("enginehouse backends upgrade", "name", "installed"),
    ],
)
def test_a_parameter_is_completed_with_what_it_names(path: str, parameter: str, kind: str) -> None:
    assert kind_of(path, parameter) == kind
