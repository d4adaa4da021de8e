"""The address of a NATS server: one URL or several separated by commas, optionally with a user.

Secrets in it are sent only to the server; logs and messages use `shown`.
"""

from __future__ import annotations

from urllib.parse import SplitResult, unquote, urlsplit

from msgspec import Struct

from enginehouse.bus.embedded import DEFAULT_PORT
from enginehouse.core.errors import Invalid

SCHEMES = ("nats", "tls")  # web sockets would need another library


class BusAddress(Struct, frozen=True, kw_only=True):
    servers: tuple[str, ...]  # without user-info
    user: str = ""
    password: str = ""
    token: str = ""  # a user without a password, as in every NATS client

    @property
    def shown(self) -> str:
        return ",".join(self.servers)

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Host and port of each server."""
        found = [urlsplit(server) for server in self.servers]
        return [(parts.hostname or "", parts.port or DEFAULT_PORT) for parts in found]

    @property
    def has_user(self) -> bool:
        return bool(self.user or self.token)


def worker_url(host: str, *, url: str, advertised: str, is_embedded: bool) -> str:
    """Return the address of the bus for a worker that reached the frontend at `host`; `url` is the frontend's own.

    An `advertised` host, with or without a port, wins. The embedded server runs on the frontend's machine. Another bus
    keeps its address, without the frontend's user and password: its workers bring their own.
    """
    port = url.rpartition(":")[2]
    if advertised:
        return f"nats://{advertised}" if ":" in advertised.strip("[]") else f"nats://{advertised}:{port}"
    if not is_embedded:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    return f"nats://[{host}]:{port}" if ":" in host else f"nats://{host}:{port}"


def parse_address(url: str) -> BusAddress:
    """Parse an address; the message of `Invalid` does not repeat it, because it may contain a password."""
    found: list[SplitResult] = []
    for text in url.split(","):
        try:
            parts = urlsplit(text.strip() if "//" in text else f"nats://{text.strip()}")
            is_good = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good:
            raise Invalid(
                "cannot use the address of the bus: it must look like nats://host:4222 or "
                "nats://user:password@host:4222, with special characters of a password as %XX",
                code="invalid_uri",
            )
        found.append(parts)
    servers = tuple(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl() for parts in found)
    named = next((parts for parts in found if parts.username), None)
    if named is None:
        return BusAddress(servers=servers)
    user = unquote(named.username or "")
    if named.password is None:
        return BusAddress(servers=servers, token=user)
    return BusAddress(servers=servers, user=user, password=unquote(named.password))
