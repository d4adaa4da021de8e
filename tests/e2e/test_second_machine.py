"""A second machine joins by the pasted line and serves: a network of its own, a bare Python, an empty home.

Its Python is that of the system with pip and ensurepip hidden, as on a Debian or Ubuntu without further packages. It
reaches the server over a pair of virtual network cards, and the package index of this machine through a proxy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import uv
from tests.e2e.conftest import FAST, OFFLINE, Cluster, Program, wait_for
from tests.outside import tool

NAMESPACE = f"eh{os.getpid()}"
SERVER, MACHINE = "10.213.77.1", "10.213.77.2"
PYTHON = "/usr/bin/python3"
# Hides what a bare Python does not have, then becomes the shell of the machine.
BARE = """
set -e
for module in ensurepip pip; do
    place=$(/usr/bin/python3 -c "import importlib.util as u, os; s = u.find_spec('$module')
print(os.path.dirname(s.origin) if s and s.origin else '')")
    [ -z "$place" ] || mount --bind "$EMPTY" "$place"
done
mount --bind "$OPT" /opt # root's programs are there, those of an earlier run on this machine too
exec sh -c "$LINE"
"""


def has_bare_python() -> bool:
    asked = [PYTHON, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
    return os.path.exists(PYTHON) and subprocess.run(asked).returncode == 0


def needs(what: str, *, is_there: bool) -> None:
    if not is_there:
        pytest.fail(what) if os.environ.get("CI") else pytest.skip(what)


class Proxy:
    """Passes connections on for CONNECT, because the namespace has no way out."""

    def __init__(self) -> None:
        self._listener = socket.create_server((SERVER, 0))
        self.url = f"http://{SERVER}:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=(accepted,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += client.recv(4096) or b"\r\n\r\n"
            host, _, port = asked.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                other = {client: server, server: client}
                while ready := select.select(list(other), [], [], 60)[0]:
                    for one in ready:
                        piece = one.recv(65536)
                        if not piece:
                            return
                        other[one].sendall(piece)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[Proxy]:
    tool("ip")
    needs("a network namespace needs root", is_there=os.geteuid() == 0)
    needs(f"the machine needs a Python 3.11 of the system ({PYTHON})", is_there=has_bare_python())
    ip("netns", "add", NAMESPACE)
    try:
        near, far = f"{NAMESPACE}a", f"{NAMESPACE}b"
        ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", NAMESPACE)
        ip("addr", "add", f"{SERVER}/30", "dev", near)
        ip("link", "set", near, "up")
        for words in (
            ("addr", "add", f"{MACHINE}/30", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            ip("-n", NAMESPACE, *words)
        proxy = Proxy()
        try:
            yield proxy
        finally:
            proxy.close()
    finally:
        ip("netns", "del", NAMESPACE)  # the pair of cards ends with it


class SecondMachine:
    """Runs one line at a terminal of its own, in the namespace."""

    def __init__(self, root: Path, proxy: Proxy) -> None:
        self.home = root / "a home"
        self.home.mkdir()
        self._empty = root / "empty"
        self._empty.mkdir()
        self._opt = root / "opt"
        self._opt.mkdir()
        asked = [uv.find_uv_bin(), "cache", "dir"]
        kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "UV_", "SSL_"))}
        self._environment = {
            **kept,
            "HOME": str(self.home),
            "PATH": "/usr/bin:/bin",
            "https_proxy": proxy.url,
            "no_proxy": SERVER,
            "EMPTY": str(self._empty),
            "OPT": str(self._opt),
            # Engines come from the cache of this machine's uv, which the tests have filled.
            "UV_CACHE_DIR": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        }
        self._cache = Path(os.path.expanduser("~/.cache/enginehouse-tests/pip"))
        self._cache.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def paste(self, line: str) -> Iterator[Terminal]:
        primary, secondary = os.openpty()
        process = subprocess.Popen(
            ["ip", "netns", "exec", NAMESPACE, "sh", "-c", BARE],
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            cwd="/",
            env={**self._environment, "LINE": line, "PIP_CACHE_DIR": str(self._cache)},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(secondary)
        terminal = Terminal(primary, process)
        try:
            yield terminal
        finally:
            terminal.close()


class Terminal:
    def __init__(self, primary: int, process: subprocess.Popen[bytes]) -> None:
        self._primary, self.process = primary, process
        self.said = ""

    def expect(self, text: str, limit_seconds: float) -> None:
        deadline = time.monotonic() + limit_seconds
        while text not in self.said:
            if select.select([self._primary], [], [], 0.2)[0]:
                try:
                    self.said += os.read(self._primary, 65536).decode(errors="replace")
                except OSError:  # the other side is closed
                    pytest.fail(f"ended without saying {text!r}:\n{self.said}")
            if time.monotonic() > deadline:
                pytest.fail(f"did not say {text!r} within {limit_seconds:.0f} s:\n{self.said}")

    def type(self, text: str) -> None:
        os.write(self._primary, text.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(40)
        os.close(self._primary)


@pytest.fixture
def server(tmp_path: Path, network: Proxy) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    made.url = f"http://{SERVER}:{made.port}"
    ports = ("--port", str(made.port), "--nats-port", str(made._nats_port()), "--base-port", str(made._base_port))
    log = tmp_path / "up.log"
    made.parent = Program(
        *("up", "--data", str(made.data), "--name", "first", "--host", SERVER, *ports, *FAST),
        log=log,
        environment=OFFLINE,
    )
    try:
        wait_for("`up` to say that it is up", lambda: "Enginehouse is up" in log.read_text(), 60)
        yield made
    finally:
        made.parent.end()


def command_lines() -> str:
    return "\n".join(" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"]))


def test_a_bare_machine_joins_by_the_pasted_line_and_serves(tmp_path: Path, network: Proxy, server: Cluster) -> None:
    shown = server.json("nodes", "add", "--name", "second")
    line, token = shown["line"], shown["token"]
    assert line == f"curl -fsS {server.url}/join.sh | sh -s -- {server.url} --name second"
    assert f"sha256 of join.sh: {shown['script_sha256']}" in server.parent.output()  # type: ignore[union-attr]
    machine = SecondMachine(tmp_path, network)
    with machine.paste(line) as terminal:
        terminal.expect("join token", 30)  # asked at once
        terminal.type(f"{token}\n")
        terminal.expect("using the one of the server", 30)  # it had no pip
        terminal.expect("waits for approval", 180)
        assert token not in terminal.said
        assert token not in command_lines()
        assert server.node("second")["address"].startswith(f"{MACHINE}:")
        server.cli("nodes", "approve", "second")
        asked = server.cli("run", "tiny-chat", "--node", "second", "What is the capital of France?")
        assert "Paris" in asked.stdout
        assert [one["node_name"] for one in server.json("replicas", "list")] == ["second"]
    # The program is in a directory of its own, the node in its data directory, and the token readable by nobody else.
    data = machine.home / ".local/share/enginehouse"
    assert (data / "join.token").read_text() == f"{token}\n"
    assert (data / "join.token").stat().st_mode & 0o777 == 0o600
    server.wait_for_status("second", "offline", 30)
    # The same line once more: nothing is installed again, nothing is asked, and the node is the same by its key.
    with machine.paste(line) as terminal:
        terminal.expect("is installed already", 30)
        server.wait_for_status("second", "healthy", 30)
        assert "join token" not in terminal.said
