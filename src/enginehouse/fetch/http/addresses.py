"""The rules for outbound addresses, against server-side request forgery.

A URL is checked before any connection. All addresses that its host resolves to are checked before one of them is
used, and the connection goes to a checked address only. Addresses that are not public are refused unless the operator
listed the host or the network in `Rules.allowed`.
Hosts that parsers read differently (unusual spellings of addresses, zones, trailing dots) are always refused.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.reference import MAX_URI, shown_uri

IpAddress = IPv4Address | IPv6Address
_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?(?:\.[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?)*")
_NUMBER = re.compile(r"(?:[0-9]+|0x[0-9a-f]*)")
MAX_URL = 4 * MAX_URI  # signed URLs of CDNs are longer than URLs typed by hand
MAX_HOST = 253

# Listed here because the answer of `is_global` differs between releases of Python.
_NOT_PUBLIC_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
_PUBLIC_6 = IPv6Network("2000::/3")
# Protocol assignments (with Teredo), documentation, 6to4. Teredo and 6to4 addresses embed another address.
_NOT_PUBLIC_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
# NAT64: IPv6-only networks reach public IPv4 addresses through this prefix. The embedded address decides.
_NAT64 = IPv6Network("64:ff9b::/96")


class Rules(Struct, frozen=True):
    """Allowed destinations: `host`, `host:port`, a CIDR network, or `http://host[:port]` for a plain HTTP registry."""

    allowed: tuple[str, ...] = ()


class CheckedTarget(Struct, frozen=True):
    """A checked URL. `address` is set if the host is an IP address, which needs no resolution."""

    url: str
    scheme: str
    host: str
    port: int
    address: IpAddress | None = None

    @property
    def origin(self) -> tuple[str, str, int]:
        """Scheme, host and port: credentials are bound to these three."""
        return self.scheme, self.host, self.port


class _Listed(Struct, frozen=True):
    host: str
    port: int | None
    is_plain: bool


class ParsedRules:
    """The parsed rules. An entry that cannot be parsed is refused here, not at the first request."""

    def __init__(self, rules: Rules) -> None:
        self._networks: list[IPv4Network | IPv6Network] = []
        self._hosts: list[_Listed] = []
        for entry in rules.allowed:
            self._read(entry.strip())

    def check_url(self, url: str) -> CheckedTarget:
        """Parse and check `url`, without resolving its host. Raises `Invalid` if it is malformed or not allowed."""
        target = _target(url)
        if target.address is not None:
            self.check_address(target.host, target.port, target.address)
        return target

    def check_address(self, host: str, port: int, address: IpAddress) -> None:
        if self._lists(host, port) or any(address in network for network in self._networks) or is_public(address):
            return
        raise Invalid(
            f"cannot connect to {host}: {address} is not a public address; to allow it, use --allow-host {host} "
            "(ENGINEHOUSE_ALLOWED_HOSTS)",
            code="uri_not_allowed",
        )

    def scheme_of_registry(self, registry: str) -> str:
        """Return `http` for a registry listed as plain HTTP or listed and on loopback, `https` for all others."""
        try:
            target = _target(f"https://{registry}")
            plain = _target(f"http://{registry}")
        except Invalid:
            # The request fails later, with the whole URL in its message.
            return "https"
        for listed in self._hosts:
            for candidate in (target, plain):
                if listed.is_plain and listed.host == candidate.host and listed.port in (None, candidate.port):
                    return "http"
        is_loopback = target.host == "localhost" or (target.address is not None and target.address.is_loopback)
        is_listed = self._lists(target.host, target.port) or self._lists(plain.host, plain.port)
        in_network = target.address is not None and any(target.address in network for network in self._networks)
        return "http" if is_loopback and (is_listed or in_network) else "https"

    def _lists(self, host: str, port: int) -> bool:
        return any(listed.host == host and listed.port in (None, port) for listed in self._hosts)

    def _read(self, entry: str) -> None:
        is_plain = entry.startswith("http://")
        text = entry.removeprefix("http://").removesuffix("/")
        try:
            if "/" in text:
                self._networks.append(ip_network(text, strict=False))
                return
            bare = f"[{text}]" if text.count(":") > 1 and not text.startswith("[") else text
            target = _target(f"http://{bare}")
            has_port = urlsplit(f"http://{bare}").port is not None
        except (ValueError, Invalid) as error:
            raise Invalid(
                f"cannot use {entry!r} as an allowed host: write host, host:port, a network such as 10.0.0.0/8, or "
                "http://host[:port]",
                code="invalid_uri",
            ) from error
        self._hosts.append(_Listed(target.host, target.port if has_port else None, is_plain))


def is_public(address: IpAddress) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_4)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFFFFFF))
    if address.scope_id is not None or address not in _PUBLIC_6:
        return False
    return not any(address in network for network in _NOT_PUBLIC_6)


def _target(url: str) -> CheckedTarget:
    # Checked before parsing: urlsplit silently removes line ends and tabs, and normalisation turns some letters into
    # digits.
    if any(not " " < character <= "~" or character in '"<>\\^`{|}' for character in url):
        raise _not_allowed(url, "it contains characters that are not allowed in a URL")
    if len(url) > MAX_URL:
        raise _invalid(url, f"it is longer than {MAX_URL} characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _invalid(url, "it is not a URL") from error
    if not parts.scheme:
        raise _invalid(url, "it has no scheme")
    if parts.scheme not in _PORTS:
        raise _not_allowed(url, f"the scheme {parts.scheme} is not allowed; use http or https")
    if not parts.hostname:
        raise _invalid(url, "it has no host")
    if "@" in parts.netloc:
        raise _not_allowed(url, "it contains credentials; remove them from the URL")
    if port == 0:
        raise _invalid(url, "port 0 is not a valid port")
    host, address = _host(parts.hostname, url)
    # The host has one canonical spelling from here on, so that later parsers cannot read another host.
    netloc = (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
    rest = url.partition("://")[2][len(parts.netloc) :]
    return CheckedTarget(f"{parts.scheme}://{netloc}{rest}", parts.scheme, host, port or _PORTS[parts.scheme], address)


def _host(text: str, url: str) -> tuple[str, IpAddress | None]:
    if ":" in text:
        try:
            address = ip_address(text)
        except ValueError as error:
            raise _not_allowed(url, "its host is not a valid IPv6 address") from error
        if isinstance(address, IPv6Address) and address.scope_id is not None:
            raise _not_allowed(url, "its address has a zone")
        return str(address), address
    if _NUMBER.fullmatch(text.rpartition(".")[2]):
        try:
            return text, IPv4Address(text)
        except ValueError as error:
            raise _not_allowed(url, "its host is not a valid IPv4 address; write four decimal numbers") from error
    if len(text) > MAX_HOST or not _NAME.fullmatch(text):
        raise _not_allowed(url, "its host is not a valid name")
    return text, None


def _not_allowed(url: str, why: str) -> Invalid:
    return Invalid(f"cannot request {shown_uri(url)}: {why}", code="uri_not_allowed")


def _invalid(url: str, why: str) -> Invalid:
    return Invalid(f"cannot request {shown_uri(url)}: {why}", code="invalid_uri")
