"""What each command asks the frontend and what it shows of the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.recorded import JOB, Answer, operation, recorded, refused, row, run

from enginehouse.cli.terminal.output import in_one_form

NODE = {
    "id": "11111111-1111-4111-8111-111111111111",
    "name": "main",
    "node_type": "backend",
    "status": "healthy",
    "approved": True,
    "health": "healthy",
    "drained": False,
    "platform": "linux/amd64",
    "capability": "default",
    "cores": 2,
    "used_cores": 1.25,
    "total_ram": 8 * 1024**3,
    "available_ram": 4 * 1024**3,
    "total_vram": 0,
    "available_vram": 0,
    "gpu_cards": [
        {"index": 0, "name": "Card A", "total_vram": 24 * 1024**3, "available_vram": 0},
        {"index": 1, "total_vram": 8 * 1024**3},
        {"index": 2, "name": "Card C"},
    ],
    "labels": {"room": "attic"},
    "fingerprint": "abcd",
    "heartbeat_age_seconds": 3.2,
    "worker_version": "0.1.0",
    "engine_confinement": "landlock",
    "created_at": "2026-01-01T00:00:00Z",
    "backends": [
        {"name": "xllamacpp", "is_system": False, "is_meta": False, "version": "1.2"},
        {"name": "llama-cpp", "is_system": False, "is_meta": True, "meta_backend_for": "xllamacpp"},
        {
            **{"name": "engine", "is_system": False, "is_meta": False, "is_broken": True},
            "digest": "sha256:0123456789abcdef",
        },
    ],
    "replicas": [{"model_id": "tiny-chat", "replica_index": 0}],
    "something_new": 1,
}
BACKENDS = [
    {
        "Name": "xllamacpp",
        "IsMeta": False,
        "IsSystem": False,
        "Metadata": {},
        "nodes": [
            {
                "node_id": "1",
                "node_name": "main",
                "node_status": "healthy",
                "version": "1.2",
                "digest": "sha256:0123456789abcdef",
            },
            {"node_id": "2", "node_name": "second", "node_status": "healthy", "version": "1.2", "is_broken": True},
        ],
    },
    {
        "Name": "llama-cpp",
        "IsMeta": True,
        "nodes": [{"node_id": "1", "node_name": "main", "meta_backend_for": "xllamacpp"}],
    },
]
MODELS = [
    {
        "name": "tiny-chat",
        "backend": "llama-cpp",
        "description": "A toy",
        "license": "CC0-1.0",
        "size_bytes": 2159040,
        "state": "loaded",
        "options": {"system_prompt": "Be kind."},
        "replicas": [{"node_id": "1", "node_name": "main", "slot": 0}],
    }
]
ANSWERS = {
    "GET /api/nodes?limit=500": Answer([NODE]),
    "GET /api/nodes/main": Answer(NODE),
    "POST /api/nodes/second/approve": Answer({**NODE, "name": "second", "message": "node approved"}),
    "GET /backends": Answer(BACKENDS),
    "GET /backends/available": Answer([{"name": "llama-cpp", "description": "d", "version": "1.2", "installed": True}]),
    "GET /api/models": Answer(MODELS),
    "GET /api/tokens": Answer([{"id": "1", "role": "join", "name": "attic", "created_at": "2026-01-01T00:00:00Z"}]),
    "GET /api/operations?all=true&limit=50": Answer(
        {"operations": [operation("partial", row("a", "success"), row("b", "error"), error="b: disk full")]}
    ),
    f"GET /api/operations/{JOB}": Answer(operation("succeeded", row("main", "success"))),
}


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        (
            ("nodes", "list"),
            [
                "main",
                "healthy",
                "3s ago",
                "linux/amd64",
                "0.1.0",
                "",
                "4.0 GiB of 8.0 GiB",
                "xllamacpp, engine",
                "tiny-chat",
                NODE["id"],
            ],
        ),
        (("backends", "available"), ["llama-cpp", "installed", "1.2", "", "d"]),
        (("models", "list"), ["tiny-chat", "loaded", "main", "llama-cpp", "2.1 MiB", "CC0-1.0", "A toy"]),
    ],
)
def test_a_list_in_a_pipe_is_one_line_of_tab_separated_fields(
    tmp_path: Path, arguments: tuple[str, ...], fields: list[str]
) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, *arguments)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines() == ["\t".join(fields)]
    assert result.stderr == ""


def test_backends_are_listed_per_node_and_a_broken_one_is_called_so(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        lines = run(world, tmp_path, "backends", "list").stdout.splitlines()
    assert lines[0].split("\t")[:5] == ["xllamacpp", "main", "healthy", "1.2", "0123456789ab"]
    assert lines[1].split("\t")[:3] == ["xllamacpp", "second", "broken"]
    assert lines[2].split("\t")[:4] == ["llama-cpp", "main", "", "(xllamacpp)"]


def test_operations_are_listed_with_how_many_nodes_are_done_and_the_error(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        fields = run(world, tmp_path, "ops", "list").stdout.strip().split("\t")
    assert fields[:4] == [JOB[:8], "install llama-cpp", "partial", "1/2"]
    assert fields[-2:] == ["admin", "b: disk full"]


def test_tokens_are_listed_without_themselves(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        assert run(world, tmp_path, "tokens", "list").stdout.split("\t")[:3] == ["1", "join", "attic"]


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("nodes", "list"), "GET /api/nodes?limit=500"),
        (("nodes", "show", "main"), "GET /api/nodes/main"),
        (("nodes", "approve", "second"), "POST /api/nodes/second/approve"),
        (("backends", "list"), "GET /backends"),
        (("backends", "available"), "GET /backends/available"),
        (("models", "list"), "GET /api/models"),
        (("tokens", "list"), "GET /api/tokens"),
        (("ops", "list"), "GET /api/operations?all=true&limit=50"),
        (("ops", "show", JOB), f"GET /api/operations/{JOB}"),
    ],
)
def test_json_is_one_document_with_everything_the_frontend_said(
    tmp_path: Path, arguments: tuple[str, ...], path: str
) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, *arguments, "--json")
        before = run(world, tmp_path, "--json", *arguments)
    assert json.loads(result.stdout) == in_one_form(ANSWERS[path].body)
    assert before.stdout == result.stdout


def test_nodes_are_listed_page_by_page_and_a_frontend_without_pages_is_understood(tmp_path: Path) -> None:
    many = [{**NODE, "name": f"n{number:04}", "id": f"id-{number}"} for number in range(1100)]
    first = "GET /api/nodes?limit=500"
    pages = {
        first: Answer(many[:500]),
        f"{first}&after=id-499": Answer(many[500:1000]),
        f"{first}&after=id-999": Answer(many[1000:]),
    }
    last_was_removed = {first: Answer(many[:500]), "GET /api/nodes": Answer(many)}
    older = {first: Answer(many)}
    just_as_many = {first: Answer(many[:500]), f"{first}&after=id-499": Answer(many[:500])}
    for answers, expected in ((pages, many), (last_was_removed, many), (older, many), (just_as_many, many[:500])):
        with recorded(answers) as world:
            assert json.loads(run(world, tmp_path, "nodes", "list", "--json").stdout) == expected


def test_a_node_is_shown_with_what_it_has(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        lines = [line.split("\t", 1) for line in run(world, tmp_path, "nodes", "show", "main").stdout.splitlines()]
    shown = {name: value for name, value in lines}
    assert [value for name, value in lines if name == "backend"] == [
        "xllamacpp 1.2",
        "llama-cpp (xllamacpp)",
        "engine 0123456789ab (broken)",
    ]
    assert shown["labels"] == "room=attic"
    assert shown["cores"] == "2, 1.2 in use"
    assert shown["model"] == "tiny-chat#0"
    assert shown["engines confined"] == "landlock"
    assert "free vram" not in shown


def test_a_node_is_approved_by_name(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        assert run(world, tmp_path, "nodes", "approve", "second").stdout == "approved second; it has joined\n"


def test_an_approval_waits_until_the_node_has_joined_or_says_that_it_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.cli.commands.nodes.JOIN_SECONDS", 1.0)
    monkeypatch.setattr("enginehouse.cli.commands.nodes.LOOK_SECONDS", 0.01)
    away = {"id": "n2", "name": "second", "status": "offline", "heartbeat_age_seconds": 3.0}
    here = {**away, "status": "healthy"}
    approved = {"POST /api/nodes/second/approve": Answer(away)}
    with recorded({**approved, "GET /api/nodes/n2": [Answer(away), Answer(away), Answer(here)]}) as world:
        result = run(world, tmp_path, "nodes", "approve", "second")
    assert (result.stdout, result.stderr) == ("approved second; it has joined\n", "")
    with recorded({**approved, "GET /api/nodes/n2": Answer(away)}) as world:
        late = run(world, tmp_path, "nodes", "approve", "second")
        at_once = run(world, tmp_path, "nodes", "approve", "second", "--no-wait")
    assert late.stdout == at_once.stdout == "approved second\n"
    assert "has not joined within 1 s (heard 3s ago)" in late.stderr
    assert at_once.stderr == ""


def test_the_beginning_of_an_id_is_enough_when_only_one_begins_so(tmp_path: Path) -> None:
    other = JOB.replace("3f2a9c1d", "3f2b0000")
    listed = {"operations": [operation("succeeded"), operation("failed", jobID=other)]}
    answers = {
        "GET /api/operations?all=true&limit=500&rows=false": Answer(listed),
        f"GET /api/operations/{JOB}": Answer(operation("succeeded")),
    }
    with recorded(answers) as world:
        found = run(world, tmp_path, "ops", "show", "3F2A")
        several = run(world, tmp_path, "ops", "show", "3f2")
        none = run(world, tmp_path, "ops", "show", "9")
        bad = run(world, tmp_path, "ops", "show", "../nodes")
    assert f"id\t{JOB}" in found.stdout
    assert (several.exit_code, none.exit_code, bad.exit_code) == (2, 5, 2)
    assert JOB in several.stderr
    assert other in several.stderr


def test_ids_are_shortened_only_as_far_as_they_stay_apart() -> None:
    from enginehouse.cli.commands.ops import short_ids

    assert short_ids(["0123456789a", "0123456789b"]) == {one: one for one in ("0123456789a", "0123456789b")}
    assert short_ids(["0123456789a", "1123456789a"]) == {"0123456789a": "01234567", "1123456789a": "11234567"}
    assert short_ids([]) == {}


def test_a_token_goes_to_stdout_alone(tmp_path: Path) -> None:
    made = {"id": "1", "role": "join", "name": "unnamed", "token": "eh-join-x"}
    with recorded({"POST /api/tokens": Answer(made, 201)}) as world:
        result = run(world, tmp_path, "tokens", "create", "--role", "join")
        named = run(world, tmp_path, "tokens", "create", "--name", "laptop", "--json")
    assert result.stdout == "eh-join-x\n"
    assert f"enginehouse join {world.url} --token @FILE" in result.stderr
    assert json.loads(named.stdout) == made
    assert world.bodies("/api/tokens") == [{"role": "join"}, {"role": "user", "name": "laptop"}]


def test_limits_of_a_token_are_passed_on_and_shown(tmp_path: Path) -> None:
    made = {"id": "1", "role": "user", "name": "app", "token": "eh-user-x"}
    limits = {"models": ["tiny", "org/*"], "requests_per_minute": 5, "tokens_per_minute": 600}
    aged = {"id": "1", "role": "user", "name": "app", "created_at": "2026-01-01T00:00:00Z"}
    rows = [
        {**aged, **limits, "expires_at": "2027-01-02T03:04:05.678Z"},
        {**aged, "id": "2", "expires_at": "2026-01-02T00:00:00Z", "expired": True},
    ]
    words = ("--model", "tiny", "--model", "org/*", "--requests-per-minute", "5", "--tokens-per-minute", "600")
    with recorded({"POST /api/tokens": Answer(made, 201), "GET /api/tokens": Answer(rows)}) as world:
        run(world, tmp_path, "tokens", "create", *words, "--ttl", "30d")
        run(world, tmp_path, "keys", "create", *words, "--ttl", "1h30m")
        listed = run(world, tmp_path, "keys", "list")
    first, second, _ = world.bodies("/api/tokens")
    assert first == {"role": "user", **limits, "ttl_seconds": 30 * 86400.0}
    assert second == {"role": "user", **limits, "ttl_seconds": 5400.0}
    lines = [line.split("\t") for line in listed.stdout.splitlines()]
    assert [line[5] for line in lines] == ["never", "never"]
    assert [line[6:] for line in lines] == [
        ["2027-01-02 03:04:05", "tiny, org/*, 5 requests/min, 600 tokens/min"],
        ["expired", ""],
    ]


@pytest.mark.parametrize("ttl", ["soon", "-5m", "0", "0d", "d", "5dd", "1.5d"])
def test_a_lifetime_that_is_none_is_refused_before_anything_is_asked(tmp_path: Path, ttl: str) -> None:
    with recorded({}) as world:
        result = run(world, tmp_path, "tokens", "create", f"--ttl={ttl}")
    assert result.exit_code == 2
    assert "--ttl" in result.stderr
    assert world.requests == []


def test_usage_is_a_table_of_what_it_is_summed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse.cli.commands.usage._now", lambda: 100 * 86400)
    amounts = {"requests": 3, "errors": 1, "prompt_tokens": 70, "completion_tokens": 9}
    rows = [{"token": "app", "token_id": "1", "model": "tiny", **amounts}, {"token": "", "model": "", **amounts}]
    answer = {"usage": rows, "total": {**amounts, "requests": 6}, "truncated": True}
    answers = {
        f"GET /api/usage?from={93 * 86400}&by=token,model": Answer(answer),
        f"GET /api/usage?from={70 * 86400}&by=model,day": Answer(answer),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "usage")
        by_day = run(world, tmp_path, "usage", "--by", "day", "--by", "model", "--days", "30", "--json")
    assert result.stdout.splitlines() == ["app\ttiny\t3\t1\t70\t9", "-\t-\t3\t1\t70\t9"]
    assert "in all: 6 requests, 1 errors" in result.stderr
    assert "only the first 2 rows" in result.stderr
    assert json.loads(by_day.stdout) == answer


def test_targets_and_force_are_passed_on(tmp_path: Path) -> None:
    with recorded({"POST /api/operations": Answer(operation("succeeded"), 202)}) as world:
        run(world, tmp_path, "backends", "install", "gallery@llama-cpp", "--node", "a", "--node", "b", "--force")
        run(world, tmp_path, "backends", "upgrade", "llama-cpp")
        run(world, tmp_path, "backends", "delete", "llama-cpp", "--all")
    assert world.bodies("/api/operations") == [
        {"kind": "install", "name": "gallery@llama-cpp", "nodes": ["a", "b"], "force": True},
        {"kind": "upgrade", "name": "llama-cpp"},
        {"kind": "delete", "name": "llama-cpp"},
    ]


def test_a_request_waits_for_a_frontend_that_has_yet_to_read_its_galleries(tmp_path: Path) -> None:
    unread = refused(503, "cannot resolve 'llama-cpp' yet", "gallery_loading")
    done = Answer(operation("succeeded"), 202)
    with recorded({"POST /api/operations": [unread, unread, unread, unread, done]}) as world:
        result = run(world, tmp_path, "backends", "install", "llama-cpp")
    assert result.exit_code == 0, result.stderr
    assert len({request.headers["Idempotency-Key"] for request in world.requests if request.method == "POST"}) == 1


def test_a_token_can_come_from_stdin(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "nodes", "list", "--token", "-", stdin="from-stdin\n")
        empty = run(world, tmp_path, "nodes", "list", "--token", "-", stdin="")
    assert result.exit_code == 0
    assert world.requests[0].headers["Authorization"] == "Bearer from-stdin"
    assert empty.exit_code == 2


def test_a_token_can_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "join.token").write_text("from-file\nsomething else\n")
    (tmp_path / "empty").write_text("\n")
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "nodes", "list", "--token", f"@{tmp_path / 'join.token'}")
        absent = run(world, tmp_path, "nodes", "list", "--token", "@/nowhere/at/all")
        empty = run(world, tmp_path, "nodes", "list", "--token", f"@{tmp_path / 'empty'}")
    assert result.exit_code == 0
    assert world.requests[0].headers["Authorization"] == "Bearer from-file"
    assert (absent.exit_code, empty.exit_code) == (2, 2)
    assert "/nowhere/at/all" in absent.stderr


def test_tokens_are_revoked_by_name_and_keys_only_among_keys(tmp_path: Path) -> None:
    rows = [
        {"id": "1", "role": "admin", "name": "app", "created_at": ""},
        {"id": "2", "role": "user", "name": "app", "created_at": ""},
        {"id": "3", "role": "join", "name": "attic", "node": "attic", "created_at": ""},
    ]
    gone = Answer({"id": "2", "role": "user", "name": "app", "message": "token revoked"})
    answers = {"GET /api/tokens": Answer(rows), "DELETE /api/tokens/2": gone, "DELETE /api/tokens/app": gone}
    with recorded(answers) as world:
        key = run(world, tmp_path, "keys", "revoke", "app")
        unknown = run(world, tmp_path, "keys", "revoke", "attic")
        listed = run(world, tmp_path, "keys", "list")
        token = run(world, tmp_path, "tokens", "revoke", "app")
        every = run(world, tmp_path, "tokens", "list")
    assert (key.stdout, key.exit_code) == ("revoked the user token app\n", 0), key.stderr
    assert unknown.exit_code == 5
    assert "admin" not in listed.stdout
    assert token.exit_code == 0
    assert "attic" in every.stdout
    assert [one.path for one in world.requests if one.method == "DELETE"] == ["/api/tokens/2", "/api/tokens/app"]


def test_the_later_of_two_shared_options_wins(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        run(world, tmp_path, "--token", "one", "nodes", "--token", "two", "list", "--token", "three")
    assert world.requests[0].headers["Authorization"] == "Bearer three"


def test_a_model_that_already_runs_is_not_loaded_again(tmp_path: Path) -> None:
    with recorded({"POST /api/models/org%2Ftiny/load": Answer({"ready": True, "replicas": []})}) as world:
        result = run(world, tmp_path, "models", "load", "org/tiny")
    assert result.stdout == "= org/tiny is already running\n"


def test_loading_and_unloading_are_followed(tmp_path: Path) -> None:
    done = operation("succeeded", row("main", "success", action="stop tiny-chat"), kind="unload")
    answers = {
        "POST /api/models/tiny-chat/unload": Answer(done, 202),
        "POST /api/models/tiny-chat/load": Answer(done, 202),
    }
    with recorded(answers) as world:
        assert run(world, tmp_path, "models", "unload", "tiny-chat").stdout == "✓ main: stop tiny-chat\n"
        assert run(world, tmp_path, "models", "load", "tiny-chat", "--node", "main").exit_code == 0
    assert world.bodies("/api/models/tiny-chat/load") == [{"node": "main"}]


def test_a_node_shows_its_cards_and_a_full_one_is_no_unknown_one(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        lines = run(world, tmp_path, "nodes", "show", "main").stdout.splitlines()
    assert [line for line in lines if line.startswith("card ")] == [
        "card 0\tCard A: 0 B of 24.0 GiB free",
        "card 1\t8.0 GiB",
        "card 2\tCard C: memory unknown",
    ]


def test_keys_are_those_of_applications_as_json_too(tmp_path: Path) -> None:
    rows = [
        {"id": role, "role": role, "name": role, "created_at": "2026-01-01T00:00:00Z"} for role in ("admin", "user")
    ]
    with recorded({"GET /api/tokens": Answer(rows)}) as world:
        keys = json.loads(run(world, tmp_path, "keys", "list", "--json").stdout)
        tokens = json.loads(run(world, tmp_path, "tokens", "list", "--json").stdout)
    assert [one["id"] for one in keys] == ["user"]
    assert [one["id"] for one in tokens] == ["admin", "user"]
