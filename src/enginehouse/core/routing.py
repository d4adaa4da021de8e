"""Which replica answers the next request. Pure: counts come in as arguments and live in the router's memory only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct


class Route(Struct, frozen=True, kw_only=True):
    """A ready replica on a healthy node, as the router keeps it in memory."""

    model: str
    slot: int
    node_id: str
    node_name: str
    address: str
    key: str
    revision: str
    nonce: str
    checks_key: bool = True  # else the process behind the address is asked for before it is used

    @property
    def id(self) -> str:
        # The nonce is the process: a restarted replica is a new route with a count of its own.
        return f"{self.node_id}/{self.model}#{self.slot}/{self.nonce}"


def choose_route(routes: Sequence[Route], in_flight: Mapping[str, int], turn: int) -> Route:
    """The least busy; among equals they take turns. `routes` is not empty."""
    rotated = [routes[(turn + offset) % len(routes)] for offset in range(len(routes))]
    return min(rotated, key=lambda route: in_flight.get(route.id, 0))
