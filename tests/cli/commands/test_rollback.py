"""What `backends rollback` asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.recorded import Answer, operation, recorded, row, run


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (("--node", "attic", "--node", "cellar"), {"nodes": ["attic", "cellar"]}),
        (("--all", "--max-parallel", "2"), {"max_parallel": 2}),
    ],
)
def test_a_rollback_is_an_operation_on_the_selected_nodes(
    tmp_path: Path, options: tuple[str, ...], body: dict[str, object]
) -> None:
    done = operation("succeeded", row("attic", "success", action="return llama-cpp to 1"), kind="rollback")
    with recorded({"POST /api/operations": Answer(done, 202)}) as world:
        result = run(world, tmp_path, "backends", "rollback", "llama-cpp", *options)
    assert (result.exit_code, result.stdout.splitlines()) == (0, ["✓ attic: return llama-cpp to 1"])
    assert world.bodies("/api/operations") == [{"kind": "rollback", "name": "llama-cpp", **body}]


def test_a_rollback_without_nodes_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "backends", "rollback", "llama-cpp")
    assert (result.exit_code, world.requests) == (2, [])
