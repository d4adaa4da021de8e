"""The script that joins a machine, run by the shell of the system: what it refuses and checks, and a second run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path

import pytest
import uv

from enginehouse import __version__
from enginehouse.host.program import Program, read_program
from enginehouse.settings.programs import default_data_directory

TOKEN = "eh-join-of-the-test"


class Serving(ThreadingHTTPServer):
    files: dict[str, bytes]
    missing_bytes = 0  # of every answer, at its end


class Files(BaseHTTPRequestHandler):
    server: Serving

    def do_GET(self) -> None:
        content = self.server.files.get(self.path)
        self.send_response(404 if content is None else 200)
        self.send_header("content-length", str(len(content or b"") + self.server.missing_bytes))
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def made() -> Program:
    return read_program()


@pytest.fixture
def server(made: Program) -> Iterator[Serving]:
    with Serving(("127.0.0.1", 0), Files) as found:
        found.files = {"/join.sh": made.script, f"/join/{made.wheel_name}": made.wheel}
        thread = threading.Thread(target=found.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()


class Machine:
    """A home of its own and a PATH with nothing of ours."""

    def __init__(self, root: Path, made: Program, url: str) -> None:
        self.home, self.program = root / "home", root / "program"
        self.url, self.data = url, root / "data"
        self.home.mkdir()
        self.programs = root / "bin"
        self.programs.mkdir()
        (self.programs / "python3").symlink_to(sys.executable)
        self.script = root / "join.sh"
        self.script.write_bytes(made.script)

    def run(
        self, *words: str, given: str = "", path: str = "", code: int | None = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
        done = subprocess.run(
            ["/bin/sh", str(self.script), *words, "--program", str(self.program)],
            input=given,
            capture_output=True,
            text=True,
            timeout=120,
            start_new_session=True,  # without a terminal
            env={**kept, "HOME": str(self.home), "PATH": path or f"{self.programs}:/usr/bin:/bin", **variables},
        )
        assert code is None or done.returncode == code, done.stderr
        return done


@pytest.fixture
def machine(tmp_path: Path, made: Program, server: Serving) -> Machine:
    return Machine(tmp_path, made, f"http://127.0.0.1:{server.server_port}")


def with_uv(machine: Machine) -> None:
    """The packages come from uv's cache then, so that this takes seconds."""
    (machine.programs / "uv").symlink_to(uv.find_uv_bin())


def cache() -> str:
    asked = [uv.find_uv_bin(), "cache", "dir"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def test_it_says_how_it_is_used_and_that_the_address_is_missing(machine: Machine) -> None:
    assert "usage: join.sh URL" in machine.run("--help").stdout
    assert "the address of the server is missing" in machine.run(code=1).stderr
    assert "write http://server:8080" in machine.run("server:8080", code=1).stderr


def test_a_token_in_the_command_is_refused(machine: Machine) -> None:
    done = machine.run(machine.url, "--token", TOKEN, code=1)
    assert "can be read by other users" in done.stderr
    assert TOKEN not in done.stderr
    assert not machine.program.exists()


def test_a_machine_without_a_new_python_is_told_so(machine: Machine, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    for name in ("sh", "cat", "id", "mktemp", "rm", "mkdir"):
        (old / name).symlink_to(shutil.which(name) or name)
    (old / "python3").write_text("#!/bin/sh\nexit 1\n")
    (old / "python3").chmod(0o755)
    assert "there is no Python 3.11 or newer" in machine.run(machine.url, path=str(old), code=1).stderr


def test_a_wheel_with_other_bytes_is_not_installed(machine: Machine, server: Serving, made: Program) -> None:
    server.files[f"/join/{made.wheel_name}"] = made.wheel + b"more"
    done = machine.run(machine.url, "--install-only", code=1)
    assert "do not trust it" in done.stderr
    assert made.wheel_sha256 in done.stderr
    assert list(machine.program.rglob("python*")) == []


def test_a_server_that_is_gone_is_named_and_the_next_one_is_asked(machine: Machine, server: Serving) -> None:
    server.files.clear()
    assert f"cannot fetch {machine.url}/join/" in machine.run(machine.url, "--install-only", code=1).stderr
    assert "Connection refused" in machine.run("http://127.0.0.1:9", "--install-only", code=1).stderr


def test_an_answer_that_is_cut_off_is_said_and_the_next_server_is_asked(machine: Machine, server: Serving) -> None:
    server.missing_bytes = 10
    cut = machine.run(f"{machine.url},http://127.0.0.1:9", "--install-only", code=1)
    assert "Connection refused" in cut.stderr
    cut = machine.run(machine.url, "--install-only", code=1)
    assert f"cannot fetch {machine.url}/join/" in cut.stderr
    assert "Traceback" not in cut.stderr


@pytest.mark.slow
def test_pip_is_found_below_a_directory_with_a_space_in_its_name(machine: Machine, tmp_path: Path) -> None:
    machine.program = tmp_path / "a program"
    temporary = tmp_path / "a directory"
    temporary.mkdir()
    variables = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "TMPDIR": str(temporary)}
    done = machine.run(machine.url, "--install-only", code=1, **variables)
    assert "No matching distribution" in done.stderr


def test_no_package_of_the_program_has_to_be_built() -> None:
    """What is built needs tools that no hash covers, and that a machine without internet has not. A package without a
    wheel has one file in the lock, that of its source.
    """
    packages = re.split(r"(?m)^(?=\S+==)", (files("enginehouse") / "requirements.txt").read_text())[1:]
    assert len(packages) > 20
    assert [one[:200] for one in packages if one.count("--hash=sha256:") < 2] == []


def test_a_token_is_asked_for_before_anything_is_installed(machine: Machine, server: Serving) -> None:
    done = machine.run(machine.url, code=1)
    assert "a join token is needed" in done.stderr
    assert list(machine.program.iterdir()) == []


@pytest.mark.parametrize("shared", ["", "relative", "{home}/shared"])
def test_the_data_directory_is_that_of_every_command(machine: Machine, server: Serving, shared: str) -> None:
    server.files.clear()  # the token is kept before the installation, which then ends
    variables = {"HOME": str(machine.home), "XDG_DATA_HOME": shared.format(home=machine.home)}
    machine.run(machine.url, "--token", "-", given=TOKEN, code=1, **variables)
    assert (default_data_directory(variables) / "join.token").read_text() == f"{TOKEN}\n"


@pytest.mark.slow
def test_it_installs_beside_the_version_before_and_a_second_run_has_nothing_to_do(
    machine: Machine, made: Program
) -> None:
    with_uv(machine)
    for name in ("0.0.1-before", "0.0.0-older", "0.0.0-running"):
        (machine.program / name).mkdir(parents=True)
        (machine.program / name / "complete").touch()
    command = machine.program / "bin" / "enginehouse"
    command.parent.mkdir()
    command.symlink_to("../0.0.1-before/bin/enginehouse")
    waiting = [sys.executable, "-c", "input()", str(machine.program / "0.0.0-running" / "bin" / "python")]
    with subprocess.Popen(waiting, stdin=subprocess.PIPE) as running:
        first = machine.run(f"http://127.0.0.1:9,{machine.url}", "--install-only", UV_CACHE_DIR=cache())
        running.communicate(b"\n")
    assert "installing enginehouse" in first.stderr
    said = subprocess.run([command, "version"], capture_output=True, text=True, check=True, cwd="/").stdout
    assert said == f"enginehouse {__version__}\n"
    here = f"{__version__}-{made.wheel_sha256[:12]}"
    # What is installed hands out the same bytes, so one script holds for all frontends of a version.
    asked = "from enginehouse.host.program import read_program; print(read_program().script_sha256)"
    python = machine.program / here / "bin" / "python"
    again = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True, cwd="/").stdout
    assert again.strip() == made.script_sha256
    assert {one.name for one in machine.program.iterdir()} == {"bin", here, "0.0.1-before", "0.0.0-running"}
    # A service is started by the command that leads to the newest version.
    options = ("--url", machine.url, "--data", str(machine.data), "--print")
    unit = subprocess.run(
        [command, "service", "install", "worker", *options],
        capture_output=True,
        text=True,
        cwd="/",
        env={"HOME": str(machine.home), "PATH": "/usr/bin:/bin", "ENGINEHOUSE_TOKEN": TOKEN},
    )
    assert f'ExecStart="{command}" "worker" ' in unit.stdout, unit.stderr
    assert "is installed already" in machine.run(machine.url, "--install-only").stderr
    assert list(machine.home.iterdir()) == []  # nothing is written anywhere else

    # Joining: the token is kept in a file, and the data directory of a server is never given to a node.
    needed = machine.run(machine.url, "--data", str(machine.data), code=1)
    assert "a join token is needed" in needed.stderr
    empty = machine.run(machine.url, "--data", str(machine.data), "--token", "-", code=1)
    assert "no join token on standard input" in empty.stderr
    refused = machine.run(
        machine.url, "--data", str(machine.data), "--token", "-", "--base-port", "x", given=TOKEN, code=2
    )
    assert "cannot use 'x' from --base-port" in refused.stderr
    assert (machine.data / "join.token").read_text() == f"{TOKEN}\n"
    assert (machine.data / "join.token").stat().st_mode & 0o777 == 0o600
    assert TOKEN not in refused.stderr + refused.stdout
    (machine.data / "admin.token").touch()
    other = machine.run(machine.url, "--data", str(machine.data), "--token", "-", given="other", code=1)
    assert "is the data directory of a server" in other.stderr
    assert (machine.data / "join.token").read_text() == f"{TOKEN}\n"
