"""What the doctor finds from outside: here, on the way to a server, on a worker, and with which exit code."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from tests.cli.recorded import Answer, recorded, refused, run

from enginehouse.cli.client import reaching
from enginehouse.cli.client.reaching import reach_server
from enginehouse.cli.commands import doctor_here
from enginehouse.cli.main import program
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.finding import LEAST_DISK_BYTES, Finding, ReachRecord, clock_finding, disk_finding
from enginehouse.host import disk
from enginehouse.host.hardware import RUN_FILE_VARIABLE
from enginehouse.worker.backends.trees import Trees

REACHED = {"HEAD /healthz": Answer({}), "GET /readyz": Answer({"status": "ok"})}
GOOD = {"area": "nats", "level": "ok", "message": "connected", "advice": ""}
BAD = {"area": "node", "level": "problem", "message": "third is offline", "advice": "Start its worker"}


def looked(*findings: dict[str, str]) -> Answer:
    return Answer({"needs_person": any(one["level"] == "problem" for one in findings), "findings": list(findings)})


def here(tmp_path: Path, *arguments: str) -> Result:
    names = ("ENGINEHOUSE_URL", "ENGINEHOUSE_TOKEN", "ENGINEHOUSE_CONTEXT", "ENGINEHOUSE_CAPABILITY")
    environ = {**dict.fromkeys(names, ""), "XDG_CONFIG_HOME": str(tmp_path / "config"), "COLUMNS": "200"}
    return CliRunner().invoke(program, ["doctor", "--data", str(tmp_path / "data"), *arguments], env=environ)


def test_where_nothing_needs_anybody_it_says_so_and_exits_with_0(tmp_path: Path) -> None:
    with recorded({**REACHED, "GET /api/doctor": looked(GOOD)}) as world:
        result = run(world, tmp_path, "doctor")
    assert result.exit_code == 0, result.stdout
    assert "nats      connected" in result.stdout
    assert result.stderr.endswith("nothing needs you\n")


def test_what_needs_somebody_has_its_advice_and_the_exit_code_is_1(tmp_path: Path) -> None:
    with recorded({**REACHED, "GET /api/doctor": looked(GOOD, BAD)}) as world:
        result = run(world, tmp_path, "doctor")
        found = json.loads(run(world, tmp_path, "doctor", "--json").stdout)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    at = lines.index("✗ node      third is offline")
    assert lines[at + 1].strip() == "→ Start its worker"
    assert "1 thing needs you" in result.stderr
    assert found["needs_person"] is True
    assert BAD in found["findings"]


def test_much_that_is_all_right_is_counted_unless_all_is_asked_for(tmp_path: Path) -> None:
    nodes = [{"area": "node", "level": "ok", "message": f"node-{number} is healthy"} for number in range(9)]
    with recorded({**REACHED, "GET /api/doctor": looked(*nodes, BAD)}) as world:
        few, every = run(world, tmp_path, "doctor"), run(world, tmp_path, "doctor", "--all")
    assert "node      9 checks passed" in few.stdout
    assert "node-3" not in few.stdout
    assert "third is offline" in few.stdout
    assert "node-3 is healthy" in every.stdout


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"HEAD /healthz": Answer({})}, "is not ready"),
        (
            {"HEAD /healthz": Answer({}), "GET /readyz": Answer({"reasons": ["the disk of /x is full"]}, 503)},
            "is not ready: the disk of /x is full",
        ),
        ({**REACHED, "GET /api/doctor": refused(401, "cannot accept this token", "unauthenticated")}, "this token"),
    ],
)
def test_a_server_that_does_not_do_its_part_is_a_finding(tmp_path: Path, answers: dict[str, Answer], said: str) -> None:
    with recorded(answers) as world:
        result = run(world, tmp_path, "doctor")
    assert (result.exit_code, said in result.stdout) == (1, True), result.stdout


def test_a_server_that_is_away_is_a_finding_and_this_machine_is_looked_at_all_the_same(tmp_path: Path) -> None:
    with recorded({}) as world:
        pass
    result = run(world, tmp_path, "doctor")
    assert result.exit_code == 1
    assert "disk " in result.stdout
    assert "cannot reach the frontend" in result.stdout


def test_an_older_server_is_no_problem(tmp_path: Path) -> None:
    with recorded(REACHED) as world:
        result = run(world, tmp_path, "doctor")
    assert (result.exit_code, "the server is older" in result.stdout) == (0, True)


def test_without_a_server_the_machine_is_looked_at_and_busy_ports_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        monkeypatch.setattr(doctor_here, "PORTS", {port: "the frontend"})
        result = here(tmp_path)
    assert result.exit_code == 0
    assert f"in use by other programs: {port} (the frontend)" in result.stdout
    assert "Start one: enginehouse up" in result.stdout


@contextlib.contextmanager
def greeting(words: bytes) -> Iterator[socket.socket]:
    """A server that says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as one:
                        one.sendall(words)

        threading.Thread(target=greet, daemon=True).start()
        try:
            yield listening
        finally:
            listening.shutdown(socket.SHUT_RDWR)


def test_a_nats_server_that_hangs_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hangs, greeting(b"HTTP/1.1 400 ") as other:
        for one in (hangs, other):
            (found,) = reaching.reach_nats(f"nats://127.0.0.1:{one.getsockname()[1]}")
            assert (found.level, "does not answer as NATS does" in found.message) == ("problem", True)


def test_a_worker_checks_its_way_to_its_server_by_its_own_record(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with recorded(REACHED) as world, greeting(b"INFO {}\r\n") as nats:
        record = {"id": "x", "name": "attic", "frontends": [world.url]}
        record["nats_url"] = f"nats://127.0.0.1:{nats.getsockname()[1]}"
        (tmp_path / "data" / "node.json").write_text(json.dumps(record))
        stopped = here(tmp_path)
        assert stopped.exit_code == 1
        assert f"Start it: enginehouse join {world.url} --name attic" in stopped.stdout
        lock = disk.Lock(tmp_path / "data" / "worker.lock", "start a worker")
        result = here(tmp_path)
        assert result.exit_code == 0, result.stdout
        waiting = {"reason": "cannot accept this token: it is unknown here", "since": 1.0}
        (tmp_path / "data" / "waiting.json").write_text(json.dumps(waiting))
        refused_there = here(tmp_path)
        assert refused_there.exit_code == 1
        assert "waits to join its server: cannot accept this token" in refused_there.stdout
        (tmp_path / "data" / "waiting.json").unlink()
        lock.release()
        assert f"{world.url} answers" in result.stdout
        assert "NATS answers" in result.stdout
        assert "the worker of attic runs here" in result.stdout
        assert "whether the server reaches this machine (attic)" in result.stdout
        shut = Finding(area="reach", level="problem", message="attic is not reached", advice="Open its ports")
        kept = ReachRecord(at=time.time() - 61, finding=shut)
        (tmp_path / "data" / "reach.json").write_bytes(msgspec.json.encode(kept))
        result = here(tmp_path)
        assert (result.exit_code, "attic is not reached (asked 1m ago)" in result.stdout) == (1, True)
        (tmp_path / "data" / "reach.json").unlink()
    away = here(tmp_path)
    assert away.exit_code == 1
    assert "NATS is not reached" in away.stdout
    assert "cannot reach the frontend" in away.stdout


def test_a_server_that_does_not_run_is_not_taken_for_a_machine_that_joined_itself(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    record = {"id": "x", "name": "desk", "frontends": ["http://127.0.0.1:9"], "nats_url": "nats://127.0.0.1:9"}
    (tmp_path / "data" / "node.json").write_text(json.dumps(record))
    (tmp_path / "data" / "admin.token").touch()
    result = here(tmp_path)
    assert result.exit_code == 1
    assert "Start it as before: enginehouse up" in result.stdout
    assert result.stdout.count("✗") == 1
    assert "enginehouse join" not in result.stdout


def test_a_directory_that_this_user_may_not_write_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    assert "may not write there" in here(tmp_path).stdout


def test_clocks_that_differ_are_a_problem_either_way() -> None:
    assert clock_finding("a", "b", 3.0).level == "ok"
    assert clock_finding("a", "b", 90.0).message == "a is 90 s ahead of b"
    assert clock_finding("a", "b", -90.0).message == "a is 90 s behind b"
    answers = {"HEAD /healthz": Answer({}, headers={"Date": formatdate(time.time() - 600)})}
    with recorded({**answers, "GET /readyz": Answer({})}) as world:
        found = reach_server(world.url)
    assert [one.area for one in found if one.level == "problem"] in ([], ["clock"])


def test_a_disk_is_judged_by_what_is_left() -> None:
    assert disk_finding("x", LEAST_DISK_BYTES - 1, 10**12, "").level == "problem"
    assert disk_finding("x", 10**10, 10**12, "").level == "note"
    assert disk_finding("x", 10**11, 10**12, "").level == "ok"


def test_builds_that_the_driver_cannot_run_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "backends").mkdir(parents=True)
    made = InstalledBackend(name="cuda13-llama-cpp", is_system=False, is_meta=False, uri="quay.io/x/y:cuda13")
    monkeypatch.setattr(Trees, "list_installed", lambda _: (made,))
    monkeypatch.setenv(RUN_FILE_VARIABLE, str(tmp_path / "none"))
    monkeypatch.setenv("ENGINEHOUSE_CAPABILITY", "nvidia-cuda-12")
    found = doctor_here._graphics(tmp_path / "data")
    assert [one.message for one in found if one.level == "problem"] == [
        "cuda13-llama-cpp cannot run here: it is built for CUDA 13, this machine has 12"
    ]
    monkeypatch.setenv("ENGINEHOUSE_CAPABILITY", "nvida")
    assert "it must be one of default" in doctor_here._graphics(tmp_path / "data")[0].message
