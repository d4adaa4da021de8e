"""Nodes by several names at once, with their keys, and what wants `--force`."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from tests.cli.recorded import JOB, Answer, operation, recorded, refused, row, run

from enginehouse.core.fingerprint import fingerprint_of

NODE: dict[str, Any] = {"id": "id-1", "name": "attic", "status": "pending", "approved": False}
REAL, OTHER = "3f2a-91bc-07de-55a1", "0000-1111-2222-3333"
PENDING = [{**NODE, "fingerprint": OTHER}, {**NODE, "id": "id-2", "fingerprint": REAL}]


def asked(world: Any) -> list[str]:
    return [f"{one.method} {one.path}" for one in world.requests]


def test_an_approval_with_a_fingerprint_chooses_the_machine_that_has_it(tmp_path: Path) -> None:
    answers = {
        "GET /api/nodes?name=attic": Answer(PENDING),
        "POST /api/nodes/id-2/approve": Answer({**NODE, "id": "id-2", "status": "healthy"}),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "nodes", "approve", "attic", "--fingerprint", "3F2A 91bc:07de-55a1")
    assert (result.exit_code, result.stdout) == (0, "approved attic; it has joined\n")
    assert world.bodies("/api/nodes/id-2/approve") == [{"fingerprint": "3F2A 91bc:07de-55a1"}]


def test_another_key_is_refused_before_anything_is_asked_of_a_frontend_that_would_not_compare(tmp_path: Path) -> None:
    for wrong in ("3f2a-91bc-07de-55a2", "3f2a", "attic"):
        with recorded({"GET /api/nodes?name=attic": Answer(PENDING)}) as world:
            result = run(world, tmp_path, "nodes", "approve", "attic", "--fingerprint", wrong)
        assert result.exit_code == 1
        assert f"its key is {OTHER}, {REAL}, not {wrong}" in result.stderr
        assert asked(world) == ["GET /api/nodes?name=attic"]
    with recorded({}) as world:
        both = run(world, tmp_path, "nodes", "approve", "attic", "cellar", "--fingerprint", REAL)
    assert (both.exit_code, world.requests) == (2, [])


def test_several_names_are_one_request_each(tmp_path: Path) -> None:
    answers: dict[str, Any] = {}
    for name in ("attic", "cellar"):
        answers[f"GET /api/nodes/{name}"] = Answer({**NODE, "name": name, "drained": True})
        answers[f"POST /api/nodes/{name}/approve"] = Answer({**NODE, "name": name})
        answers[f"POST /api/nodes/{name}/resume"] = Answer({"message": "node resumed"})
        answers[f"DELETE /api/nodes/{name}"] = Answer({"message": "node deregistered"})
        answers[f"DELETE /api/nodes/{name}?force=true"] = Answer({"message": "node deregistered"})
        answers[f"POST /api/nodes/{name}/reject"] = Answer({"message": "node rejected"})
    with recorded(answers) as world:
        for words, said in (
            (("approve", "--no-wait"), "approved"),
            (("resume",), "resumed"),
            (("remove",), "removed"),
            (("remove", "--force"), "removed"),
            (("reject",), "rejected"),
        ):
            result = run(world, tmp_path, "nodes", *words, "attic", "cellar")
            assert result.stdout == f"{said} attic\n{said} cellar\n", words
    assert sorted(set(asked(world))) == sorted(answers)
    assert len([one for one in asked(world) if not one.startswith("GET")]) == 10


@pytest.mark.parametrize("verb", ["approve", "reject", "drain", "resume", "remove"])
def test_an_unknown_name_among_several_changes_none_of_them(tmp_path: Path, verb: str) -> None:
    answers = {"GET /api/nodes/attic": Answer(NODE), "GET /api/nodes/atic": refused(404, "cannot find it", "not_found")}
    with recorded(answers) as world:
        result = run(world, tmp_path, "nodes", verb, "attic", "atic")
    assert result.exit_code == 5
    assert {one.partition(" ")[0] for one in asked(world)} == {"GET"}


def test_one_that_is_refused_leaves_none_of_the_others_out(tmp_path: Path) -> None:
    answers: dict[str, Any] = {f"GET /api/nodes/{name}": Answer(NODE) for name in ("attic", "cellar", "box")}
    for name in ("attic", "cellar"):
        answers[f"DELETE /api/nodes/{name}"] = refused(409, f"cannot remove {name}: it is healthy", "node_healthy")
    answers["DELETE /api/nodes/box"] = Answer({"message": "node deregistered"})
    with recorded(answers) as world:
        result = run(world, tmp_path, "nodes", "remove", "attic", "box", "cellar")
    assert (result.exit_code, result.stdout) == (1, "removed box\n")
    assert result.stderr == (
        "enginehouse: cannot remove attic: it is healthy\nenginehouse: cannot remove cellar: it is healthy\n"
    )


def test_several_answers_are_one_document(tmp_path: Path) -> None:
    answers: dict[str, Any] = {f"GET /api/nodes/{name}": Answer({**NODE, "name": name}) for name in ("attic", "box")}
    answers |= {
        f"POST /api/nodes/{name}/{verb}": Answer({**NODE, "name": name})
        for name in ("attic", "box")
        for verb in ("resume", "approve")
    }
    with recorded(answers) as world:
        for words in (("resume",), ("approve", "--no-wait")):
            both = json.loads(run(world, tmp_path, "nodes", *words, "attic", "box", "--json").stdout)
            one = json.loads(run(world, tmp_path, "nodes", *words, "box", "--json").stdout)
            assert ([each["name"] for each in both], one["name"]) == (["attic", "box"], "box")


def test_what_changes_nothing_looks_like_it(tmp_path: Path) -> None:
    answers = {
        "GET /api/nodes/attic": Answer({**NODE, "drained": False}),
        "POST /api/nodes/attic/resume": Answer({"message": "node resumed"}),
        "GET /api/nodes/attic/labels": Answer({"zone": "home"}),
        "PATCH /api/nodes/attic/labels": Answer({"zone": "home"}),
    }
    with recorded(answers) as world:
        resumed = run(world, tmp_path, "nodes", "resume", "attic")
        labelled = run(world, tmp_path, "nodes", "label", "attic", "zone=home")
    assert resumed.stdout == "= attic was not drained\n"
    assert labelled.stdout == "= labels of attic: zone=home\n"


def test_an_approval_of_an_approved_node_changes_nothing_and_says_so(tmp_path: Path) -> None:
    done = refused(409, "cannot approve attic: it is approved already", "already_approved")
    there = {**NODE, "approved": True, "status": "offline"}
    answers = {"POST /api/nodes/attic/approve": done, "GET /api/nodes/attic": Answer(there)}
    answers |= {"POST /api/nodes/box/approve": Answer({**NODE, "name": "box"}), "GET /api/nodes/box": Answer(NODE)}
    with recorded(answers) as world:
        alone = run(world, tmp_path, "nodes", "approve", "attic")
        both = run(world, tmp_path, "nodes", "approve", "attic", "box", "--no-wait")
        described = run(world, tmp_path, "nodes", "approve", "attic", "--json")
    assert (alone.exit_code, alone.stdout, alone.stderr) == (0, "= attic is already approved\n", "")
    assert (both.exit_code, both.stdout) == (0, "= attic is already approved\napproved box\n")
    assert json.loads(described.stdout) == there


def test_several_drains_are_requested_before_the_first_is_followed(tmp_path: Path) -> None:
    done = operation("succeeded", row("x", "success", action="stop chat", kind="stop_replica"), kind="drain", name="x")
    begun = operation("queued", kind="drain", name="x")
    answers = {f"POST /api/nodes/{name}/drain": Answer(begun, 202) for name in ("attic", "cellar")}
    nodes = {f"GET /api/nodes/{name}": Answer({**NODE, "name": name}) for name in ("attic", "cellar")}
    with recorded({**answers, **nodes, f"GET /api/operations/{JOB}": Answer(done)}) as world:
        result = run(world, tmp_path, "nodes", "drain", "attic", "cellar", "--wait", "20s")
    assert result.exit_code == 0, result.stderr
    assert asked(world)[2:4] == ["POST /api/nodes/attic/drain", "POST /api/nodes/cellar/drain"]
    assert result.stdout.count("safe to stop") == 2


def test_a_healthy_node_that_is_not_removed_says_what_to_do(tmp_path: Path) -> None:
    message = "cannot remove attic: it is healthy. Drain it first, or remove it with --force (force=true)"
    with recorded({"DELETE /api/nodes/attic": refused(409, message, "node_healthy")}) as world:
        result = run(world, tmp_path, "nodes", "remove", "attic")
    assert result.exit_code == 1
    assert "--force" in result.stderr


def test_a_node_behind_the_server_is_marked(tmp_path: Path) -> None:
    listed = [{**NODE, "worker_version": "0.0.9", "behind": True}]
    with recorded({"GET /api/nodes?limit=500": Answer(listed)}) as world:
        result = run(world, tmp_path, "nodes", "list")
    assert "\t0.0.9 (behind)\t" in result.stdout


def test_the_key_of_this_machine_is_made_once_and_printed(tmp_path: Path) -> None:
    with recorded({}) as world:
        first, again, parsed = (run(world, tmp_path, "node", "key", *more) for more in ((), (), ("--json",)))
    key = first.stdout.strip()
    assert (len(bytes.fromhex(key)), again.stdout) == (32, first.stdout)
    assert f"fingerprint: {fingerprint_of(key)}" in first.stderr
    assert json.loads(parsed.stdout) == {"public_key": key, "fingerprint": fingerprint_of(key)}
    (seed,) = tmp_path.rglob("node.key")
    assert stat.S_IMODE(seed.stat().st_mode) == 0o600
    assert world.requests == []


def test_what_was_rejected_is_listed_and_taken_back(tmp_path: Path) -> None:
    rejected = [{"name": "attic", "fingerprint": REAL, "rejected_at": "2026-01-01T00:00:00Z"}]
    answers = {"GET /api/nodes/rejected": Answer(rejected), "DELETE /api/nodes/rejected/attic": Answer(None, 204)}
    with recorded(answers) as world:
        listed = run(world, tmp_path, "nodes", "reject", "--list")
        back = run(world, tmp_path, "nodes", "reject", "attic", "--undo")
        nothing = run(world, tmp_path, "nodes", "reject")
    assert listed.stdout.startswith(f"attic\t{REAL}\t")
    assert back.stdout == "attic may ask to join again\n"
    assert nothing.exit_code == 2
