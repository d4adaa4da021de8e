"""Upgrading everything, and plans: what is asked for in which order, and what is said of it."""

from __future__ import annotations

from pathlib import Path

from tests.cli.recorded import JOB, Answer, Reaction, Request, operation, recorded, refused, row, run

CHECK = "POST /backends/upgrades/check"
REQUEST = "POST /api/operations"
OTHER = JOB.replace("3f2a9c1d", "3f2b0000")
FOUND = Answer({name: {"nodes": [{"node_id": "1", "node_name": "main"}]} for name in ("first", "second")})


def upgrade(status: str, job: str = JOB, **fields: object) -> Answer:
    word = {"succeeded": "success", "failed": "error"}.get(status, status)
    return Answer(operation(status, row("main", word), jobID=job, kind="upgrade", **fields), 202)


def test_everything_is_asked_for_before_anything_is_watched(tmp_path: Path) -> None:
    first = upgrade("queued")
    answers: dict[str, Reaction | list[Reaction]] = {
        CHECK: FOUND,
        REQUEST: [first, upgrade("succeeded", OTHER)],
        f"GET /api/operations/{JOB}": Answer(upgrade("succeeded").body),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "backends", "upgrade", "--all")
    assert result.exit_code == 0, result.stderr
    asked = [(one.method, one.path.partition("?")[0]) for one in world.requests]
    assert asked[:3] == [("POST", "/backends/upgrades/check"), ("POST", "/api/operations"), ("POST", "/api/operations")]
    assert [body["name"] for body in world.bodies("/api/operations")] == ["first", "second"]


def test_what_is_refused_of_one_leaves_no_other_behind(tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        if request.body["name"] == "first":
            return refused(404, "cannot upgrade first: no node has it", "not_found")
        return upgrade("succeeded")

    with recorded({CHECK: FOUND, REQUEST: answer}) as world:
        result = run(world, tmp_path, "backends", "upgrade", "--all")
    assert result.exit_code == 3
    assert "cannot upgrade first: no node has it" in result.stderr
    assert result.stdout == "✓ main: install llama-cpp\n"


def test_what_nobody_knows_is_called_so(tmp_path: Path) -> None:
    upgrade = {"node_id": "1", "node_name": "main", "unknown": True, "available_digest": "sha256:abc"}
    with recorded({CHECK: Answer({"first": {"nodes": [upgrade]}})}) as world:
        result = run(world, tmp_path, "backends", "upgrades")
    assert result.stdout == "first\tmain\tunknown\tabc\n"
    drift = [{"node_name": "main", "unknown": True}, {"node_name": "attic"}]
    with recorded({"GET /backends": Answer([{"Name": "first", "nodes": [], "drift": drift}])}) as world:
        result = run(world, tmp_path, "backends", "list")
    assert result.stderr.splitlines()[-2:] == [
        "first differs on attic",
        "first: version unknown on main, because no digest is recorded there",
    ]


def test_all_backends_on_one_node_is_not_understood_as_something_else(tmp_path: Path) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "backends", "upgrade", "--all", "--node", "main")
    assert result.exit_code == 2
    assert "a name; --all means every node" in result.stderr
    assert world.requests == []


def test_what_is_to_be_said_of_several_nodes_of_a_plan_is_said_once(tmp_path: Path) -> None:
    rows = [{"node_name": name, "does": "install", "note": "it could not be asked"} for name in ("a", "b")]
    with recorded({"POST /api/operations/plan": Answer({"nodes": [*rows, {"node_name": "c"}]})}) as world:
        result = run(world, tmp_path, "backends", "plan", "llama-cpp")
    assert result.stderr.splitlines() == ["a, b: it could not be asked"]


def test_of_two_entries_with_one_name_the_second_is_shown_with_its_gallery(tmp_path: Path) -> None:
    offered = [{"name": "engine", "gallery": {"name": gallery, "url": "x"}} for gallery in ("one", "two")]
    older = [{"name": "engine", "gallery": gallery} for gallery in ("one", "two")]
    for answer in (offered, older):
        with recorded({"GET /backends/available": Answer(answer)}) as world:
            lines = run(world, tmp_path, "backends", "available").stdout.splitlines()
        assert [line.split("\t")[0] for line in lines] == ["engine", "two@engine"]
