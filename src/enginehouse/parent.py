"""`up`: a small parent that keeps nats-server, a frontend and a worker running on this machine.

It does nothing but start them, start again what ends (backing off), and stop them in order. Only a child that refuses
to start at all, with a reason that does not heal by itself, ends it, with that reason. It keeps the listening
socket open itself, so a request that arrives while the frontend is being restarted waits instead of being refused. Its
children die with it: the kernel sees to that, and all of them recover from dying at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.bus import credentials, embedded
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid
from enginehouse.host import disk, listen, processes
from enginehouse.link.client import FrontendClient
from enginehouse.settings import Installing, RunningServer, Timings, UpSettings, as_flags, default_data_directory
from enginehouse.worker import identity

LISTEN_VARIABLE = "ENGINEHOUSE_LISTEN_FD"
OWNER_VARIABLE = "ENGINEHOUSE_OWNER"
READY_SECONDS = 30.0  # for the first start on a slow machine; most are ready in two
LOOK_SECONDS = 2.0  # for one look at whether all is ready: nothing may keep Ctrl-C waiting for longer
STOP_SECONDS = 20.0  # for one child to end in order
BACKOFF_FIRST_SECONDS = 0.2
BACKOFF_CAP_SECONDS = 10.0
STEADY_SECONDS = 20.0  # a child that ran this long is not in a crash loop
LOG_LIMIT_BYTES = 10 * 1024 * 1024
# Not for the children: a secret, and the bus of somebody else.
_OWN_VARIABLES = ("ENGINEHOUSE_TOKEN", "ENGINEHOUSE_NATS_URL", "LOCALAI_NATS_URL")
# Exit codes of a refusal that trying again does not change; the others (cannot reach, not there yet) may heal.
_REFUSALS: dict[int, type[EnginehouseError]] = {1: Hopeless, 2: Invalid}


class Welcome(Struct, frozen=True, kw_only=True):
    """What someone who has just started it wants to know."""

    url: str
    admin_token_file: str
    is_open: bool  # to other machines
    join: str  # the command for another machine
    try_it: str


class Program(Struct, frozen=True):
    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    inherit: tuple[int, ...] = ()


class Child:
    """One program, kept running until told to stop."""

    def __init__(self, program: Program, directory: Path, log: Path) -> None:
        self.program = program
        self._directory = directory
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self.refusal: EnginehouseError | None = None
        self.was_ready = False

    async def run(self, refused: Callable[[], None]) -> None:
        """`refused` is called when it will never start; `refusal` says why."""
        pause = BACKOFF_FIRST_SECONDS
        try:
            while not self._stopping.is_set():
                started, written = time.monotonic(), _size(self._log)
                self._process = await processes.spawn(
                    self.program.argv,
                    directory=self._directory,
                    environment=self.program.environment,
                    log=self._log,
                    inherit=self.program.inherit,
                )
                code = await self._process.wait()
                if self._stopping.is_set():
                    return
                pause = BACKOFF_FIRST_SECONDS if time.monotonic() - started > STEADY_SECONDS else pause
                reason = _last_words(self._log, written)
                if reason and code in _REFUSALS and not self.was_ready:
                    self.refusal = _REFUSALS[code](reason)
                    refused()
                    return
                told = f": {reason}" if reason else f" with {_described(code)} (log: {self._log})"
                _say(f"{self.program.name} ended{told}; starting it again")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()
                pause = min(BACKOFF_CAP_SECONDS, pause * 2)
        finally:
            self._ended.set()

    def retire(self) -> None:
        """Not started again from now on."""
        self._stopping.set()

    async def stop(self) -> None:
        self.retire()
        if self._process is not None and self._process.returncode is None:
            await processes.stop_group(self._process, STOP_SECONDS)
        await self._ended.wait()


async def run(settings: UpSettings, welcome: Callable[[Welcome], None]) -> int:
    """Until told to stop. `welcome` is called once, when everything is ready."""
    lock = _prepare_data(settings.data)
    try:
        listener = listen.bind(settings.host, settings.port)
        server = embedded.prepare(
            settings.data / "bus",
            credentials.load_or_create(settings.data / "bus"),
            host=settings.host,
            port=settings.nats_port,
            log_path=settings.data / "logs" / "nats.log",
        )
        try:
            return await _keep_running(settings, listener, server, welcome)
        finally:
            listener.close()
            (settings.data / "server.json").unlink(missing_ok=True)
    finally:
        lock.release()


def _prepare_data(data: Path) -> disk.Lock:
    disk.make_usable(data)
    lock = disk.Lock(data / "lock", "start")
    logs = data / "logs"
    with disk.naming_the_culprit(data):
        logs.mkdir(exist_ok=True)
        for role in ("admin", "join"):
            path = data / f"{role}.token"
            if not path.exists():
                disk.write_atomic(path, f"eh-{role}-{secrets.token_urlsafe(32)}\n".encode(), 0o600)
            path.read_bytes()
        for log in logs.glob("*.log"):
            if log.stat().st_size > LOG_LIMIT_BYTES:
                log.replace(log.with_suffix(".log.1"))
    return lock


async def _keep_running(
    settings: UpSettings,
    listener: socket.socket,
    server: embedded.EmbeddedServer,
    welcome: Callable[[Welcome], None],
) -> int:
    port = listener.getsockname()[1]
    here = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "localhost") else settings.host
    url = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    logs = settings.data / "logs"
    nats = Child(Program("nats-server", server.argv, _environment()), settings.data, logs / "nats.log")
    frontend = Child(_frontend(settings, listener, server), settings.data, logs / "frontend.log")
    worker = Child(_worker(settings, url), settings.data, logs / "worker.log")
    stopping = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    _say("starting nats-server, frontend and worker")
    async with asyncio.TaskGroup() as group:
        for child in (nats, frontend, worker):
            group.create_task(child.run(stopping.set))
        try:
            if await _until_ready(settings, url, stopping):
                nats.was_ready = frontend.was_ready = worker.was_ready = True
                _write_server(settings.data, url)
                welcome(_welcome(settings, url, port))
            await stopping.wait()
        finally:
            _say("stopping: worker, frontend, nats-server")
            # A living frontend has the socket too. Where there is none, whoever waits for it is told now.
            frontend.retire()
            listener.close()
            # The worker first, while there is still somebody to say goodbye to.
            for child in (worker, frontend, nats):
                await child.stop()
    for child in (frontend, worker):
        if child.refusal is not None:
            raise child.refusal
    return 0


def _frontend(settings: UpSettings, listener: socket.socket, server: embedded.EmbeddedServer) -> Program:
    key = identity.load_identity(settings.data / "node.key").public_key
    argv = [*_self(), "frontend", "--data", str(settings.data), "--host", settings.host]
    argv += ["--nats-url", server.url, "--approve-keys", key]
    if settings.advertise_nats:
        argv += ["--advertise-nats", settings.advertise_nats]
    argv += as_flags(settings, (*Timings.__struct_fields__, "backend_galleries", "allowed_hosts"))
    environment = _environment() | {
        LISTEN_VARIABLE: str(listener.fileno()),
        # Only this parent's frontend holds these leases, so a restarted one goes on with them at once.
        OWNER_VARIABLE: f"up-{key[:16]}",
    }
    return Program("frontend", tuple(argv), environment, (listener.fileno(),))


def _worker(settings: UpSettings, url: str) -> Program:
    argv = [*_self(), "worker", "--data", str(settings.data), "--url", url, "--name", settings.name]
    argv += as_flags(settings, Installing.__struct_fields__)
    if settings.base_port is not None:
        argv += ["--base-port", str(settings.base_port)]
    token = (settings.data / "join.token").read_text().strip()
    return Program("worker", tuple(argv), _environment() | {"ENGINEHOUSE_TOKEN": token})


def _self() -> tuple[str, ...]:
    return (sys.executable, "-m", "enginehouse")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES} | {"PYTHONUNBUFFERED": "1"}


async def _until_ready(settings: UpSettings, url: str, stopping: asyncio.Event) -> bool:
    """Wait until the frontend answers and the local node is healthy, saying once what is missing; False when told to
    stop."""
    token = (settings.data / "admin.token").read_text().strip()
    client = FrontendClient(url, token, user_agent="enginehouse-up")
    missing = "the frontend does not answer"
    deadline = time.monotonic() + READY_SECONDS
    while not stopping.is_set():
        try:
            nodes = await asyncio.to_thread(
                client.request, "GET", "/api/nodes", None, list[dict[str, object]], timeout_seconds=LOOK_SECONDS
            )
            missing = f"the worker is not connected yet (log: {settings.data / 'logs' / 'worker.log'})"
            if any(node.get("name") == settings.name and node.get("status") == "healthy" for node in nodes):
                return True
        except EnginehouseError as error:
            missing = error.message
        if time.monotonic() > deadline:
            _say(f"not everything is ready after {READY_SECONDS:.0f} s: {missing}; still trying, Ctrl-C ends it")
            deadline = math.inf
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await stopping.wait()
    return False


def _write_server(data: Path, url: str) -> None:
    body = msgspec.json.encode(RunningServer(url, os.getpid()))
    disk.write_atomic(data / "server.json", body, 0o644)


def _welcome(settings: UpSettings, url: str, port: int) -> Welcome:
    is_open = not listen.is_loopback(settings.host)
    outside = listen.outside_address() if settings.host in ("0.0.0.0", "::") else settings.host
    is_default = settings.data == default_data_directory(os.environ)
    given = "" if is_default else f" --data {shlex.quote(str(settings.data))}"
    token = (settings.data / "join.token").read_text().strip()
    join_url = f"http://{outside}:{port}" if is_open else url
    return Welcome(
        url=url,
        admin_token_file=str(settings.data / "admin.token"),
        is_open=is_open,
        join=f"enginehouse join {join_url} --token {token} --name second",
        try_it=f"{_command()}{given} run tiny-chat",
    )


def _command() -> str:
    """How to call us from here: the plain name where the shell finds it, else the path that was used."""
    path = Path(sys.argv[0])
    if path.name != "enginehouse":
        return "enginehouse"
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _last_words(log: Path, written: int) -> str:
    """The sentence with which a child of ours refused, if it said one since `written`."""
    if _size(log) == written:
        return ""
    last = "".join(processes.last_lines(log))
    return last.removeprefix("enginehouse: ") if last.startswith("enginehouse: cannot ") else ""


def _described(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"


def _say(text: str) -> None:
    print(f"enginehouse: {text}", file=sys.stderr, flush=True)
