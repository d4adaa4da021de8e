"""Opening a TCP connection to an engine: what a failure means, and how a lost machine is noticed.

A connection that cannot be opened says that the engine has seen nothing, so another replica may be tried
(`replica_unreachable`). The exception are limits of this machine, which would fail for every replica.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import TypeVar

from enginehouse.core.errors import Unavailable

# A lost machine (power, cable) sends no FIN. Keepalive detects it within about 25 s without traffic, and the limit for
# unacknowledged bytes does the same for a request that is still on its way, when there are no probes.
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_PROBES = 10, 5, 3
UNACKNOWLEDGED_SECONDS = 30
# Our own limits, not the engine's fault: another replica would fail too, and this one must not be marked dead.
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}

Spoken = TypeVar("Spoken", bound=asyncio.Protocol)


async def dial(address: str, connect_seconds: float, make: Callable[[], Spoken]) -> Spoken:
    """Connect to HOST:PORT and return the protocol that `make` made for it."""
    try:
        host, port = _host_and_port(address)
        async with asyncio.timeout(connect_seconds):
            transport, spoken = await asyncio.get_running_loop().create_connection(make, host, port)
    except TimeoutError as error:
        raise unreachable(address, f"no connection within {connect_seconds:g} s") from error
    except OSError as error:
        if error.errno in _OURS:
            raise Unavailable(
                f"cannot open a connection to the engine at {address}: {error.strerror}", code="resource_exhausted"
            ) from error
        raise unreachable(address, error.strerror or str(error)) from error
    except ValueError as error:
        raise unreachable(address, "it is not HOST:PORT") from error
    watch(transport.get_extra_info("socket"))
    return spoken


def unreachable(address: str, cause: str) -> Unavailable:
    return Unavailable(f"cannot reach the engine at {address}: {cause}", code="replica_unreachable")


def watch(raw: socket.socket | None) -> None:
    """Let the system notice a lost machine."""
    if raw is None or raw.family not in (socket.AF_INET, socket.AF_INET6):
        return
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_SECONDS * 1000)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(address)
    return host.removeprefix("[").removesuffix("]"), int(port)
