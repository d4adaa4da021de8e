"""What `status`, `ps`, `ops list`, `nodes list` and `logs` show of a cluster on a bad day, in a pipe and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.looked_at import ANSWERS, NODES, OPERATIONS
from tests.cli.recorded import JOB, Answer, Reaction, Stream, operation, recorded, refused, row, run

from enginehouse.cli.terminal.fleet_words import UNKNOWN

LINES = [{"timestamp": f"2026-01-01T00:00:0{number}Z", "stream": "x", "text": f"line {number}"} for number in range(3)]


def test_status_says_what_is_so_and_what_needs_somebody_with_a_command_for_each(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "status")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "2 of 4 nodes healthy · 1 replica · 2.1 req/s · 43.0 tok/s · 1 operation running"
    assert "5 things need you:" in lines
    for sentence, command in (
        ("jetson asks to join (ab:cd)", "enginehouse nodes approve jetson"),
        ("tiny does not stay up on spare: it ended with code 1", "enginehouse logs spare tiny"),
        ("cellar has been offline for 2 h 1 min.", "enginehouse nodes show cellar"),
    ):
        at = lines.index(f"  ! {sentence}")
        assert lines[at + 1] == f"    → {command}"
    assert any("cannot be placed: it needs 19 GiB" in line for line in lines)
    assert any(line.split()[:3] == ["◒", "attic", "drained"] for line in lines)
    assert any(line.endswith("spare: needs 103 MiB, 59 free; try 5 of 10 in 14 s") for line in lines)


def test_status_as_json_has_the_same_and_ids(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        found = json.loads(run(world, tmp_path, "status", "--json").stdout)
    assert found["summary"][0] == "2 of 4 nodes healthy"
    assert {"kind", "id", "sentence", "key", "command"} == set(found["needs"][0])
    assert found["operations"] == [
        {
            "id": JOB,
            "what": "Load tiny",
            "status": "running",
            "why": "spare: needs 103 MiB, 59 free; try 5 of 10 in 14 s",
        }
    ]


def test_nothing_that_needs_anybody_is_said_so_also_without_figures(tmp_path: Path) -> None:
    quiet = {
        **ANSWERS,
        "GET /api/nodes?limit=500": Answer([]),
        "GET /api/operations": Answer({"operations": []}),
        "GET /api/operations?all=true&limit=50": Answer({"operations": []}),
        "GET /api/nodes/scheduling": Answer([]),
        "GET /api/events": refused(403, "no", "forbidden"),
    }
    with recorded(quiet) as world:
        lines = run(world, tmp_path, "status").stdout.splitlines()
    assert lines[0] == f"no nodes yet · 1 replica · {UNKNOWN} req/s · {UNKNOWN} tok/s"
    assert "Nothing needs you." in lines


def test_a_server_that_is_not_ready_needs_somebody(tmp_path: Path) -> None:
    full = Answer({"status": "not ready", "reasons": ["the disk of the database is full"]}, 503)
    with recorded({**ANSWERS, "GET /readyz": full}) as world:
        lines = run(world, tmp_path, "status").stdout.splitlines()
    at = lines.index("  ! The server is not ready: the disk of the database is full")
    assert lines[at + 1] == "    → enginehouse doctor"
    assert "6 things need you:" in lines


def test_ps_lists_what_runs_loads_and_was_given_up_by_node(tmp_path: Path) -> None:
    nodes = [{**NODES[4], "id": "id-of-spare"}, *NODES[:4]]
    with recorded({**ANSWERS, "GET /api/nodes?limit=500": Answer(nodes)}) as world:
        result = run(world, tmp_path, "ps")
        here = run(world, tmp_path, "ps", "--node", "spare")
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert ["attic", "qwen3-30b-a3b-instruct", "ready", "19.0 GiB", "2h", "3"] in rows
    assert ["spare", "tiny", "failed", "", "", ""] in rows
    assert ["spare", "tiny", "loading"] in [row[:3] for row in rows]
    assert {line.split("\t")[0] for line in here.stdout.splitlines()} == {"spare"}


def test_the_states_of_nodes_are_facts_beside_each_other(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        lines = run(world, tmp_path, "nodes", "list").stdout.splitlines()
    states = {line.split("\t")[0]: line.split("\t")[1] for line in lines}
    assert states == {
        "attic": "healthy,drained",
        "cellar": "offline",
        "desk-with-a-long-name": "healthy",
        "jetson": "pending",
        "spare": "healthy",
    }


def test_operations_say_why_and_count_nodes_as_nodes(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        waiting, failed = (line.split("\t") for line in run(world, tmp_path, "ops", "list").stdout.splitlines())
    assert (waiting[3], waiting[-1]) == ("0/1", "spare: needs 103 MiB, 59 free; try 5 of 10 in 14 s")
    assert failed[3] == "1/2", "attic has two steps, and one of them failed"
    assert "the registry refuses" in failed[-1]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"status": "queued", "reason": "node_away", "error": "x"}, "a is offline"),
        ({"status": "queued", "reason": "draining", "error": "x"}, "a is drained"),
        ({"status": "downloading", "phase": "downloading", "percentage": 43.0, "total_bytes": 9}, "a: downloading 43%"),
        (
            {"status": "queued", "reason": "busy", "error": "cannot lock it: busy", "failures": 0},
            "a: busy; trying again",
        ),
        (
            {
                "status": "queued",
                "reason": "insufficient_disk",
                "error": "cannot install xllamacpp: it needs 103 MiB, 59 MiB free; free some space, it is retried "
                "automatically",
                "failures": 0,
            },
            "a: needs 103 MiB, 59 MiB free; trying again",
        ),
        ({"status": "queued"}, ""),
        ({"status": "superseded", "error": "a newer request took its place"}, "a: a newer request took its place"),
    ],
)
def test_each_reason_is_one_short_line(tmp_path: Path, fields: dict[str, object], why: str) -> None:
    ended = fields["status"] == "superseded"
    one = operation("superseded" if ended else "running", row("a", **fields))  # type: ignore[arg-type]
    with recorded({"GET /api/operations?all=true&limit=50": Answer({"operations": [one]})}) as world:
        assert run(world, tmp_path, "ops", "list").stdout.rstrip("\n").split("\t")[-1] == why


def test_all_failures_are_dismissed_at_once_and_none_is_said_so(tmp_path: Path) -> None:
    ids = [JOB.replace("1", str(number)) for number in (2, 3)]
    failures = [operation("failed", jobID=one) for one in ids]
    answers: dict[str, Reaction | list[Reaction]] = {
        "GET /api/operations?limit=500": [
            Answer({"operations": [OPERATIONS[0], *failures]}),
            Answer({"operations": [OPERATIONS[0]]}),
        ],
        **{f"POST /api/operations/{one}/dismiss": Answer({"success": True}) for one in ids},
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "ops", "dismiss", "--all")
        assert result.stdout == "dismissed 2 operations\n", result.stderr
        assert run(world, tmp_path, "ops", "dismiss", "--all").stdout == "= nothing failed is open\n"
        assert run(world, tmp_path, "ops", "dismiss").exit_code == 2
        assert run(world, tmp_path, "ops", "dismiss", JOB, "--all").exit_code == 2


def test_what_changed_nothing_looks_like_it_and_a_change_says_from_what_to_what(tmp_path: Path) -> None:
    done = operation(
        "succeeded",
        row("box", "success", note="already at 1.4"),
        row("desk", "success", note="from 1.3 to 1.4", action="upgrade llama-cpp"),
        row("new", "success", note="now 1.4; it computes on the processor; for the nvidia graphics: a command"),
    )
    with recorded({"POST /api/operations": Answer(done, 202)}) as world:
        lines = run(world, tmp_path, "backends", "install", "llama-cpp").stdout.splitlines()
    assert lines == [
        "= box: llama-cpp is already at 1.4",
        "✓ desk: upgrade llama-cpp from 1.3 to 1.4",
        "✓ new: install llama-cpp now 1.4; it computes on the processor; for the nvidia graphics: a command",
    ]


def test_a_schedule_says_from_what_to_what_or_that_nothing_changed(tmp_path: Path) -> None:
    stored = {"model_name": "m", "min_replicas": 2, "max_replicas": 2}
    answers = {
        "GET /api/nodes/scheduling/m": Answer({**stored, "min_replicas": 1, "max_replicas": 1}),
        "POST /api/nodes/scheduling": Answer(stored),
    }
    with recorded(answers) as world:
        assert run(world, tmp_path, "models", "scale", "m", "2").stdout == "m: 1 replica → 2 replicas\n"
    with recorded({**answers, "GET /api/nodes/scheduling/m": Answer(stored)}) as world:
        assert run(world, tmp_path, "models", "scale", "m", "2").stdout == "= m: already 2 replicas\n"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ((), "/api/logs/frontend"),
        (("frontend",), "/api/logs/frontend"),
        (("nats",), "/api/logs/nats"),
        (("worker", "--node", "attic"), "/api/nodes/attic/worker-log"),
        (("--node", "attic"), "/api/nodes/attic/worker-log"),
        (("attic", "org/m#0"), "/api/nodes/attic/logs/org%2Fm%230"),
        (("org/m", "--node", "attic"), "/api/nodes/attic/logs/org%2Fm"),
        (("attic", "worker"), "/api/nodes/attic/logs/worker"),
    ],
)
def test_each_log_is_read_through_the_frontend(tmp_path: Path, words: tuple[str, ...], path: str) -> None:
    with recorded({f"GET {path}?lines=2": Answer(LINES[1:])}) as world:
        result = run(world, tmp_path, "logs", *words, "-n", "2")
    assert result.stdout == "2026-01-01T00:00:01  line 1\n2026-01-01T00:00:02  line 2\n", result.stderr


def test_a_model_on_several_nodes_is_read_side_by_side_by_time(tmp_path: Path) -> None:
    model = "qwen3-30b-a3b-instruct"
    nodes = [{**NODES[0], "id": "a"}, {**NODES[2], "id": "b"}]
    answers = {
        "GET /api/nodes?limit=500": Answer(nodes),
        f"GET /api/nodes/a/logs/{model}?lines=2": Answer(LINES[:2]),
        f"GET /api/nodes/b/logs/{model}?lines=2": Answer(LINES[2:]),
    }
    with recorded(answers) as world:
        result = run(world, tmp_path, "logs", model, "-n", "2")
        lost = run(world, tmp_path, "logs", "unknown")
    assert result.stdout.splitlines() == [
        "2026-01-01T00:00:01  attic  line 1",
        "2026-01-01T00:00:02  desk-with-a-long-name  line 2",
    ]
    assert (lost.exit_code, "enginehouse logs NODE unknown" in lost.stderr) == (5, True)


def test_followed_lines_come_as_they_are_sent_and_as_json_lines(tmp_path: Path) -> None:
    events = Stream([f"data: {json.dumps(line)}\n\n" for line in LINES])
    with recorded({"GET /api/logs/frontend?lines=100&follow=1": events}) as world:
        assert run(world, tmp_path, "logs", "-f").stdout.splitlines()[-1].endswith("line 2")
        lines = run(world, tmp_path, "logs", "frontend", "-f", "--json").stdout.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["line 0", "line 1", "line 2"]


def test_which_worker_is_asked_for_where_there_are_several(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        result = run(world, tmp_path, "logs", "worker")
        assert (result.exit_code, "--node (attic, cellar, desk-with-a-long-name, spare)" in result.stderr) == (2, True)
        assert run(world, tmp_path, "logs", "nats", "--node", "attic").exit_code == 2
        assert run(world, tmp_path, "logs", "a", "b", "--node", "attic").exit_code == 2
        assert run(world, tmp_path, "logs", "a", "b", "c").exit_code == 2


def test_json_has_one_id_and_one_form_of_time(tmp_path: Path) -> None:
    with recorded(ANSWERS) as world:
        listed = json.loads(run(world, tmp_path, "ops", "list", "--json").stdout)["operations"]
        models = json.loads(run(world, tmp_path, "models", "list", "--json").stdout)
    assert (listed[0]["id"], listed[0]["jobID"], listed[0]["name"]) == (JOB, JOB, "tiny")
    assert models[0]["created_at"] == "2026-01-01T00:00:00Z"
