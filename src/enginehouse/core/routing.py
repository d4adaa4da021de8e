"""Routing: the choice of a replica for a request.

Pure: in-flight counts are arguments and live only in the memory of the router, so no count can leak into the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core.ids import NodeId
from enginehouse.core.model import ServedModel
from enginehouse.core.replica import OPENAI_HTTP, EngineProtocol


class Route(Struct, frozen=True, kw_only=True):
    """A ready replica on a healthy node, as the router keeps it in memory."""

    model: str
    slot: int
    node_id: NodeId
    node_name: str
    address: str
    key: str
    revision: str
    nonce: str
    checks_key: bool = True  # otherwise the identity of the process is checked before use
    protocol: EngineProtocol = OPENAI_HTTP
    served: ServedModel | None = None  # for engines whose requests are translated

    @property
    def id(self) -> str:
        # The nonce identifies the process: a restarted replica is a new route with its own count.
        return f"{self.node_id}/{self.model}#{self.slot}/{self.nonce}"


def choose_route(routes: Sequence[Route], in_flight: Mapping[str, int], turn: int) -> Route:
    """The least busy route; equal ones take turns. `routes` must not be empty."""
    if len(routes) == 1:
        return routes[0]
    rotated = [routes[(turn + offset) % len(routes)] for offset in range(len(routes))]
    return min(rotated, key=lambda route: in_flight.get(route.id, 0))
