"""What `replicas list` shows, and that its older name shows the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.recorded import Answer, recorded, run

REPLICAS = [
    {
        "model": "chat",
        "node_id": "id-1",
        "node_name": "attic",
        "slot": 0,
        "state": "ready",
        "backend": "llama-cpp",
        "revision": "0123456789abcdef",
        "outdated": "",
        "in_flight": 3,
        "age_seconds": 7300.0,
        "unused_seconds": 4.2,
        "memory_bytes": 5 * 1024**3,
        "something_new": 1,
    },
    {
        "model": "chat",
        "node_id": "id-2",
        "node_name": "cellar",
        "slot": 1,
        "state": "leaving",
        "backend": "llama-cpp",
        "revision": "fedcba9876543210",
        "outdated": "the model was changed",
        "age_seconds": 61.0,
        "unused_seconds": None,
        "memory_bytes": None,
    },
]
# As of a frontend that has started again: whether they were used before is not known.
SILENT = [{**one, "unused_seconds": None, "use_unknown": True} for one in REPLICAS]
ANSWERS = {"GET /api/replicas": Answer(REPLICAS)}
FIRST = ["chat", "attic", "0", "llama-cpp", "ready", "01234567", "3", "2h", "4s ago", "5.0 GiB"]
SECOND = ["chat", "cellar", "1", "llama-cpp", "leaving", "fedcba98 outdated", "0", "1m", "never", ""]


@pytest.mark.parametrize("words", [("replicas", "list"), ("models", "replicas")])
def test_each_replica_has_its_line_and_an_outdated_one_says_why(tmp_path: Path, words: tuple[str, ...]) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, *words)
    assert result.exit_code == 0, result.stderr
    assert [line.split("\t") for line in result.stdout.splitlines()] == [FIRST, SECOND]
    assert result.stderr.strip() == "chat#1 on cellar is to be replaced: the model was changed"


def test_a_use_that_is_not_known_is_not_called_none(tmp_path: Path) -> None:
    with recorded({"GET /api/replicas": Answer(SILENT)}) as world:
        result = run(world, tmp_path, "replicas", "list")
    assert [line.split("\t")[8] for line in result.stdout.splitlines()] == ["unknown", "unknown"]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (("--node", "attic"), [FIRST]),
        (("--node", "id-2"), [SECOND]),
        (("--model", "chat"), [FIRST, SECOND]),
        (("--model", "other"), []),
    ],
)
def test_a_model_and_a_node_select_replicas(tmp_path: Path, options: tuple[str, ...], found: list[list[str]]) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "replicas", "list", *options)
        selected = json.loads(run(world, tmp_path, "replicas", "list", *options, "--json").stdout)
    assert [line.split("\t") for line in result.stdout.splitlines()] == found
    assert [[one["model"], one["node_name"]] for one in selected] == [line[:2] for line in found]


def test_json_is_the_answer_as_it_came(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        assert json.loads(run(world, tmp_path, "replicas", "list", "--json").stdout) == REPLICAS
