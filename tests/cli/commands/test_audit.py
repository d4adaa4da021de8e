"""What `audit` asks for and shows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.recorded import Answer, recorded, run

FROM = {"address": "10.0.0.9", "status": 401, "error": "unauthenticated"}
ROWS = [
    {
        "id": "3",
        "at": "2026-01-02T10:00:00.25Z",
        "who": "laptop",
        "role": "admin",
        "address": "10.0.0.9",
        "method": "POST",
        "path": "/api/nodes/11111111-0000-4000-8000-000000000001/drain",
        "target": "attic",
        "status": 202,
        "operation_id": "3f2a9c1d-0000-4000-8000-000000000001",
        "new_field": 1,
    },
    {**FROM, "id": "2", "at": "2026-01-02T09:00:00Z", "method": "POST", "path": "/api/session"},
    {**FROM, "id": "1", "at": "2026-01-02T08:00:00Z", "summary": "Further ones.", "count": 25},
]


def test_each_record_has_its_line(tmp_path: Path) -> None:
    with recorded({"GET /api/audit?limit=50": Answer({"audit": ROWS, "next": "1"})}) as world:
        result = run(world, tmp_path, "audit")
    assert result.exit_code == 0, result.stderr
    assert [line.split("\t") for line in result.stdout.splitlines()] == [
        [
            *("2026-01-02 10:00:00", "laptop", "admin", "10.0.0.9"),
            "POST /api/nodes/11111111-0000-4000-8000-000000000001/drain (attic)",
            *("202", "3f2a9c1d"),
        ],
        ["2026-01-02 09:00:00", "-", "-", "10.0.0.9", "POST /api/session", "401 unauthenticated", ""],
        [
            "2026-01-02 08:00:00",
            "-",
            "-",
            "10.0.0.9",
            "Further ones.",
            "401 unauthenticated (25 times)",
            "",
        ],
    ]
    assert result.stderr.strip() == "more: --before 1"


def test_filters_are_passed_on_and_programs_get_all_of_it(tmp_path: Path) -> None:
    answer = {"audit": ROWS}
    asked = "GET /api/audit?limit=5&who=a+b&path=%2Fapi%2Ftokens&before=9"
    with recorded({asked: Answer(answer)}) as world:
        words = ("--limit", "5", "--who", "a b", "--path", "/api/tokens", "--before", "9")
        assert json.loads(run(world, tmp_path, "audit", *words, "--json").stdout) == answer
