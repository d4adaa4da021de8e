"""What the view needs of the cluster: requests, lists and the events, as `client.live` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from enginehouse.cli.terminal.fleet_state import Arrival, ListName


class ClusterDoor(Protocol):
    @property
    def url(self) -> str: ...

    def start(self, take: Callable[[Arrival], None]) -> None:
        """Pass on everything that arrives from now on, from other threads."""

    def stop(self) -> None: ...

    def read(self, names: Iterable[ListName]) -> None: ...

    def heard_at(self) -> float | None: ...

    def request(self, method: str, path: str, body: object = None) -> object:
        """Blocks, with a limit. Raises the errors of the API."""
