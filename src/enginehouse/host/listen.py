"""Listening sockets, and the addresses of this machine.

Without a given port, the next free one from 8080 on is used. A given port is used as it is or causes an error.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from contextlib import suppress
from typing import Any

from enginehouse.core.errors import Conflict, Invalid

DEFAULT_PORT = 8080
PORTS_TRIED = 100


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket. `port` None means 8080 or the next free port."""
    tried = range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TRIED) if port is None else [port]
    for candidate in tried:
        try:
            return _bind_one(host, candidate)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            raise _refused(host, candidate, error) from error
    raise Conflict(
        f"cannot listen on {host}: ports {tried[0]} to {tried[-1]} are all in use; choose one with --port",
        code="port_in_use",
    )


def _address(host: str, port: int) -> Any:
    """What `socket.socket` and `bind` need to listen there."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def _bind_one(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = _address(host, port)
    listener = socket.socket(family, kind, protocol)
    try:
        # A restart must not wait for TIME_WAIT connections of the previous process.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def reserve(host: str, port: int | None) -> socket.socket:
    """Hold a port for several processes, without listening. `port` None means 8080 or the next free port."""
    # Sharing is possible only among sockets that allow it, so a second group of processes would join the first
    # unnoticed. A socket that does not allow it shows whether anybody listens.
    with bind(host, port) as probe:
        chosen = probe.getsockname()[1]
    return share(host, chosen)


def share(host: str, port: int) -> socket.socket:
    """Return a socket, not listening yet, on a port that other processes of this user share."""
    try:
        family, kind, protocol, _, address = _address(host, port)
        shared = socket.socket(family, kind, protocol)
        try:
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind(address)
        except OSError:
            shared.close()
            raise
    except OSError as error:
        raise _refused(host, port, error) from error
    return shared


def _refused(host: str, port: int, error: OSError) -> Conflict | Invalid:
    if error.errno == errno.EADDRINUSE:
        return Conflict(
            f"cannot listen on {host}:{port}: another program uses this port; stop it or choose another --port",
            code="port_in_use",
        )
    if error.errno == errno.EACCES:
        return Conflict(f"cannot listen on {host}:{port}: permission denied; use a port above 1023", code="port_in_use")
    return Invalid(
        f"cannot listen on {host}:{port}: {error.strerror or error}; --host must be an address of this machine",
        code="invalid_name",
        param="host",
    )


def addresses_of(host: str) -> frozenset[str]:
    """Return the addresses of a host; all addresses of this machine if it is one of them. Blocks: resolves names."""
    import psutil  # here, so that `up` binds its port without it

    own = {
        address.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    } | {"127.0.0.1", "::1"}
    if host in ("", "0.0.0.0", "::"):
        return frozenset(own)
    found = resolved(host)
    return frozenset(found | own if found & own else found)


def resolved(host: str) -> set[str]:
    """Return the addresses of a name; empty if it does not resolve. Blocks."""
    try:
        return {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        return set()


async def resolve_within(host: str, *, limit_seconds: float) -> set[str]:
    """Return the addresses of a name; empty if it does not resolve in time."""
    with suppress(ValueError):
        return {str(ipaddress.ip_address(host)).partition("%")[0]}
    try:
        async with asyncio.timeout(limit_seconds):
            return await asyncio.to_thread(resolved, host)
    except TimeoutError:
        return set()


def outside_address() -> str:
    """Return the address at which other machines most likely reach this one; loopback if there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only selects the local address of the route.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
