"""Chooses replicas by the beginning of prompts, and keeps which replica has seen which beginning.

The only door to xxhash. Everything is in memory and best effort: what is lost costs an engine a prompt that it has to
read again. Observations of the other frontends come with their in-flight counts, by the ids of routes, which are the
same everywhere. `core.prefix` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct
from xxhash import xxh64_intdigest

from enginehouse.core.prefix import (
    DISTURBED_SECONDS,
    FULL,
    TTL_SECONDS,
    PrefixIndex,
    Thresholds,
    choose_by_prefix,
    hash_chain,
    prompt_source,
)
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule

PREFIX_CACHE = "prefix_cache"
COMPARED = 16  # of many routes, the one with the match and so many others, which are others each time
SWEPT_AT_ONCE = 4096  # expired entries between two requests: a millisecond
MAX_TOLD = 128  # observations that wait to be told to the other frontends; newer ones replace the oldest

Chain = tuple[int, ...]


class Candidates(Struct, frozen=True):
    """The routes of a model, all routes of this frontend by their ids, and the thresholds of the model."""

    routes: Sequence[Route]
    known: Mapping[str, Route]
    thresholds: Thresholds


class Prefixes:
    """`default` are the thresholds of models without a policy of their own; None if these ignore prefixes."""

    def __init__(
        self, monotonic: Callable[[], float], *, default: Thresholds | None = None, ttl_seconds: float = TTL_SECONDS
    ) -> None:
        self._monotonic = monotonic
        self._default = default
        self._index = PrefixIndex(ttl_seconds)
        self._disturbed: dict[str, float] = {}  # when, by model
        self._untold: dict[Chain, str] = {}
        self._turn = 0
        self.disturbances: dict[str, int] = {}  # since the start, by model

    def thresholds_of(self, schedule: Schedule | None) -> Thresholds | None:
        """Those of a model; None if its requests are spread without regard to prefixes."""
        if schedule is None or not schedule.route_policy:
            chosen = self._default
        else:
            chosen = Thresholds() if schedule.route_policy == PREFIX_CACHE else None
        if chosen is None or schedule is None:
            return chosen
        return chosen.overridden(
            schedule.balance_abs_threshold, schedule.balance_rel_threshold, schedule.min_prefix_match
        )

    def chain_of(self, model: str, body: bytes) -> Chain:
        """The hashes of the beginning of a request; empty if it has no text."""
        return hash_chain(model, prompt_source(body), xxh64_intdigest)

    def choose(self, chain: Chain, among: Candidates, busy: Callable[[Route], int]) -> Route | None:
        """The route for a request with this beginning; None if all are full, which `busy` says with `FULL`."""
        now = self._monotonic()
        self._index.sweep(now, SWEPT_AT_ONCE // 16)  # weights are those of what is still remembered
        hot, compared = self._compared(chain, among, now)
        index = self._index

        def weigh(position: int) -> float:
            return index.relative_weight(compared[position].id)

        chosen = choose_by_prefix([busy(route) for route in compared], hot, weigh, among.thresholds)
        if chosen is not None:
            route: Route | None = compared[chosen]
        else:
            # Others than those that were compared may have room.
            others = among.routes if len(compared) < len(among.routes) else ()
            route = next((one for one in others if busy(one) != FULL), None)
        if route is None:
            return None
        if hot is not None and chosen != hot:
            self._disturbed[route.model] = now
            self.disturbances[route.model] = self.disturbances.get(route.model, 0) + 1
        self.observe(chain, route)
        return route

    def _compared(self, chain: Chain, among: Candidates, now: float) -> tuple[int | None, Sequence[Route]]:
        """The routes to compare, and the position of the one with a sufficient match, if there is one."""
        routes, number = among.routes, len(among.routes)
        replica, depth = self._index.match(chain, among.known, now)
        hot = among.known[replica] if depth and depth / len(chain) >= among.thresholds.least_match else None
        if number <= COMPARED:
            return next((position for position, route in enumerate(routes) if route is hot), None), routes
        self._turn += 1
        first = self._turn * COMPARED
        others = [routes[(first + offset) % number] for offset in range(COMPARED)]
        if hot is None:
            return None, others
        return 0, [hot, *(route for route in others if route is not hot)]

    def observe(self, chain: Chain, route: Route) -> None:
        """Note that this replica gets a request with this beginning."""
        if chain and self._index.observe(chain, route.id, self._monotonic()):
            self._untold.pop(chain, None)
            self._untold[chain] = route.id
            if len(self._untold) > MAX_TOLD:
                del self._untold[next(iter(self._untold))]

    def sweep(self) -> None:
        now = self._monotonic()
        self._index.sweep(now, SWEPT_AT_ONCE)
        self._disturbed = {model: at for model, at in self._disturbed.items() if now - at <= DISTURBED_SECONDS}

    # Other frontends --------------------------------------------------------------------------------------------

    def untold(self) -> list[tuple[str, Chain]]:
        """What was observed here and is new since the last call."""
        taken, self._untold = self._untold, {}
        return [(route_id, chain) for chain, route_id in taken.items()]

    def take(self, observed: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Note what another frontend has observed; it is not told again."""
        now = self._monotonic()
        for route_id, chain in observed:
            self._index.observe(chain, route_id, now)

    def disturbed(self) -> dict[str, float]:
        """Seconds since a request last had to go to another replica than the one with its prefix, by model."""
        now = self._monotonic()
        return {model: now - at for model, at in self._disturbed.copy().items() if now - at <= DISTURBED_SECONDS}
