"""What the commands about models ask the frontend, and what they show."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.recorded import JOB, Answer, Reaction, Request, operation, recorded, refused, row, run

MODEL: dict[str, Any] = {
    "name": "llama",
    "revision": "abc",
    "backend": "llama-cpp",
    "license": "apache-2.0",
    "size_bytes": 5 * 1024**2,
    "replicas": 1,
    "files": [{"name": "m.gguf", "uri": "https://hub/o/r/resolve/c/m.gguf", "sha256": "", "size_bytes": 5 * 1024**2}],
    "config": {"name": "llama"},
    "running": [{"node_name": "attic", "slot": 0, "is_current": False}],
    "remarks": ["chose Q4_K_M"],
    "warnings": ["no node has joined yet"],
    "something_new": 1,
}


def test_adding_shows_the_licence_the_choice_and_the_warnings(tmp_path: Path) -> None:
    with recorded({"POST /api/models": Answer({**MODEL, "name": "the llama"}, 201)}) as world:
        result = run(
            world, tmp_path, "models", "add", "the llama", "hf:o/r", "--context-size", "99", "--credential", "mine"
        )
    assert result.exit_code == 0
    assert "models load 'the llama'" in result.stdout
    for word in ("chose Q4_K_M", "licence: apache-2.0", "warning: no node has joined yet"):
        assert word in result.stderr
    assert world.bodies("/api/models") == [
        {"name": "the llama", "credential": "mine", "config": {"context_size": 99}, "sources": ["hf:o/r"]}
    ]


def test_adding_with_a_load_follows_it(tmp_path: Path) -> None:
    done = operation("succeeded", row("main", "success", action="start llama"), kind="load", name="llama")
    with recorded({"POST /api/models": Answer({**done, "model": MODEL}, 202)}) as world:
        result = run(world, tmp_path, "models", "add", "llama", "hf:o/r", "--load", "--no-follow")
    assert (result.exit_code, result.stdout.strip()) == (0, JOB)
    assert world.bodies("/api/models")[0]["load"] is True


def test_a_dry_run_shows_what_was_found(tmp_path: Path) -> None:
    with recorded({"POST /api/models": Answer(MODEL)}) as world:
        result = run(world, tmp_path, "models", "add", "llama", "hf:o/r", "--dry-run")
        assert "licence\tapache-2.0" in result.stdout
        assert (
            json.loads(run(world, tmp_path, "models", "add", "llama", "hf:o/r", "--dry-run", "--json").stdout) == MODEL
        )
    assert all(body["dry_run"] for body in world.bodies("/api/models"))


def test_a_file_of_this_machine_is_uploaded_in_parts_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content := b"GGUF" + bytes(5000))
    sha256 = hashlib.sha256(content).hexdigest()
    sent: list[tuple[str, int]] = []

    def take(request: Request) -> Answer:
        sent.append((request.headers["Content-Range"], int(request.headers["Content-Length"])))
        return Answer({"offset": len(content), "complete": True}, 201)

    answers: dict[str, Reaction | list[Reaction]] = {
        f"HEAD /api/uploads/{sha256}": Answer(b"", 200, {"upload-offset": "1000", "upload-complete": "?0"}),
        f"PUT /api/uploads/{sha256}": take,
        "POST /api/models": Answer(MODEL, 201),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "models", "add", "llama", str(path))
    assert result.exit_code == 0, result.stderr
    assert sent == [("bytes 1000-5003/5004", 4004)]
    assert world.bodies("/api/models")[0]["files"] == [
        {"name": "m.gguf", "uri": f"upload:{sha256}", "sha256": sha256, "size_bytes": 5004}
    ]


@pytest.mark.parametrize(
    ("name", "word"),
    [("./none.gguf", "no such file"), ("./empty.gguf", "it is empty"), (".", "it is a directory; name a file")],
)
def test_a_file_that_cannot_be_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with recorded({}) as world:
        result = run(world, tmp_path, "models", "add", "x", name)
    assert (result.exit_code, word in result.stderr) == (2, True)
    assert world.requests == []


def test_showing_copying_and_exporting(tmp_path: Path) -> None:
    answers = {
        "GET /api/models/org%2Fllama": Answer(MODEL),
        "GET /api/models/org%2Fllama/export": Answer(b"name: org/llama\nbackend: x\n"),
        "POST /api/models/org%2Fllama/copy": Answer(MODEL, 201),
    }
    with recorded(answers) as world:
        shown = run(world, tmp_path, "models", "show", "org/llama").stdout
        assert "running on\tattic (an older revision)" in shown
        assert "file\tm.gguf  5.0 MiB  https://hub/o/r/resolve/c/m.gguf" in shown
        assert run(world, tmp_path, "models", "export", "org/llama").stdout == "name: org/llama\nbackend: x\n"
        copied = run(world, tmp_path, "models", "copy", "org/llama", "new")
    assert copied.stdout == "org/llama was copied to new\n"
    with recorded({"POST /api/models/org%2Fllama/copy": Answer({**MODEL, "was_there": True})}) as again:
        copied = run(again, tmp_path, "models", "copy", "org/llama", "new")
    assert (copied.exit_code, copied.stdout) == (0, "= new is already a copy of org/llama\n")
    assert world.bodies("/api/models/org%2Fllama/copy") == [{"name": "new"}]


def test_editing_sends_the_changed_mapping_with_the_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "GET /api/models/llama": Answer(MODEL),
        "GET /api/models/llama/export": Answer(b"name: llama\ncontext_size: 1\n"),
        "PUT /api/models/llama": Answer({**MODEL, "remarks": ["replicas are replaced"]}),
    }
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/context_size: 1/context_size: 2/" "$1"\n')
    editor.chmod(0o755)
    with recorded(answers) as world:
        monkeypatch.setenv("VISUAL", str(editor))
        result = run(world, tmp_path, "models", "edit", "llama")
        assert "was changed" in result.stdout
        assert "replicas are replaced" in result.stderr
        assert world.bodies("/api/models/llama") == [
            None,
            {"config": {"name": "llama", "context_size": 2}, "revision": "abc"},
        ]
        monkeypatch.setenv("VISUAL", "true")
        assert "nothing was changed" in run(world, tmp_path, "models", "edit", "llama").stderr


def test_an_import_brings_the_templates_beside_it(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("name: a\ntemplate: {chat: talk, completion: other}\n")
    (tmp_path / "talk.tmpl").write_text("{{.Input}}\n")
    (tmp_path / "unused.tmpl").write_text("x")
    with recorded({"POST /models/import": Answer({"models": [MODEL]}, 201)}) as world:
        result = run(world, tmp_path, "models", "import", str(tmp_path / "m.yaml"))
        assert result.stdout == "llama was imported\n"
        (body,) = world.bodies("/models/import")
        assert b"content: |\n" in body
        assert b"unused" not in body
        missing = run(world, tmp_path, "models", "import", str(tmp_path / "gone.yaml"))
    assert missing.exit_code == 2


def test_listing_and_installing_from_a_gallery(tmp_path: Path) -> None:
    offered = [{"name": "qwen", "description": "small\nmodel", "gallery": {"name": "localai"}, "installed": True}]
    done = operation("succeeded", row("main", "success", action="start qwen"), kind="load", name="qwen")
    answers = {
        "GET /models/available?term=qwen%20coder": Answer(offered),
        "POST /models/plan": Answer(MODEL),
        "POST /models/apply": Answer({"uuid": JOB, "status": "http://x"}),
        f"GET /api/operations/{JOB}": Answer(done),
    }
    with recorded(answers) as world:
        listed = run(world, tmp_path, "models", "available", "qwen", "coder")
        assert listed.stdout == "qwen\tlocalai\t\t\tyes\tsmall model\n"
        result = run(world, tmp_path, "models", "install", "qwen", "--variant", "big", "--no-follow")
    assert (result.exit_code, result.stdout.strip()) == (0, JOB)
    assert "licence: apache-2.0" in result.stderr
    assert world.bodies("/models/apply") == [{"id": "qwen", "variant": "big"}]


def test_a_refusal_is_one_line_and_the_right_exit_code(tmp_path: Path) -> None:
    with recorded({"POST /api/models": refused(409, "cannot add 'llama': taken", "conflict")}) as world:
        result = run(world, tmp_path, "models", "add", "llama", "hf:o/r")
    assert (result.exit_code, result.stderr) == (1, "enginehouse: cannot add 'llama': taken\n")


def test_the_policy_of_a_schedule_is_set_and_shown_and_the_rest_is_kept(tmp_path: Path) -> None:
    before = {"model_name": "llama", "min_replicas": 1, "max_replicas": 3}
    after = {**before, "route_policy": "round_robin"}
    path = "/api/nodes/scheduling"
    with recorded({f"GET {path}/llama": Answer(before), f"POST {path}": Answer(after)}) as world:
        result = run(world, tmp_path, "models", "schedule", "llama", "--policy", "round_robin")
        assert "at least 1, at most 3 replicas; round_robin" in result.stdout + result.stderr
        run(world, tmp_path, "models", "schedule", "llama", "--policy", "default")
        run(world, tmp_path, "models", "schedule", "llama", "--max", "4")
    first, second, third = world.bodies(path)
    assert (first["route_policy"], first["min_replicas"], first["max_replicas"]) == ("round_robin", 1, 3)
    assert second["route_policy"] == ""
    assert "route_policy" not in third, "it keeps its value"


@pytest.mark.parametrize("chosen", ["", "attic"])
def test_a_schedule_that_has_no_room_is_told_so_at_once(tmp_path: Path, chosen: str) -> None:
    path = "/api/nodes/scheduling"
    before, after = {"model_name": "llama"}, {"model_name": "llama", "min_replicas": 2, "max_replicas": 2}
    nodes = [{"node_name": "attic", "fits": bool(chosen), "reason": "" if chosen else "needs 5 GiB, 3 free"}]
    room = {
        **{"model": "llama", "replicas": 1, "wanted": 2, "chosen": chosen, "nodes": nodes, "stops": []},
        **{"needs_bytes": 0, "needs_from": "", "last_failure": "", "retry_in_seconds": None},
    }
    answers: dict[str, Reaction | list[Reaction]] = {
        f"GET {path}/llama": Answer(before),
        f"POST {path}": Answer(after),
        "GET /api/models/llama/explain": Answer(room),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "models", "scale", "llama", "2")
    assert (result.exit_code, result.stdout) == (0, "llama: replicas on request → 2 replicas\n")
    assert ("no node has room for another replica now (attic: needs 5 GiB, 3 free)" in result.stderr) == (not chosen)
