"""Asking a cluster for what it refuses: by command and over HTTP, with the shape of every refusal looked at."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
from typing import Any

from tests.e2e.conftest import PROGRAM, Cluster


def sentence(told: str) -> str:
    """The one line that was said."""
    lines = told.strip().splitlines()
    assert len(lines) == 1, told
    assert lines[0].startswith("enginehouse: cannot "), told
    return lines[0]


def started_in_vain(*arguments: str, code: int, environment: dict[str, str] | None = None) -> str:
    """A program that should have gone on and ended instead; the last thing it said."""
    done = subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=30, env={**os.environ, **(environment or {})}
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return sentence(done.stderr.strip().splitlines()[-1])


def token_of(cluster: Cluster, role: str) -> str:
    return (cluster.data / f"{role}.token").read_text().strip()


def ask(
    cluster: Cluster,
    method: str,
    path: str,
    body: object = None,
    *,
    token: str | None = "admin",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    """Status and JSON of a plain HTTP request; `token` is a role of the cluster, a token, or None."""
    sent = dict(headers or {})
    if token is not None:
        sent["authorization"] = "Bearer " + (token_of(cluster, token) if token in ("admin", "join") else token)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    address = cluster.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=20)
    try:
        connection.request(method, path, content, sent)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def error_of(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """The error of an answer, after its shape was looked at."""
    assert answer[0] == status, answer
    error: dict[str, Any] = answer[1]["error"]
    assert set(error) - {"param"} == {"message", "type", "code", "request_id"}
    assert str(error["message"]).startswith("cannot "), error
    assert "Traceback" not in error["message"]
    assert len(error["message"]) < 300
    return error
