"""Another program makes up requests from our own description of the routes: whatever it sends, nothing is our fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.e2e.asking import ask, token_of
from tests.e2e.conftest import Cluster

SCHEMATHESIS = Path(sys.executable).with_name("st")
EXAMPLES = 15  # of each route and kind of fault; the coverage of boundaries comes on top


@pytest.mark.parametrize("role", ["admin", "join", "user"])
def test_no_request_makes_a_frontend_answer_with_its_own_fault(cluster: Cluster, tmp_path: Path, role: str) -> None:
    status, described = ask(cluster, "GET", "/openapi.json")
    assert status == 200
    schema = tmp_path / "openapi.json"
    schema.write_text(json.dumps(described))
    token = cluster.cli("keys", "create").stdout.strip() if role == "user" else token_of(cluster, role)
    done = subprocess.run(
        [
            str(SCHEMATHESIS),
            "run",
            str(schema),
            *("--url", cluster.url),
            *("--header", f"Authorization: Bearer {token}"),
            *("--checks", "not_a_server_error"),
            *("--phases", "coverage,fuzzing"),
            *("--max-examples", str(EXAMPLES if role == "admin" else 3)),
            *("--seed", "11"),
            *("--request-timeout", "20"),
            *("--exclude-path", "/api/events"),  # it answers without an end
            *("--warnings", "off"),
            *("--generation-database", "none"),
            "--continue-on-failure",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "No issues found" in done.stdout
    assert "request.failed" not in (cluster.data / "logs" / "frontend.log").read_text()
    _, nodes = ask(cluster, "GET", "/api/nodes")
    assert [node["status"] for node in nodes if node["approved"]] == ["healthy"]
