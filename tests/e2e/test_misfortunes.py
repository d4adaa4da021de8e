"""Bad luck, through real processes: ports that are taken, directories that cannot be used, no network, a cut file. What
can heal heals by itself; what cannot is told in one sentence, and nothing half done is left."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.asking import ask, error_of, started_in_vain, token_of
from tests.e2e.conftest import FAST, Cluster, Program, wait_for
from tests.ports import free_port

from enginehouse.host import disk

# Starting ----------------------------------------------------------------------------------------


def test_a_port_that_was_asked_for_and_is_busy_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    said = started_in_vain("up", "--data", str(tmp_path / "other"), "--port", str(cluster.port), code=1)
    assert f"127.0.0.1:{cluster.port}" in said
    assert "--port" in said
    assert not (tmp_path / "other" / "server.json").exists()


def test_a_busy_port_of_the_bus_is_an_error(cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = started_in_vain(
            "up", "--data", str(tmp_path / "other"), "--port", str(free_port()), "--nats-port", port, code=1
        )
    assert port in said


@pytest.mark.parametrize("command", ["up", "join"])
@pytest.mark.parametrize("what", ["a file", "not writable"])
def test_a_data_directory_that_cannot_be_used_is_named(
    cluster: Cluster, tmp_path: Path, command: str, what: str
) -> None:
    place = Path("/proc/enginehouse")  # not even root can write there
    if what == "a file":
        place = tmp_path / "file"
        place.write_text("mine")
    arguments = ("up",) if command == "up" else ("join", cluster.url, "--token", "t")
    said = started_in_vain(*arguments, "--data", str(place), code=1)
    assert f"cannot use {place} as data directory" in said
    assert "--data" in said
    if what == "a file":
        assert place.read_text() == "mine"


def test_a_second_up_on_the_same_data_is_refused(cluster: Cluster) -> None:
    assert cluster.parent is not None
    said = started_in_vain("up", "--data", str(cluster.data), "--port", str(free_port()), code=1)
    assert f"in use by process {cluster.parent.pid}" in said
    assert cluster.json("nodes", "list"), "the first one goes on"


def test_a_second_worker_on_the_same_data_is_refused(cluster: Cluster) -> None:
    holder = cluster.child("worker").pid
    token = {"ENGINEHOUSE_TOKEN": token_of(cluster, "join")}
    for command in (("worker", "--url", cluster.url), ("join", cluster.url)):
        said = started_in_vain(*command, "--data", str(cluster.data), code=1, environment=token)
        assert f"in use by process {holder}" in said


def test_a_data_directory_with_something_strange_in_it_is_named(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("lock", "logs", "join.token"):
        place = tmp_path / f"with-{name}"
        place.mkdir()
        if name == "logs":
            (place / name).touch()
        else:
            (place / name).mkdir()
        said = started_in_vain("up", "--data", str(place), "--port", str(free_port()), code=1)
        assert f"cannot use {place} as data directory: {name} in it: " in said


def test_up_ends_with_the_reason_of_a_child_that_cannot_start(cluster: Cluster, tmp_path: Path) -> None:
    ports = ("--port", str(free_port()), "--nats-port", str(free_port()))
    (tmp_path / "admin.token").touch()
    assert "admin token" in started_in_vain("up", "--data", str(tmp_path), *ports, code=2)
    (tmp_path / "admin.token").unlink()
    held = disk.Lock(tmp_path / "worker.lock", "test")
    said = started_in_vain("up", "--data", str(tmp_path), *ports, code=1)
    held.release()
    assert f"in use by process {os.getpid()}" in said
    assert not (tmp_path / "server.json").exists()
    assert not [one for one in psutil.process_iter() if str(tmp_path) in " ".join(command_line(one))]


def command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_default_port_moves_on_and_an_open_server_answers_nobody_without_a_credential(
    cluster: Cluster, tmp_path: Path
) -> None:
    host = own_address()
    open_cluster = Cluster(tmp_path)
    open_cluster.data = tmp_path / "with space"
    log = tmp_path / "up.log"
    with socket.create_server((host, 8080)) if is_free(host, 8080) else socket.socket():
        open_cluster.parent = Program("up", "--data", str(open_cluster.data), "--host", host, *FAST, log=log)
        try:
            wait_for("`up` to say where it is", lambda: "Enginehouse is up: http://" in log.read_text(), 60)
            said = log.read_text()
            open_cluster.url = json.loads((open_cluster.data / "server.json").read_text())["url"]
            assert f"Enginehouse is up: {open_cluster.url}" in said
            assert open_cluster.url.startswith(f"http://{host}:")
            assert not open_cluster.url.endswith(":8080")
            assert f"--data '{open_cluster.data}' run tiny-chat" in said
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/api/nodes")):
                assert error_of(ask(open_cluster, method, path, {}, token=None), 401)["code"] == "unauthenticated"
            assert ask(open_cluster, "GET", "/healthz", token=None)[0] == 200
            assert ask(open_cluster, "GET", "/v1/models")[0] == 200
        finally:
            assert open_cluster.parent.end() == 0


def own_address() -> str:
    """An address of this machine that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("127."):
                return str(one.address)
    return "0.0.0.0"


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


# Bad luck ----------------------------------------------------------------------------------------


def test_an_install_without_a_network_waits_says_why_and_goes_on_by_itself(cluster: Cluster) -> None:
    cache = cluster.root / "empty-cache"
    offline = {
        "UV_CACHE_DIR": str(cache),
        "UV_DEFAULT_INDEX": f"http://127.0.0.1:{free_port()}/simple",
        "UV_HTTP_RETRIES": "0",
    }
    cluster.join("poor", offline)
    wait_for("poor to be known", lambda: cluster.node("poor"))
    cluster.cli("nodes", "approve", "poor")
    cluster.wait_for_status("poor", "healthy")
    log = cluster.root / "install.log"
    watching = Program("--data", str(cluster.data), "backends", "install", "llama-cpp", "--node", "poor", log=log)
    wait_for("the reason to be shown", lambda: "the package index cannot be reached" in log.read_text())
    assert "check the network" in log.read_text()

    # Ctrl-C ends the watching, not the operation.
    assert watching.end(signal.SIGINT) == 130
    operation_id = cluster.operations()[0]["jobID"]
    assert f"enginehouse ops follow {operation_id}" in log.read_text()
    assert "Traceback" not in log.read_text()

    def is_waiting() -> dict[str, Any] | None:
        shown: dict[str, Any] = cluster.operation(operation_id)["nodes"][0]
        # A try that is due this moment has no time to wait any more.
        return shown if shown["status"] == "queued" and shown.get("due_in_seconds") else None

    row = wait_for("the next try to be waited for", is_waiting)
    assert row["reason"] == "upstream_error"
    assert row["error"].startswith("cannot install xllamacpp==")
    assert row["due_in_seconds"] > 0
    told = re.compile(r"; try [1-9]\d* of \d+ in \d")
    wait_for("the next try to be told", lambda: told.search(cluster.cli("ops", "show", operation_id).stdout))
    assert [path.name for path in (cluster.root / "poor" / "backends").iterdir()] == [".enginehouse"]
    assert not list((cluster.root / "poor" / "backends").glob(".enginehouse/staging/*"))

    assert cluster.workers["poor"].end() == 0
    cluster.join("poor")
    wait_for(
        "the same operation to succeed by itself",
        lambda: cluster.operation(operation_id)["status"] == "succeeded",
        60,
    )
    wait_for("the node to report it", lambda: cluster.has_backend("poor"))


def test_a_model_file_that_was_cut_off_is_placed_again(cluster: Cluster) -> None:
    question = ("--prompt", "What is the capital of France?")
    assert "Paris" in cluster.cli("run", "tiny-chat", "--node", "first", *question).stdout
    placed = next((cluster.data / "models").glob("tiny-chat/*.gguf"))
    whole = placed.read_bytes()
    cluster.cli("models", "unload", "tiny-chat")
    os.truncate(placed, 1000)
    done = cluster.cli("run", "tiny-chat", "--node", "first", *question)
    assert done.stdout.strip() == "The capital of France is Paris."
    assert placed.read_bytes() == whole
    assert not list(placed.parent.glob("*.part"))
