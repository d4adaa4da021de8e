"""A server that is lost and comes back from a backup, on both databases, while a worker goes on; and its secrets."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.asking import started_in_vain
from tests.e2e.conftest import Cluster, wait_for

MODEL = "tiny-chat"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.end()


def chat(cluster: Cluster, key: str) -> tuple[int, str]:
    """Status and node of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=30)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("x-enginehouse-node", "")
    except OSError:
        return 0, ""
    finally:
        connection.close()


def engines_of(cluster: Cluster, name: str) -> set[int]:
    """The processes below a worker."""
    return {one.pid for one in psutil.Process(cluster.workers[name].pid).children(recursive=True)}


def lose(cluster: Cluster, data: str) -> None:
    """Everything of the server dies, and the next one has another directory."""
    assert cluster.parent is not None
    cluster.parent.end(signal.SIGKILL)
    cluster.data = cluster.root / data


def test_a_worker_goes_on_with_a_server_from_a_backup_on_either_database(
    cluster: Cluster, postgres: Callable[..., str]
) -> None:
    cluster.up()
    cluster.join("second")
    wait_for("second to ask", lambda: cluster.node("second"))
    cluster.cli("nodes", "approve", "second", "--fingerprint", cluster.node("second")["fingerprint"])
    cluster.cli("models", "load", MODEL, "--node", "second")
    key = cluster.cli("keys", "create", "--name", "app").stdout.strip()
    admin = (cluster.data / "admin.token").read_text()
    phrase = cluster.root / "phrase"
    phrase.write_text("correct horse battery\n")
    file = str(cluster.root / "server.backup")
    cluster.cli("backup", file, "--passphrase-file", str(phrase))
    engines = engines_of(cluster, "second")
    assert engines
    # What happens after the backup is lost with the server; the worker must not mind.
    cluster.cli("tokens", "rotate", "join")
    server = {"ENGINEHOUSE_DATABASE_URL": postgres("template1")}

    lose(cluster, "from-sqlite")
    cluster.cli("restore", file, "--passphrase-file", str(phrase), "--database-url", *server.values())
    assert (cluster.data / "admin.token").read_text() == admin
    cluster.up(environment=server)
    wait_for("an answer of the same replica", lambda: chat(cluster, key) == (200, "second"))
    assert engines_of(cluster, "second") == engines, "no engine was started again"

    file = str(cluster.root / "second.backup")
    cluster.cli("backup", file, "--database-url", *server.values())
    lose(cluster, "from-postgres")
    cluster.cli("restore", file)
    cluster.up()
    wait_for("an answer of the same replica", lambda: chat(cluster, key) == (200, "second"))
    assert engines_of(cluster, "second") == engines
    # And it takes commands of the new server, whose generations it has not seen.
    cluster.wait_for_status("second", "healthy")
    cluster.cli("models", "unload", MODEL, "--node", "second")
    wait_for("its engine to stop", lambda: not engines_of(cluster, "second"))

    # A copy of the database alone is no backup: it says what is missing, and makes nothing in its place.
    assert cluster.parent is not None
    cluster.parent.end()
    alone = cluster.root / "alone"
    alone.mkdir()
    shutil.copy(cluster.data / "enginehouse.db", alone)
    said = started_in_vain("up", "--data", str(alone), "--port", str(cluster.port), code=1)
    for name in ("admin.token", "join.token", "node.key", "bus/account.seed"):
        assert name in said
        assert not (alone / name).exists()
    assert "enginehouse restore FILE" in said
    (cluster.data / "bus" / "account.seed").unlink()
    one_gone = started_in_vain("up", "--data", str(cluster.data), "--port", str(cluster.port), code=1)
    assert f"bus/account.seed is missing in {cluster.data}" in one_gone
    assert "--new-keys" in one_gone
    cluster.up("--new-keys")


def told_by(processes: list[psutil.Process]) -> Iterator[tuple[str, Any]]:
    for process in processes:
        yield f"arguments of {process.name()}", " ".join(process.cmdline())


def test_no_token_is_in_a_banner_a_log_or_the_list_of_processes(cluster: Cluster) -> None:
    parent = cluster.up()
    cluster.join("second")
    wait_for("second to ask", lambda: cluster.node("second"))
    cluster.cli("nodes", "approve", "second")
    key = cluster.cli("keys", "create", "--name", "app").stdout.strip()
    chat(cluster, key)
    cluster.cli("tokens", "rotate", "admin")
    secrets = {name: (cluster.data / name).read_text().strip() for name in ("admin.token", "join.token", "node.key")}
    secrets |= {"API key": key}
    secrets |= {seed.name: seed.read_text().strip() for seed in (cluster.data / "bus").glob("*.seed")}
    assert len(secrets) == 7
    processes = [psutil.Process(parent.pid), *parent.descendants(), psutil.Process(cluster.workers["second"].pid)]
    assert len(processes) >= 5
    places = dict(told_by(processes)) | {"banner": parent.output(), "join": cluster.workers["second"].output()}
    places |= {path.name: path.read_text(errors="replace") for path in (cluster.data / "logs").glob("*.log*")}
    assert {"banner", "frontend.log", "worker.log", "nats.log"} <= set(places)
    told = [
        f"{name} in {place}" for place, text in places.items() for name, secret in secrets.items() if secret in text
    ]
    assert told == []
    # Nor in the environment of the server's programs, where its files are named.
    environments = [" ".join(one.environ().values()) for one in [psutil.Process(parent.pid), *parent.descendants()]]
    assert not any(secret in text for text in environments for secret in secrets.values())
