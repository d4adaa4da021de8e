"""Routing: the choice of a replica for a request.

Pure: in-flight counts are arguments and live only in the memory of the router, so no count can leak into the store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
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
    limit: int = 0  # requests that it answers at the same time; 0 if unknown

    # The nonce identifies the process: a restarted replica is a new route with its own count. Made once, because every
    # request looks at the ids of several routes.
    id: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "id", f"{self.node_id}/{self.model}#{self.slot}/{self.nonce}")


def route_place(node_id: NodeId, model: str, slot: int) -> str:
    """The beginning of the ids of all routes to one slot."""
    return f"{node_id}/{model}#{slot}/"


# Of many routes, the best of so many is chosen, which are others each time: nearly as even as a look at all of them,
# and as cheap for a thousand routes as for eight.
COMPARED = 8


def choose_route(
    routes: Sequence[Route], in_flight: Mapping[str, int], turn: int, elsewhere: Callable[[str], int] | None = None
) -> Route:
    """The least busy route; equal ones take turns. `routes` must not be empty. `elsewhere` counts the requests of the
    other frontends by the nonce of a process.
    """
    number = len(routes)
    if number == 1:
        return routes[0]
    first = turn if number <= COMPARED else turn * COMPARED
    best, least = routes[first % number], -1
    for offset in range(min(number, COMPARED)):
        route = routes[(first + offset) % number]
        busy = in_flight.get(route.id, 0) + (elsewhere(route.nonce) if elsewhere is not None else 0)
        if not busy:
            return route
        if least < 0 or busy < least:
            best, least = route, busy
    return best
