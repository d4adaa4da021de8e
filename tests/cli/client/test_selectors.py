"""`--selector KEY=VALUE` beside `--node`: which nodes are asked for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.recorded import JOB, Answer, Recorded, operation, recorded, row, run


def node(name: str, **labels: str) -> dict[str, object]:
    return {"id": f"id-of-{name}", "name": name, "approved": True, "health": "healthy", "labels": labels}


NODES = [
    node("a", zone="home", gpu="big"),
    node("b", zone="home"),
    node("c", zone="work"),
    {**node("pending", zone="home"), "approved": False},
]
DONE = operation("succeeded", row("a", "success"), row("b", "success"))
ANSWERS = {
    "GET /api/nodes?limit=500": Answer(NODES),
    "POST /api/operations": Answer(DONE, 202),
    "POST /api/operations/plan": Answer({"nodes": []}),
    f"GET /api/operations/{JOB}": Answer(operation("failed", row("a", "error"), row("c", "error"))),
    f"POST /api/operations/{JOB}/cancel": Answer({"operation": DONE}),
    f"POST /api/operations/{JOB}/retry": Answer(DONE, 202),
    "GET /api/replicas": Answer([{"model": "m", "node_id": "id-of-b", "node_name": "b", "state": "ready"}]),
    "POST /api/models/m/load": Answer({"ready": True}),
    "POST /api/models/m/unload": Answer(DONE, 202),
    "GET /api/models/m/explain": Answer(
        {
            **{"model": "m", "needs_bytes": 1, "needs_from": "x", "replicas": 0, "wanted": 1, "chosen": "c"},
            **{"stops": [], "last_failure": "", "retry_in_seconds": None},
            "nodes": [{"node_name": "a", "fits": False}, {"node_name": "b", "fits": True}],
        }
    ),
}


def asked(world: Recorded, path: str) -> object:
    return world.bodies(path)[-1]


@pytest.mark.parametrize("kind", ["install", "upgrade", "rollback", "delete"])
def test_operations_are_for_the_approved_nodes_with_all_of_the_labels(tmp_path: Path, kind: str) -> None:
    with recorded(ANSWERS) as world:
        assert run(world, tmp_path, "backends", kind, "x", "--selector", "zone=home").exit_code == 0
        assert asked(world, "/api/operations") == {"kind": kind, "name": "x", "nodes": ["id-of-a", "id-of-b"]}
        run(world, tmp_path, "backends", kind, "x", "--selector", "zone=home", "--selector", "gpu=big")
        assert asked(world, "/api/operations") == {"kind": kind, "name": "x", "nodes": ["id-of-a"]}
        run(world, tmp_path, "backends", kind, "x", "--selector", "zone=home,gpu=big", "--node", "c")
        assert asked(world, "/api/operations") == {"kind": kind, "name": "x", "nodes": ["c", "id-of-a"]}


def test_lists_plans_and_single_nodes_take_it_too(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        listed = run(world, tmp_path, "nodes", "list", "--selector", "zone=work").stdout.splitlines()
        assert [line.split("\t")[0] for line in listed] == ["c"]
        run(world, tmp_path, "backends", "plan", "x", "--selector", "zone=work")
        assert asked(world, "/api/operations/plan") == {"kind": "install", "name": "x", "nodes": ["id-of-c"]}
        assert run(world, tmp_path, "replicas", "list", "--selector", "zone=work").stdout == ""
        assert run(world, tmp_path, "replicas", "list", "--selector", "zone=home").stdout.startswith("m\tb\t")
        run(world, tmp_path, "ops", "cancel", JOB, "--selector", "zone=home")
        assert world.bodies(f"/api/operations/{JOB}/cancel") == [{"node": "id-of-a"}]
        run(world, tmp_path, "ops", "retry", JOB, "--selector", "zone=work")
        assert world.bodies(f"/api/operations/{JOB}/retry") == [{"node": "id-of-c"}]
        run(world, tmp_path, "models", "unload", "m", "--selector", "zone=home")
        assert world.bodies("/api/models/m/unload") == [{"node": "id-of-b"}]


def test_a_load_goes_to_the_best_of_these_nodes(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        run(world, tmp_path, "models", "load", "m", "--selector", "zone=home")
        assert asked(world, "/api/models/m/load") == {"node": "id-of-b"}, "a has no room"
        run(world, tmp_path, "models", "load", "m", "--selector", "zone=work")
        assert asked(world, "/api/models/m/load") == {"node": "id-of-c"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--selector", "zone=moon"), 5, "no approved node has the label zone=moon"),
        (("--selector", "zone"), 2, "write KEY=VALUE"),
        (("--selector", "zone=home", "--selector", "zone=work"), 2, "no node has both"),
        (("--selector", "zone=home", "--all"), 2, "--all and --selector exclude each other"),
        (("--selector", "../x=1"), 2, "label"),
    ],
)
def test_what_selects_nothing_or_cannot_be_is_refused(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "backends", "delete", "x", *words)
        assert (result.exit_code, said in result.stderr) == (code, True), result.stderr
        assert world.bodies("/api/operations") == []
