"""`enginehouse service`: what is written where, what is refused, and where secrets are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.outside import tool

PROGRAM = str(Path(sys.executable).with_name("enginehouse"))
# Stands for the service manager of this user: it writes down what it is asked, and answers like one that runs.
SYSTEMCTL = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
*is-system-running*) echo running ;;
*show*) printf 'ActiveState=active\\nUnitFileState=enabled\\nMainPID=7\\n' ;;
esac
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "home"
    made.mkdir()
    return made


@pytest.fixture
def service(tmp_path: Path, home: Path) -> Run:
    """Runs the command as a plain user would see it: root's units are those of the system, which no test may touch."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text(SYSTEMCTL)
    (programs / "systemctl").chmod(0o755)

    def run(*words: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        script = (
            "import os, sys; os.geteuid = lambda: 1000\n"
            "from enginehouse.host import units\n"
            f"units._BOOTED = __import__('pathlib').Path({str(home)!r})\n"
            "from enginehouse.cli.main import main; main()"
        )
        environment = {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls")}
        done = subprocess.run(
            [sys.executable, "-c", script, "service", *words],
            capture_output=True,
            text=True,
            env={**environment, **variables},
            timeout=60,
        )
        assert done.returncode == code, done.stderr
        return done

    return run


def test_a_worker_is_installed_with_its_options_and_its_token_in_a_file(
    service: Run, home: Path, tmp_path: Path
) -> None:
    token, data = tmp_path / "token", tmp_path / "data"
    token.write_text("eh-join-secret\n")
    options = ("--url", "http://server:8080", "--name", "attic", "--labels", "room=attic", "--data", str(data))
    done = service("install", "worker", *options, "--token", f"@{token}", "--start", PIP_INDEX_URL="https://u:p@i/")
    unit = home / ".config/systemd/user/enginehouse-worker.service"
    text = unit.read_text()
    assert f"installed {unit} and started it" in done.stdout
    assert f'"worker" "--data" "{data}" "--url" "http://server:8080" "--name" "attic"' in text
    assert "eh-join-secret" not in text + done.stdout + done.stderr
    assert "u:p@" not in text
    for name, content in (("join.token", "eh-join-secret\n"), ("worker.env", 'PIP_INDEX_URL="https://u:p@i/"\n')):
        assert (data / name).read_text() == content
        assert (data / name).stat().st_mode & 0o777 == 0o600
    calls = (tmp_path / "calls").read_text()
    assert [word for word in ("daemon-reload", "enable", "restart") if f"{word}" not in calls] == []
    (listed,) = json.loads(service("status", "--json").stdout)
    assert (listed["program"], listed["active"], listed["pid"]) == ("worker", "active", 7)
    assert "the data directory is kept" in service("remove", "worker").stdout
    assert not unit.exists()
    assert data.exists()
    assert "disable --now enginehouse-worker.service" in (tmp_path / "calls").read_text()


def test_secrets_of_a_frontend_go_to_a_file_and_never_to_the_unit(service: Run, home: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    service(
        *("install", "frontend", "--nats-url", "nats://user:bus-word@bus", "--no-start", "--data", str(data)),
        ENGINEHOUSE_DATABASE_URL="postgresql://user:base-word@base/db",
        ENGINEHOUSE_HEARTBEAT="5s",
    )
    text = (home / ".config/systemd/user/enginehouse-frontend.service").read_text()
    assert "-word" not in text
    kept = (data / "frontend.env").read_text()
    assert 'ENGINEHOUSE_NATS_URL="nats://user:bus-word@bus"\n' in kept
    assert 'ENGINEHOUSE_DATABASE_URL="postgresql://user:base-word@base/db"\n' in kept
    assert 'ENGINEHOUSE_HEARTBEAT="5s"\n' in kept
    assert f"EnvironmentFile={data}/frontend.env" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("worker", "--url", "http://server:8080"), "without a join token"),
        (("frontend",), "without a NATS server"),
        (("up", "--port", "808000"), "a port is a number from 1 to 65535"),
        (("up", "--run-as", "somebody"), "only root can"),
        (("worker", "--url", "server:8080", "--token", "x"), "cannot use 'server:8080'"),
    ],
)
def test_what_could_not_start_is_refused_and_nothing_is_written(
    service: Run, home: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    done = service("install", *words, "--data", str(tmp_path / "data"), code=2)
    assert said in done.stderr
    assert list(home.rglob("*.service")) == []
    assert not (tmp_path / "data").exists()


def test_the_unit_can_be_looked_at_first(service: Run, home: Path, tmp_path: Path) -> None:
    done = service("install", "up", "--host", "0.0.0.0", "--data", str(tmp_path / "data"), "--print")
    assert "KillMode=mixed" in done.stdout
    assert '"up" "--data"' in done.stdout
    assert list(home.rglob("*")) == []


def test_the_data_directory_of_a_server_is_not_given_to_a_worker(service: Run, tmp_path: Path) -> None:
    (tmp_path / "admin.token").write_text("x\n")
    words = ("install", "worker", "--url", "http://server:8080", "--token", "new", "--data", str(tmp_path))
    assert "is the data directory of a server" in service(*words, code=1).stderr
    assert not (tmp_path / "join.token").exists()


def test_up_is_not_installed_beside_a_worker(service: Run, tmp_path: Path) -> None:
    service("install", "up", "--data", str(tmp_path / "one"), "--no-start")
    words = ("install", "worker", "--url", "http://server:8080", "--token", "x", "--data", str(tmp_path / "two"))
    assert "`enginehouse service remove up`" in service(*words, code=1).stderr


def test_what_is_not_installed_is_not_listed_and_cannot_be_removed(service: Run) -> None:
    assert "there is no " in service("remove", "up", code=5).stderr
    assert service("status").stdout == ""


@pytest.mark.parametrize("program", ["up", "frontend", "worker"])
def test_systemd_accepts_what_is_printed(service: Run, tmp_path: Path, program: str) -> None:
    more = {
        "up": ("--host", "0.0.0.0", "--allow-host", "a", "--allow-host", "b"),
        "frontend": ("--nats-url", "nats://bus:4222"),
        "worker": ("--url", "http://server:8080", "--token", "x", "--name", "attic"),
    }[program]
    text = service("install", program, *more, "--data", str(tmp_path), "--print").stdout
    path = tmp_path / f"enginehouse-{program}.service"
    path.write_text(text)
    asked = [tool("systemd-analyze"), "verify", "--user", "--man=no", str(path)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=60)
    assert [line for line in (done.stdout + done.stderr).splitlines() if "enginehouse" in line] == []
