"""Whether a server and its NATS can be reached from this machine, and whether the clocks agree. Needs no token."""

from __future__ import annotations

import contextlib
import socket
import time
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from enginehouse import __version__
from enginehouse.core.errors import EnginehouseError, Invalid, Unavailable
from enginehouse.core.finding import Finding, clock_finding
from enginehouse.link.client import FrontendClient

CONNECT_SECONDS = 3.0
NATS_PORT = 4222
NATS_GREETING = b"INFO "


class NodeRecord(Struct, frozen=True, kw_only=True):
    """`DATA/node.json`, which a worker writes when it joins."""

    id: str
    name: str = ""
    frontends: tuple[str, ...] = ()
    nats_url: str = ""


def read_node_record(data: Path) -> NodeRecord | None:
    try:
        return msgspec.json.decode((data / "node.json").read_bytes(), type=NodeRecord)
    except (OSError, msgspec.DecodeError):
        return None


def is_of_server(data: Path) -> bool:
    """Whether a server made this data directory; that of a machine that has joined has a join token at most."""
    return (data / "admin.token").exists()


class WaitingRecord(Struct, frozen=True, kw_only=True):
    """`DATA/waiting.json`, which a worker writes while its server does not let it join."""

    reason: str
    since: float = 0.0


def read_waiting_record(data: Path) -> WaitingRecord | None:
    try:
        return msgspec.json.decode((data / "waiting.json").read_bytes(), type=WaitingRecord)
    except (OSError, msgspec.DecodeError):
        return None


def reach_server(url: str) -> list[Finding]:
    try:
        client = FrontendClient(url, "", user_agent=f"enginehouse-doctor/{__version__}")
    except Invalid as error:
        return [Finding(area="server", level="problem", message=error.message)]
    with contextlib.closing(client):
        try:
            _, headers = client.head("/healthz", timeout_seconds=CONNECT_SECONDS)
        except EnginehouseError as error:
            return [Finding(area="server", level="problem", message=error.message)]
        found = [Finding(area="server", level="ok", message=f"{url} answers")]
        with contextlib.suppress(KeyError, ValueError):
            difference = time.time() - parsedate_to_datetime(headers["date"]).timestamp()
            found.append(clock_finding("the clock of this machine", "the clock of the server", difference))
        return [*found, *_readiness(client, url)]


def _readiness(client: FrontendClient, url: str) -> list[Finding]:
    try:
        client.request("GET", "/readyz", None, object, timeout_seconds=CONNECT_SECONDS)
    except EnginehouseError:
        # The body has the reasons, and is no error of the API.
        reasons = _reasons(url)
        return [Finding(area="server", level="problem", message=f"{url} is not ready: {reasons}")]
    return []


def not_ready(client: FrontendClient) -> str:
    """Why a server is not ready; "" if it is, or does not tell."""
    try:
        client.request("GET", "/readyz", None, object, timeout_seconds=CONNECT_SECONDS)
    except Unavailable:
        return _reasons(client.url)
    except EnginehouseError:
        pass  # what else is wrong is said by whoever asks for more
    return ""


def _reasons(url: str) -> str:
    import urllib.error
    import urllib.request

    try:
        urllib.request.urlopen(f"{url}/readyz", timeout=CONNECT_SECONDS)  # the address was checked
    except urllib.error.HTTPError as error:
        with contextlib.suppress(msgspec.DecodeError, OSError, AttributeError, TypeError):
            found = msgspec.json.decode(error.read()).get("reasons", [])
            return "; ".join(map(str, found)) or str(error.code)
        return str(error.code)
    except OSError as error:
        return str(error)
    return "it was not a moment ago"


def reach_nats(url: str) -> list[Finding]:
    parts = urlsplit(url.partition(",")[0])
    host, port = parts.hostname or "", parts.port or NATS_PORT
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except OSError as error:
        message = f"NATS is not reached at {host}:{port}: {error.strerror or error or 'no answer'}"
        advice = "Open this port on the server, or set --advertise-nats there; see docs/network.md"
        return [Finding(area="nats", level="problem", message=message, advice=advice)]
    with connection, contextlib.suppress(OSError):
        # A server that hangs is still connected to, by its machine; a server that runs speaks first.
        if connection.recv(len(NATS_GREETING), socket.MSG_WAITALL) == NATS_GREETING:
            return [Finding(area="nats", level="ok", message=f"NATS answers at {host}:{port}")]
    message = f"what listens at {host}:{port} does not answer as NATS does"
    advice = "Check that NATS runs there and does not hang: enginehouse logs nats, on the server"
    return [Finding(area="nats", level="problem", message=message, advice=advice)]
