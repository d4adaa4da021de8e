"""What tests of fetching pull with: a client of ours, the registries it knows, and a proxy with misfortunes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.fetch.faulty import Faulty
from tests.fetch.images import Image

from enginehouse.core.artifact import Layer
from enginehouse.fetch.http.addresses import Rules
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.origins import Origin, open_origin
from enginehouse.fetch.registry.requests import Registries

STALL_SECONDS = 0.4
FAST = RetryPolicy(factor=0.01)
LOOPBACK = Rules(allowed=("127.0.0.1",))


@dataclass
class Pull:
    """Everything to pull from the proxy that stands before the registry."""

    proxy: Faulty
    client: Client
    registries: Registries
    image: Image

    def origin(self, name: str = "backends/one:latest") -> Origin:
        return self.elsewhere(self.proxy.reference(name))

    def elsewhere(self, uri: str, sha256: str = "") -> Origin:
        return open_origin(uri, client=self.client, registries=self.registries, sha256=sha256)

    def know(self, credentials: Mapping[str, str]) -> None:
        """Credentials (`user:password`) by host, from now on."""
        self.registries = Registries(LOOPBACK, credentials=credentials, patience=FAST)


async def read_all(origin: Origin, layer: Layer, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([piece async for piece in origin.read(layer, start, end)])
