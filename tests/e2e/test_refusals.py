"""Bad input, through real processes: one sentence that says what and what to do, the right status or exit code, and
nothing half done."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from tests.e2e.asking import ask, error_of, sentence, started_in_vain, token_of
from tests.e2e.conftest import PROGRAM, Cluster

BAD_NAMES = ("*", ">", "a/b", "..", "a b", "n" * 300)


def refused(cluster: Cluster, *arguments: str, code: int) -> str:
    """A command that was refused without saying or doing anything else."""
    done = cluster.cli(*arguments, code=code)
    assert done.stdout == ""
    return sentence(done.stderr)


@pytest.fixture
def untouched(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, of which no operation, node or model may have come of the test that asked for it."""
    before = what_is_known(cluster)
    yield cluster
    assert what_is_known(cluster) == before


def what_is_known(cluster: Cluster) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    _, operations = ask(cluster, "GET", "/api/operations?all=true&limit=500")
    _, nodes = ask(cluster, "GET", "/api/nodes")
    _, models = ask(cluster, "GET", "/api/models")
    return (
        [one["jobID"] for one in operations["operations"]],
        [one["id"] for one in nodes],
        [(one["name"], one["state"]) for one in models],
    )


# Tokens ------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(untouched: Cluster) -> None:
    said = refused(untouched, "--token", "eh-admin-wrong", "nodes", "list", code=4)
    assert "cannot accept this token" in said
    assert "eh-admin-wrong" not in said
    for method, path in (
        ("GET", "/api/nodes"),
        ("POST", "/api/operations"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
    ):
        assert error_of(ask(untouched, method, path, {}, token="eh-user-wrong"), 401)["code"] == "unauthenticated"
    # On loopback a key of another program opens what is open without one, and nothing more.
    assert ask(untouched, "GET", "/v1/models", {}, token="sk-of-another-program")[0] == 200
    for method, path in (("GET", "/api/nodes"), ("POST", "/api/operations"), ("GET", "/metrics")):
        error = error_of(ask(untouched, method, path, {}, token="sk-of-another-program"), 401)
        assert error["code"] == "unauthenticated"


def test_a_missing_token_is_refused(untouched: Cluster, tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "--data", str(tmp_path), "--url", untouched.url, "nodes", "list"], capture_output=True, text=True
    )
    assert done.returncode == 4
    assert "cannot answer without a token" in sentence(done.stderr)
    for method, path in (("GET", "/api/nodes"), ("POST", "/api/operations"), ("GET", "/api/events")):
        assert error_of(ask(untouched, method, path, token=None), 401)["code"] == "unauthenticated"


@pytest.mark.parametrize("role", ["join", "user"])
def test_a_token_of_another_role_opens_nothing_more(untouched: Cluster, role: str) -> None:
    token = token_of(untouched, "join")
    if role == "user":
        token = ask(untouched, "POST", "/api/tokens", {"role": "user", "name": "small"})[1]["token"]
    for method, path in (("GET", "/api/nodes"), ("POST", "/api/tokens"), ("POST", "/api/models/tiny-chat/load")):
        assert error_of(ask(untouched, method, path, {}, token=token), 403)["code"] == "forbidden"
    assert refused(untouched, "--token", token, "nodes", "list", code=4)


def test_joining_with_a_wrong_token_ends_with_the_reason(untouched: Cluster, tmp_path: Path) -> None:
    place = tmp_path / "node"
    said = started_in_vain(
        "join",
        untouched.url,
        "--data",
        str(place),
        "--name",
        "stranger",
        code=4,
        environment={"ENGINEHOUSE_TOKEN": "no"},
    )
    assert "token" in said
    assert [path.name for path in place.glob("backends/*")] == [".enginehouse"]


def test_joining_without_a_token_is_refused_at_once(untouched: Cluster, tmp_path: Path) -> None:
    said = started_in_vain("join", untouched.url, "--data", str(tmp_path / "node"), "--name", "stranger", code=2)
    assert "tokens create --role join" in said
    assert not (tmp_path / "node").exists()


# Names -------------------------------------------------------------------------------------------


def test_what_does_not_exist_is_not_found(untouched: Cluster) -> None:
    assert "'nope'" in refused(untouched, "backends", "install", "nope", code=5)
    assert "nope" in refused(untouched, "backends", "delete", "nope", "--all", code=5)
    assert "nope" in refused(untouched, "backends", "install", "llama-cpp", "--node", "nope", code=5)
    assert "nope" in refused(untouched, "models", "load", "nope", code=5)
    assert "nope" in refused(untouched, "models", "unload", "nope", code=5)
    assert "nope" in refused(untouched, "models", "load", "tiny-chat", "--node", "nope", code=5)
    assert "nope" in refused(untouched, "run", "nope", "--prompt", "hello", code=5)
    assert "nope" in refused(untouched, "nodes", "show", "nope", code=5)
    assert "nope" in refused(untouched, "nodes", "approve", "nope", code=5)
    assert "nope" in refused(untouched, "ops", "show", "nope", code=5)


def test_what_does_not_exist_is_404_over_http(untouched: Cluster) -> None:
    request = {"kind": "install", "name": "nope"}
    assert error_of(ask(untouched, "POST", "/api/operations", request), 404)["code"] == "not_found"
    request = {"kind": "install", "name": "llama-cpp", "nodes": ["nope"]}  # type: ignore[dict-item]
    assert error_of(ask(untouched, "POST", "/api/operations", request), 404)["code"] == "not_found"
    chat = {"model": "nope", "messages": []}
    assert error_of(ask(untouched, "POST", "/v1/chat/completions", chat), 404)["code"] == "model_not_found"
    assert error_of(ask(untouched, "GET", "/v1/models/nope"), 404)["code"] == "model_not_found"
    assert error_of(ask(untouched, "POST", "/api/models/nope/load"), 404)["code"] == "model_not_found"
    assert error_of(ask(untouched, "GET", "/api/operations/nope"), 404)["code"] == "not_found"
    assert error_of(ask(untouched, "GET", "/no/such/route"), 404)["code"] == "not_found"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_cannot_be_one_is_refused_by_every_command(untouched: Cluster, name: str, tmp_path: Path) -> None:
    assert "backend name" in refused(untouched, "backends", "install", name, code=2)
    assert "node name" in refused(untouched, "backends", "install", "llama-cpp", "--node", name, code=2)
    assert "node name" in refused(untouched, "nodes", "approve", name, code=2)
    place = tmp_path / "node"
    said = started_in_vain("join", untouched.url, "--token", "t", "--data", str(place), "--name", name, code=2)
    assert "node name" in said
    assert "--name" in said
    assert not place.exists()


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_name_that_cannot_be_one_is_refused_over_http(untouched: Cluster, name: str) -> None:
    for kind in ("install", "upgrade", "delete"):
        request = {"kind": kind, "name": name}
        assert error_of(ask(untouched, "POST", "/api/operations", request), 422)["code"] == "invalid_name"
    node = {"name": name, "address": "127.0.0.1:50051", "token": token_of(untouched, "join")}
    assert error_of(ask(untouched, "POST", "/api/node/register", node, token="join"), 422)["code"] == "invalid_name"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_strange_model_is_not_there_whatever_its_name(untouched: Cluster, name: str) -> None:
    """Models may be called almost anything, so a strange name is merely unknown."""
    chat = {"model": name, "messages": [{"role": "user", "content": "hello"}]}
    assert error_of(ask(untouched, "POST", "/v1/chat/completions", chat), 404)["code"] == "model_not_found"
    loaded = ask(untouched, "POST", f"/api/models/{quote(name, safe='')}/load")
    if len(name) > 255:
        assert error_of(loaded, 422)["code"] == "invalid_name"
    else:
        assert error_of(loaded, 404)["code"] == "model_not_found"


@pytest.mark.parametrize("name", BAD_NAMES)
def test_a_strange_node_is_not_there_whatever_its_name(untouched: Cluster, name: str) -> None:
    request = {"kind": "install", "name": "llama-cpp", "nodes": [name]}
    assert error_of(ask(untouched, "POST", "/api/operations", request), 404)["code"] == "not_found"
    assert error_of(ask(untouched, "POST", "/api/models/tiny-chat/load", {"node": name}), 404)["code"] == "not_found"
    assert error_of(ask(untouched, "GET", f"/api/nodes/{quote(name, safe='')}"), 404)["code"] == "not_found"


# Bodies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_not_what_the_route_takes_is_malformed(untouched: Cluster, body: bytes) -> None:
    for path in ("/api/operations", "/v1/chat/completions", "/api/models/tiny-chat/load"):
        assert error_of(ask(untouched, "POST", path, body), 400)["code"] == "invalid_json"
    assert error_of(ask(untouched, "POST", "/api/node/register", body, token="join"), 400)["code"] == "invalid_json"


def test_a_request_without_a_model_is_told_where_to_find_one(untouched: Cluster) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        error = error_of(ask(untouched, "POST", path, {"messages": []}), 422)
        assert error["param"] == "model"
        assert "/v1/models" in error["message"]


def test_a_body_that_is_too_large_is_refused(untouched: Cluster) -> None:
    large = b'{"kind":"install","name":"' + b"n" * 1024 * 1024 + b'"}'
    assert error_of(ask(untouched, "POST", "/api/operations", large), 413)["code"] == "too_large"
    announced = {"content-length": str(33 * 1024 * 1024)}
    answer = ask(untouched, "POST", "/v1/chat/completions", b"{", headers=announced)
    assert error_of(answer, 413)["code"] == "too_large"


def test_a_field_that_nobody_knows_is_refused_from_people(untouched: Cluster) -> None:
    request = {"kind": "install", "name": "llama-cpp", "node": "first"}
    assert "node" in error_of(ask(untouched, "POST", "/api/operations", request), 400)["message"]
    assert error_of(ask(untouched, "POST", "/api/operations", {"kind": "explode", "name": "x"}), 400)
