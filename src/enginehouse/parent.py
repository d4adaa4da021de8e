"""`up`: a small parent process that keeps nats-server, a frontend and a worker running on this machine.

It only starts them, restarts them with backoff, and stops them in order. It ends by itself only if a child refuses to
start for a permanent reason, and reports that reason. It keeps the listening socket open, so requests wait during a
restart of the frontend instead of being refused. The kernel kills the children when the parent dies; all of them
recover from a kill at any moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from enginehouse.bus import credentials, embedded
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.join_line import join_line
from enginehouse.core.key_record import NEW_KEYS, RECORD, missing, others, read_record, refusal
from enginehouse.host import data_files, disk, listen, processes, signing
from enginehouse.host.children import LOG_LIMIT_BYTES, Child, ChildProgram, Ending, keep_short, say
from enginehouse.host.inherited import KEYS_VARIABLE, LISTEN_VARIABLE, OWNER_VARIABLE
from enginehouse.host.key_file import load_key_file
from enginehouse.settings.origins import BY_UP, Origins, SettingOrigin, handed_on
from enginehouse.settings.programs import (
    InstallSettings,
    RunningServer,
    ServingSettings,
    UpSettings,
    as_flags,
    default_data_directory,
)
from enginehouse.store import peek

if TYPE_CHECKING:
    from enginehouse.link.client import FrontendClient

READY_SECONDS = 30.0  # for the first start on a slow machine; most are ready in two
GALLERY_SECONDS = 30.0  # for the first load of the galleries; later, `gallery list` shows their state
# Between two checks. The frontend lets the first one wait until it is ready; the worker joins within a few of them.
LOOK_PAUSE_SECONDS = 0.01
LOOK_SECONDS = 2.0  # timeout of one readiness check, and so the longest delay of Ctrl-C
# Not passed to the children: a secret, and the address of another bus.
_OWN_VARIABLES = ("ENGINEHOUSE_TOKEN", "ENGINEHOUSE_NATS_URL", "LOCALAI_NATS_URL")
_OF_FRONTENDS = (
    "log_level",
    "backend_galleries",
    "node_networks",
    "model_galleries",
    "hf_endpoint",
    "schedules",
    "model_credentials",
)
_OF_INSTALLING = ("allowed_hosts", "registry_credentials")  # settings of installing that frontends have too
ROLES = ("admin", "join")  # of the tokens that a cluster is made with


class Welcome(Struct, frozen=True, kw_only=True):
    """What to show after the first start."""

    url: str
    login: str  # the web page with a one-use code; "" if none could be made
    login_again: str  # the command that makes another link
    admin_token_file: str
    is_open: bool  # to other machines
    join: str  # the command for another machine, or, on loopback, for another data directory
    join_sha256: str  # of the script in that command; "" on loopback
    join_token_file: str
    try_it: str
    down: str  # the command that stops it


class _Link(Struct, frozen=True):
    url: str


class _Gallery(Struct, frozen=True):
    name: str
    status: str = ""
    error: str = ""


async def run(
    settings: UpSettings, welcome: Callable[[Welcome], None], origins: Origins, *, new_keys: bool = False
) -> int:
    """Run until stopped. `welcome` is called once, when everything is ready; `origins` says where the settings came
    from; `new_keys`: keys that the database belongs to are replaced if they are missing.
    """
    lock = _prepare_data(settings.data, new_keys=new_keys)
    try:
        listener = listen.bind(settings.host, settings.port)
        try:
            server = _prepare_bus(settings)
            frontend = _frontend(settings, listener, server, origins)
            keys = {KEYS_VARIABLE: "new" if new_keys else "kept"}
            frontend = msgspec.structs.replace(frontend, environment={**frontend.environment, **keys})
            return await _keep_running(settings, listener, (server, frontend), welcome)
        finally:
            listener.close()
            (settings.data / "server.json").unlink(missing_ok=True)
    finally:
        lock.release()


def _prepare_data(data: Path, *, new_keys: bool) -> disk.Lock:
    disk.make_usable(data)
    lock = disk.Lock(data / "lock", "start")
    try:
        data_files.refuse_unfinished(data)
        if not new_keys:
            _refuse_missing_keys(data)
    except EnginehouseError:
        lock.release()
        raise
    logs = data / "logs"
    with disk.naming_the_file(data):
        logs.mkdir(exist_ok=True)
        for role in ROLES:
            path = data / f"{role}.token"
            if not path.exists():
                disk.write_atomic(path, f"eh-{role}-{secrets.token_urlsafe(32)}\n".encode(), 0o600)
            path.read_bytes()
        for log in logs.glob("*.log"):
            if log.stat().st_size > LOG_LIMIT_BYTES:
                log.replace(log.with_suffix(".log.1"))
    return lock


def _refuse_missing_keys(data: Path) -> None:
    """Before any key is made. A database elsewhere is looked at by the frontend."""
    text, hashes = peek.key_record(data / "enginehouse.db", RECORD)
    recorded, files = read_record(text), data_files.read_keys(data)
    gone, wrong = missing(recorded, files, hashes), others(recorded, files)
    if gone or wrong:
        raise refusal(str(data), gone, wrong, NEW_KEYS)


def _prepare_bus(settings: UpSettings) -> embedded.EmbeddedServer:
    with disk.naming_the_file(settings.data):
        load_key_file(settings.data / "node.key")
        return embedded.prepare(
            settings.data / "bus",
            credentials.load_or_create(settings.data / "bus"),
            host=settings.host,
            port=settings.nats_port,
            log_path=settings.data / "logs" / "nats.log",
        )


async def _keep_running(
    settings: UpSettings,
    listener: socket.socket,
    servers: tuple[embedded.EmbeddedServer, ChildProgram],
    welcome: Callable[[Welcome], None],
) -> int:
    port = listener.getsockname()[1]
    here = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "localhost") else settings.host
    url = f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"
    logs = settings.data / "logs"
    nats = Child(ChildProgram("nats-server", servers[0].argv, _environment()), settings.data, logs / "nats.log")
    frontend = Child(servers[1], settings.data, logs / "frontend.log")
    worker = Child(_worker(settings, url), settings.data, logs / "worker.log")
    ending = Ending()
    for number in processes.stop_signals():
        on_signal = ending.interrupt if number == signal.SIGINT else ending.ask
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    say("starting nats-server, frontend and worker")
    async with asyncio.TaskGroup() as group:
        # The frontend first: it takes longest, and needs the others only when it has loaded its own parts.
        for child in (frontend, nats, worker):
            group.create_task(child.run(ending.ask))
        await asyncio.sleep(0)  # they start now, before anything else is imported here
        # nats-server limits its own log.
        trimming = group.create_task(keep_short([logs / "frontend.log", logs / "worker.log"]))
        telling: asyncio.Task[None] | None = None
        linking: list[asyncio.Task[str]] = []
        try:
            # The link is made while the worker joins.
            is_ready = await _until_ready(
                settings, url, ending.asked, lambda: linking.append(group.create_task(_login_link(settings, url)))
            )
            if is_ready:
                nats.was_ready = frontend.was_ready = worker.was_ready = True
                join_url = _join_url(settings, port)
                _write_server(settings.data, RunningServer(url, os.getpid(), join_url))
                login, script = await linking[0], await _script_sha256(settings, url) if join_url else ""
                welcome(_welcome(settings, url, join_url, login, script))
                telling = group.create_task(_report_unread_galleries(settings, url))
            await ending.asked.wait()
        finally:
            say("stopping: worker, frontend, nats-server")
            # A live frontend has the socket too. Without one, clients waiting for it get an error now.
            frontend.retire()
            listener.close()
            # The worker first, so that it can still deregister at the frontend.
            for child in (worker, frontend, nats):
                await child.stop(ending)
            trimming.cancel()
            if telling is not None:
                telling.cancel()
    for child in (nats, frontend, worker):
        if child.refusal is not None:
            raise child.refusal
    return 0


def _frontend(
    settings: UpSettings, listener: socket.socket, server: embedded.EmbeddedServer, origins: Origins
) -> ChildProgram:
    key = signing.public_key_of(load_key_file(settings.data / "node.key"))
    argv = [*_self(), "frontend", "--data", str(settings.data), "--host", settings.host]
    argv += ["--nats-url", server.url, "--approve-keys", ",".join((key, *settings.approve_keys))]
    if settings.advertise_nats:
        argv += ["--advertise-nats", settings.advertise_nats]
    argv += as_flags(settings, (*ServingSettings.__struct_fields__, *_OF_FRONTENDS))
    argv += as_flags(settings.installing, _OF_INSTALLING)
    own = {"nats_url": BY_UP, "approve_keys": BY_UP}
    own |= {f"{role}_token": SettingOrigin("file", str(settings.data / f"{role}.token")) for role in ROLES}
    environment = _environment() | {
        **handed_on({**origins, **own}),
        LISTEN_VARIABLE: str(listener.fileno()),
        # Only this parent's frontend uses this owner, so a restarted one keeps its leases.
        OWNER_VARIABLE: f"up-{key[:16]}",
        # The worker and all local commands use the tokens in the files, regardless of other settings of this machine.
        # Named, so that no environment shows them, and that a frontend that starts again reads the current ones.
        **{f"ENGINEHOUSE_{role.upper()}_TOKEN": f"@{settings.data / role}.token" for role in ROLES},
    }
    return ChildProgram("frontend", tuple(argv), environment, (listener.fileno(),))


def _worker(settings: UpSettings, url: str) -> ChildProgram:
    argv = [*_self(), "worker", "--data", str(settings.data), "--url", url, "--name", settings.name]
    argv += as_flags(settings, ("log_level", "model_credentials")) + as_flags(
        settings.installing, InstallSettings.__struct_fields__
    )
    if settings.base_port is not None:
        argv += ["--base-port", str(settings.base_port)]
    argv += ["--token", f"@{settings.data / 'join.token'}"]
    return ChildProgram("worker", tuple(argv), _environment())


def _token(data: Path, role: str) -> str:
    return (data / f"{role}.token").read_text().strip()


def _self() -> tuple[str, ...]:
    return (sys.executable, "-m", "enginehouse")


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES} | {"PYTHONUNBUFFERED": "1"}


def _client(settings: UpSettings, url: str) -> FrontendClient:
    # Imported here, because the children are to start before that.
    from enginehouse.link.client import FrontendClient

    return FrontendClient(url, _token(settings.data, "admin"), user_agent="enginehouse-up")


async def _until_ready(settings: UpSettings, url: str, stopping: asyncio.Event, on_answer: Callable[[], None]) -> bool:
    """Wait until the frontend answers and the local node is healthy; report once what is missing. False if stopped.

    `on_answer` is called once, with the first answer.
    """
    client = _client(settings, url)
    has_answered = False
    missing = "the frontend does not answer"
    deadline = time.monotonic() + READY_SECONDS
    while not stopping.is_set():
        try:
            path = f"/api/nodes?name={settings.name}"
            nodes = await asyncio.to_thread(
                client.request, "GET", path, None, list[dict[str, object]], timeout_seconds=LOOK_SECONDS
            )
            if not has_answered:
                has_answered = True
                on_answer()
            missing = f"the worker is not connected yet (log: {settings.data / 'logs' / 'worker.log'})"
            if any(node.get("name") == settings.name and node.get("status") == "healthy" for node in nodes):
                return True
        except EnginehouseError as error:
            missing = error.message
        if time.monotonic() > deadline:
            say(f"not everything is ready after {READY_SECONDS:.0f} s: {missing}; still trying, press Ctrl-C to stop")
            deadline = math.inf
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_PAUSE_SECONDS):
                await stopping.wait()
    return False


async def _login_link(settings: UpSettings, url: str) -> str:
    """A link that signs a person in; "" if it cannot be made at once, because everything runs without it."""
    client = _client(settings, url)
    try:
        made = await asyncio.to_thread(
            client.request, "POST", "/api/session/links", {"role": "admin"}, _Link, timeout_seconds=LOOK_SECONDS
        )
    except EnginehouseError:
        return ""
    return made.url


async def _script_sha256(settings: UpSettings, url: str) -> str:
    """Of the script that joins other machines; "" if the frontend does not hand it out at once."""
    client = _client(settings, url)
    try:
        script = await asyncio.to_thread(client.request_bytes, "GET", "/join.sh", timeout_seconds=LOOK_SECONDS)
    except EnginehouseError:
        return ""
    return hashlib.sha256(script).hexdigest()


async def _report_unread_galleries(settings: UpSettings, url: str) -> None:
    """Report once which galleries cannot be read, so that other commands need not."""
    client = _client(settings, url)
    deadline = time.monotonic() + GALLERY_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        try:
            found = await asyncio.to_thread(
                client.request, "GET", "/backends/galleries", None, list[_Gallery], timeout_seconds=LOOK_SECONDS
            )
        except EnginehouseError:
            continue
        unread = [one for one in found if one.status == "never loaded"]
        if all(one.error for one in unread):
            for one in unread:
                why = one.error.partition(";")[0]
                say(f"cannot read the gallery {one.name}, so its entries are missing: {why}")
            return


def _write_server(data: Path, running: RunningServer) -> None:
    body = msgspec.json.encode(running)
    try:
        disk.write_atomic(data / "server.json", body, 0o644)
    except OSError as error:
        # Everything runs, but local commands cannot find the server automatically.
        say(f"cannot write {data / 'server.json'}: {error.strerror or error}; use --url {running.url} with commands")


def _join_url(settings: UpSettings, port: int) -> str:
    """The address at which other machines reach this server; "" if it listens on loopback only."""
    if listen.is_loopback(settings.host):
        return ""
    host = listen.outside_address() if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _welcome(settings: UpSettings, url: str, join_url: str, login: str, script_sha256: str) -> Welcome:
    is_default = settings.data == default_data_directory(os.environ)
    given = "" if is_default else f" --data {shlex.quote(str(settings.data))}"
    token_file = str(settings.data / "join.token")
    # The path instead of the token: this text ends up in logs and screenshots.
    here = f"enginehouse join {url} --token @{shlex.quote(token_file)} --name second"
    return Welcome(
        url=url,
        login=login,
        login_again=f"{shown_command()}{given} login-link",
        admin_token_file=str(settings.data / "admin.token"),
        is_open=bool(join_url),
        join=join_line(join_url) if join_url else here,
        join_sha256=script_sha256,
        join_token_file=token_file,
        try_it=f"{shown_command()}{given} run tiny-chat",
        down=f"{shown_command()}{given} down",
    )


def shown_command() -> str:
    """The command to show: the plain name if the shell finds it, else the path that was used."""
    # `up --detach` runs the module of the program that a person started.
    path = (
        Path(sys.argv[0]) if Path(sys.argv[0]).name != "__main__.py" else Path(sys.executable).with_name("enginehouse")
    )
    if path.name != "enginehouse" or not path.exists():
        return "enginehouse"
    found, here = shutil.which("enginehouse"), Path.cwd()
    if found is not None and path.samefile(found):
        return "enginehouse"
    if here == Path("/"):
        # In the root, as in a container, a relative path would save one character and look like a mistake.
        return str(path.absolute())
    whole = path.parent.resolve() / path.name
    return str(whole.relative_to(here)) if path.is_absolute() and whole.is_relative_to(here) else str(path)
