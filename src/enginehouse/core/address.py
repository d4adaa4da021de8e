"""Addresses that workers advertise, and which of them a frontend may send prompts and keys to.

A worker's claim is never trusted. A replica must listen on the approved host of its node, in that node's port range,
and never where the store, the bus or a frontend listens.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable

from msgspec import Struct

from enginehouse.core.errors import Invalid

PORTS = 1000  # per node, from its base port up: more engines than a machine runs
_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


class Endpoint(Struct, frozen=True):
    host: str
    port: int


def parse_endpoint(address: str) -> Endpoint:
    """Parse HOST:PORT, with an IPv6 address in brackets. The host is normalised by `plain_host`."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 65536:
        raise Invalid(f"cannot use {address[:80]!r} as an address: it must be HOST:PORT", code="invalid_address")
    return Endpoint(plain_host(host), int(port))


def plain_host(host: str) -> str:
    """Normalise a host: lower case, no brackets, canonical IP address, IPv4-mapped addresses as IPv4."""
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
    """Why a node may not advertise a host that resolves to `hosts`; "" if it may."""
    for host in hosts:
        if is_loopback(host) and not may_be_loopback:
            return f"{host} is this frontend's own machine: set --advertise-host to an address that it can reach"
        try:
            found = ipaddress.ip_address(plain_host(host))
        except ValueError:
            continue
        if found.is_link_local or found.is_unspecified or found.is_multicast:
            return f"{host} is not a unicast address"
    return ""


def is_within(host: str, networks: Collection[str]) -> bool:
    """Whether the operator's networks allow a node to move to this host without a new approval."""
    try:
        found = ipaddress.ip_address(plain_host(host))
    except ValueError:
        return False
    return any(found in ipaddress.ip_network(network, strict=False) for network in networks)


def replica_refusal(address: str, node_address: str, taken: Collection[Endpoint], *, last_port: int = 0) -> str:
    """Why the frontend must not use `address`, which a worker gave for a replica; "" if it may."""
    try:
        claimed, approved = parse_endpoint(address), parse_endpoint(node_address)
    except Invalid as error:
        return error.message
    if claimed.host != approved.host:
        return f"it is not on {approved.host}, the approved address of its node"
    last = last_port or approved.port + PORTS - 1
    if not approved.port <= claimed.port <= last:
        return f"its port is outside its node's range ({approved.port} to {min(last, 65535)})"
    if taken_by(claimed, taken):
        return "the store, the bus or a frontend listens there"
    return ""


def taken_by(endpoint: Endpoint, taken: Collection[Endpoint]) -> bool:
    """Whether it may be one of `taken`. A name may resolve to any of their hosts, so its port decides."""
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return any(one.port == endpoint.port for one in taken)
    return endpoint in taken
