"""Addresses that workers advertise: which of them a frontend may send prompts and keys to.

A worker chooses what it says, so nothing of it is believed: a replica listens on the host that was approved for its
node, in that node's range of ports, and never where the store, the bus or a frontend listens.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from msgspec import Struct

from enginehouse.core.errors import Invalid

PORTS = 1000  # of one node, from its base port up: more engines than a machine runs
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


class Endpoint(Struct, frozen=True):
    host: str
    port: int


def parse_endpoint(address: str) -> Endpoint:
    """HOST:PORT, with an IPv6 address in brackets; the host in the one form that two spellings of it share."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise Invalid(f"cannot use {address[:80]!r} as an address: it must be HOST:PORT", code="invalid_address")
    return Endpoint(plain_host(host), int(port))


def plain_host(host: str) -> str:
    """Without brackets, in lower case; an address as the library writes it, one that maps IPv4 as IPv4."""
    host = host.strip("[]").lower().rstrip(".")
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def is_loopback(host: str) -> bool:
    host = plain_host(host)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES or host.endswith(".localhost")


def host_refusal(hosts: Iterable[str], *, may_be_loopback: bool) -> str:
    """Why a node may not advertise a host that stands for `hosts`; nothing where it may."""
    for host in hosts:
        if is_loopback(host) and not may_be_loopback:
            return f"{host} is this frontend's own machine: set --advertise-host to an address that it can reach"
        try:
            found = ipaddress.ip_address(plain_host(host))
        except ValueError:
            continue
        if found.is_link_local or found.is_unspecified or found.is_multicast:
            return f"{host} is not an address of one machine"
    return ""


def is_within(host: str, networks: Collection[str]) -> bool:
    """Whether an operator's rule lets a node move there by itself."""
    try:
        found = ipaddress.ip_address(plain_host(host))
    except ValueError:
        return False
    return any(found in ipaddress.ip_network(network, strict=False) for network in networks)


def replica_refusal(address: str, node_address: str, taken: Collection[Endpoint], *, last_port: int = 0) -> str:
    """Why nothing is sent to `address`, which a worker named for a replica; nothing where it may be."""
    try:
        said, approved = parse_endpoint(address), parse_endpoint(node_address)
    except Invalid as error:
        return error.message
    if said.host != approved.host:
        return f"it is not on {approved.host}, the approved address of its node"
    last = last_port or approved.port + PORTS - 1
    if not approved.port <= said.port <= last:
        return f"its port is not one of its node's ({approved.port} to {min(last, 65535)})"
    if taken_by(said, taken):
        return "the store, the bus or a frontend listens there"
    return ""


def taken_by(endpoint: Endpoint, taken: Collection[Endpoint]) -> bool:
    """Whether it may be one of `taken`. A name may stand for any of their hosts, so there the port decides."""
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return any(one.port == endpoint.port for one in taken)
    return endpoint in taken
