"""The programs that bench/serve.py measures, as real processes on loopback: engine, load generator, nginx, frontends.

The C and Go sources beside this file are built once, into a cache directory under a name made of their contents. A
frontend gets a database with one node and one ready replica per engine, so every request finds a warm route; a plain
nats-server is its bus. Everything that is started here is stopped here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.store import db, nodes, replicas
from enginehouse.store.db import Connection, Store

SOURCES = Path(__file__).parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginehouse-bench"
GO = "/usr/local/go/bin"
LIMIT_SECONDS = 30.0  # for everything that should take a second or two
BUILD_SECONDS = 400.0  # of the Go program, cold, with downloads
KEY = "key-of-the-replica-0123456789abcdef"
TOKENS = {role: f"eh-bench-{role}-" + "0" * 32 for role in ("admin", "join")}


class Place(msgspec.Struct, frozen=True):
    """Where a contender listens, which processes it is, and what it wants as token."""

    name: str
    port: int
    processes: tuple[int, ...] = ()
    bearer: str = KEY

    def cpu_seconds(self) -> float:
        """Spent so far by its processes and their children."""
        spent = 0.0
        for number in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = psutil.Process(number).cpu_times()
                spent += times.user + times.system
        return spent

    def family(self) -> list[int]:
        found = list(self.processes)
        for number in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [one.pid for one in psutil.Process(number).children(recursive=True)]
        return found


def built(name: str) -> str:
    """The path of a program, compiled from NAME.c or from the Go module NAME."""
    source = SOURCES / f"{name}.c"
    files = [source] if source.exists() else sorted((SOURCES / name).iterdir())
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    program = CACHE / f"{name}-{digest}"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = str(program) + f".{os.getpid()}"
        if source.exists():
            command = [_tool("gcc"), "-O2", "-o", unfinished, str(source)]
            subprocess.run(command, check=True, timeout=BUILD_SECONDS)
        else:
            command = [_tool("go", GO), "build", "-trimpath", "-buildvcs=false", "-o", unfinished, "."]
            subprocess.run(command, check=True, cwd=SOURCES / name, timeout=BUILD_SECONDS)
        Path(unfinished).rename(program)
    return str(program)


def _tool(name: str, elsewhere: str = "") -> str:
    found = shutil.which(name) or shutil.which(name, path=f"{elsewhere}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise SystemExit(f"cannot measure without {name}: install it")
    return found


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[int]:
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def engine(name: str, *words: str) -> Iterator[Place]:
    """An engine that prints its port, in a process of its own."""
    with subprocess.Popen([built(name), *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield Place("direct", int(process.stdout.readline()), (process.pid,))
        finally:
            process.kill()


@contextlib.contextmanager
def nginx(behind: Place, scratch: Path) -> Iterator[Place]:
    """nginx as reverse proxy: one worker, kept connections to the engine, nothing buffered."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin") or _install_nginx()
    port = free_port()
    configuration = scratch / "nginx.conf"
    places = "".join(
        f"{kind}_temp_path {scratch / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration.write_text(
        f"daemon off; worker_processes 1; pid {scratch / 'nginx.pid'}; error_log stderr error;\n"
        "events { worker_connections 8192; }\n"
        f"http {{ access_log off; {places} keepalive_requests 1000000000; tcp_nodelay on;\n"
        f"  upstream engine {{ server 127.0.0.1:{behind.port}; keepalive 1024; keepalive_requests 1000000000; }}\n"
        f"  server {{ listen 127.0.0.1:{port} backlog=4096;\n"
        '    location / { proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";\n'
        "      proxy_buffering off; proxy_read_timeout 600s; } } }\n"
    )
    command = [program, "-c", str(configuration), "-e", str(scratch / "nginx-errors.log")]
    with running(command, scratch / "nginx.log") as number:
        wait_for_port(port)
        yield Place("nginx", port, (number,))


def _install_nginx() -> str:
    prefix = [] if os.geteuid() == 0 else ["sudo", "-n"]
    subprocess.run([*prefix, "apt-get", "install", "-y", "nginx-light"], check=True, stdout=sys.stderr, timeout=300)
    return _tool("nginx")


@contextlib.contextmanager
def nats(scratch: Path) -> Iterator[str]:
    port = free_port()
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else _tool("nats-server")
    with running([program, "-a", "127.0.0.1", "-p", str(port)], scratch / "nats.log"):
        wait_for_port(port)
        yield f"nats://127.0.0.1:{port}"


@contextlib.contextmanager
def frontend(name: str, scratch: Path, bus: str, database: str, *words: str) -> Iterator[Place]:
    """A frontend over a prepared database. `words` are more arguments; the first may name another program to run."""
    data = scratch / name.replace(" ", "-")
    data.mkdir()
    program = [words[0]] if words and words[0].endswith(".py") else ["-m", "enginehouse"]
    more = words[1:] if words and words[0].endswith(".py") else words
    port = free_port()
    command = [sys.executable, *program, "--data", str(data), "frontend", "--port", str(port), "--nats-url", bus]
    command += ["--database-url", database, "--stale", "1h", "--backend-galleries", "[]", *more]
    environment = {**os.environ, **{f"ENGINEHOUSE_{role.upper()}_TOKEN": token for role, token in TOKENS.items()}}
    log = scratch / f"{data.name}.log"
    with running(command, log, environment) as number:
        wait_until_ready(port, log, number)
        yield Place(name, port, (number,), TOKENS["admin"])


def prepare(database: str, *ready: Replica) -> None:
    """A database in which these replicas are ready on one healthy node."""

    async def write() -> None:
        store = await Store.open(database)

        def work(connection: Connection) -> None:
            fill(connection, db.now(connection), *ready)

        await store.transaction(work)
        store.close()

    asyncio.run(write())


def fill(connection: Connection, now: float, *ready: Replica) -> None:
    nodes.insert(connection, _node(now), "hash")
    for replica in ready:
        replicas.put(connection, replica, now)


def connections_to(engine: Place) -> int:
    """How many connections a stub has had, this question included."""
    _, _, body = get(engine.port, "/counters").partition(b"\r\n\r\n")
    return msgspec.json.decode(body, type=dict[str, int])["connections"]


def _node(now: float) -> Node:
    return Node(
        id=NodeId("bench-node"),
        name="bench",
        node_type="backend",
        public_key="0" * 64,
        approved=True,
        health="healthy",
        drained=False,
        address="127.0.0.1:50051",
        http_address="127.0.0.1:50050",
        capability="default",
        platform="linux/amd64",
        labels={},
        max_replicas_per_model=1,
        capacity=Capacity(),
        created_at=now,
        updated_at=now,
        last_heartbeat=now,
        report=Report(boot_id="bench", sequence=1, mark=now),
    )


def replica_at(place: Place, model: str = "stub") -> Replica:
    return Replica(
        node_id=NodeId("bench-node"),
        model=model,
        slot=0,
        revision="1",
        address=f"127.0.0.1:{place.port}",
        nonce="nonce",
        backend="stub",
        key=KEY,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing listens on port {port}") from None
            time.sleep(0.02)
        else:
            return


def wait_until_ready(port: int, log: Path, process: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while b" 200 " not in get(port, "/readyz")[:20]:
        is_gone = psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        if is_gone or time.monotonic() > deadline:
            raise SystemExit(f"the frontend did not become ready: {log.read_text()}")
        time.sleep(0.02)


def get(port: int, path: str) -> bytes:
    """The raw answer of a small GET."""
    try:
        with socket.create_connection(("127.0.0.1", port), LIMIT_SECONDS) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
            raw.settimeout(2.0)
            pieces = []
            with contextlib.suppress(TimeoutError):
                while piece := raw.recv(65536):
                    pieces.append(piece)
                    if b"}" in piece:
                        break
            return b"".join(pieces)
    except OSError:
        return b""
