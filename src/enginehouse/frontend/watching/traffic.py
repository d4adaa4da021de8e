"""Counts the requests of the whole cluster, in memory: those that end here, and those that other frontends tell of.

A request costs one look-up and a few additions here. What is counted here is taken twice: to be told to the others
(`untold`), and together with theirs to be shown (`take`). Nothing accumulates: keys are of requests since the last time
it was taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct

from enginehouse.core.ids import NodeId

Place = tuple[str, str]  # model and id of the node; "" if there was none, or none that is known


class PlaceCounts(NamedTuple):
    """As frontends tell each other."""

    model: str
    node_id: str
    requests: int
    errors: int
    tokens: int
    first_tokens: int  # streams whose first token was measured
    first_token_seconds: float  # their sum


class Tallied:
    """Sums of requests."""

    __slots__ = ("errors", "first_token_seconds", "first_tokens", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = self.errors = self.tokens = self.first_tokens = 0
        self.first_token_seconds = 0.0

    def add(self, other: Tallied | PlaceCounts) -> None:
        # What another frontend tells must not make a sum decrease.
        self.requests += max(0, other.requests)
        self.errors += max(0, other.errors)
        self.tokens += max(0, other.tokens)
        self.first_tokens += max(0, other.first_tokens)
        self.first_token_seconds += max(0.0, other.first_token_seconds)

    @property
    def mean_first_token_seconds(self) -> float | None:
        return round(self.first_token_seconds / self.first_tokens, 4) if self.first_tokens else None


Sums = dict[Place, Tallied]


class Occupancy(Struct, frozen=True, kw_only=True):
    """The requests of all frontends that are under way at one moment."""

    in_flight: int = 0
    in_flight_by_model: Mapping[str, int] = {}
    in_flight_by_node: Mapping[NodeId, int] = {}
    queued_by_model: Mapping[str, int] = {}  # that wait for a load, or for a replica with room

    @property
    def queued(self) -> int:
        return sum(self.queued_by_model.values())


class TrafficCounts:
    def __init__(self) -> None:
        self._own: Sums = {}
        self._untold: Sums = {}
        self._taken: Sums = {}

    def count(
        self, model: str, node_id: str, *, tokens: int, is_error: bool, first_token_seconds: float | None
    ) -> None:
        """Count a request that ended here."""
        counts = self._own.get((model, node_id))
        if counts is None:
            counts = self._own[model, node_id] = Tallied()
        counts.requests += 1
        counts.tokens += tokens
        if is_error:
            counts.errors += 1
        if first_token_seconds is not None:
            counts.first_tokens += 1
            counts.first_token_seconds += first_token_seconds

    def untold(self) -> list[PlaceCounts]:
        """What ended here since the last call. It is for the others, whether they can be told or not: told late, it
        would look as if it had ended then.
        """
        self._move()
        told, self._untold = self._untold, {}
        return [
            PlaceCounts(*place, one.requests, one.errors, one.tokens, one.first_tokens, one.first_token_seconds)
            for place, one in told.items()
        ]

    def hear(self, told: Iterable[PlaceCounts]) -> None:
        """Count what ended on another frontend."""
        for one in told:
            add_to(self._taken, (one.model, one.node_id), one)

    def take(self) -> Sums:
        """What ended anywhere since the last call."""
        self._move()
        taken, self._taken = self._taken, {}
        return taken

    def _move(self) -> None:
        own, self._own = self._own, {}
        for place, one in own.items():
            add_to(self._untold, place, one)
            add_to(self._taken, place, one)


def add_to(sums: Sums, place: Place, one: Tallied | PlaceCounts) -> None:
    known = sums.get(place)
    if known is None:
        known = sums[place] = Tallied()
    known.add(one)


def sum_of(sums: Mapping[Place, Tallied]) -> Tallied:
    total = Tallied()
    for one in sums.values():
        total.add(one)
    return total


def by_model(sums: Mapping[Place, Tallied]) -> dict[str, Tallied]:
    """The sums of each known model."""
    found: dict[str, Tallied] = {}
    for (model, _), one in sums.items():
        if model:
            found.setdefault(model, Tallied()).add(one)
    return found


def by_node(sums: Mapping[Place, Tallied]) -> dict[str, Tallied]:
    """The sums of each node that answered."""
    found: dict[str, Tallied] = {}
    for (_, node_id), one in sums.items():
        if node_id:
            found.setdefault(node_id, Tallied()).add(one)
    return found
