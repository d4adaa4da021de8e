"""Chooses the replica for a request from routes in memory; a request for a loaded model needs no database.

Routes are compared with the store after changes and every few seconds, and made anew where they differ. Routes that
could not be refreshed for a minute, because the store was away or this process was frozen, are not used: their
replicas may have been removed meanwhile. In-flight counts exist only here, so they cannot leak beyond this process. A
request for a model without a route starts or joins a load and waits for the route; the load continues if the request
ends. A request for a model whose replicas all have as many requests as they can answer waits in a queue, and nobody
gets ahead of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from msgspec import Struct

from enginehouse.core.errors import NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.name import shown
from enginehouse.core.prefix import FULL
from enginehouse.core.routing import Route, choose_route, route_place
from enginehouse.frontend.serving.load_waits import Loads, LoadWaits
from enginehouse.frontend.serving.prefixes import Candidates, Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import FoundRoutes, KnownRows, RouteRows
from enginehouse.store.checksums import ServingChecksums
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

MEMORY_SECONDS = 60.0  # how long routes are used without a refresh


class RouteProofs(Protocol):
    async def holds(self, route: Route) -> bool:
        """Whether the process behind a route is still the one that was started."""


class OtherCounts(Protocol):
    """What the other frontends tell of their requests."""

    def of(self, nonce: str) -> int:
        """Their requests in flight to a process."""

    def contenders(self, model: str) -> int:
        """How many of them have requests that wait for a replica of the model."""

    def queued(self, model: str) -> int:
        """How many such requests they have."""

    def disturbed_ago(self, model: str) -> float | None:
        """Seconds since one of their requests could not go to the replica that has its prefix."""

    def pressing(self) -> set[str]:
        """The models of which one of the last two can be said."""


class NoCounts:
    def of(self, nonce: str) -> int:
        return 0

    def contenders(self, model: str) -> int:
        return 0

    def queued(self, model: str) -> int:
        return 0

    def disturbed_ago(self, model: str) -> float | None:
        return None

    def pressing(self) -> set[str]:
        return set()


NO_COUNTS = NoCounts()


class RouterParts(Struct, frozen=True, kw_only=True):
    """What a router uses beyond the store. Without `proofs` every route is used as it is."""

    rows: RouteRows
    proofs: RouteProofs | None = None
    prefixes: Prefixes
    queues: RequestQueues


class Router:
    def __init__(
        self,
        store: Store,
        loads: Loads,
        *,
        wait_seconds: float | None,
        memory_seconds: float = MEMORY_SECONDS,
        parts: RouterParts,
    ) -> None:
        """`wait_seconds` is how long a request waits for a load; None means no limit."""
        self._store = store
        self._waits = LoadWaits(
            loads, wait_seconds, lambda model: bool(self._routes.get(model)), self._dead_of, self.step
        )
        self._rows = parts.rows
        self._proofs = parts.proofs
        self.prefixes = parts.prefixes
        self.queues = parts.queues
        self._queued = parts.queues.by_model
        self._routes: dict[str, list[Route]] = {}
        self._known: dict[str, Route] = {}  # the same by their ids
        self._affine: dict[str, Candidates] = {}  # models whose routes are chosen by prefixes
        self._aliases: Mapping[str, str] = {}
        self._rows_before: KnownRows | None = None  # what the routes were made of
        self._in_flight: dict[str, int] = {}
        self._used: set[str] = set()  # nonces, since `used_since` was last called
        self._elsewhere: OtherCounts = NO_COUNTS
        self._forget: Callable[[str], None] = lambda address: None
        # When each was dropped, by the store's clock; None until the next step sets it.
        self._dropped: dict[Route, float | None] = {}
        self._pending = self._waits.pending
        self._turn = 0
        self._memory_seconds = memory_seconds
        self._looked_at: float | None = None
        self._refreshing = asyncio.Lock()

    async def acquire(self, model: str, token: str = "", body: bytes = b"") -> Route:
        """A route for a request, which counts as in flight until `release`. `token` is that of its caller, for turns in
        a queue; `body` is read for its prefix only if several replicas serve the model.
        """
        if self._looked_at is None or asyncio.get_running_loop().time() - self._looked_at > self._memory_seconds:
            await self._look_again(self._looked_at)
        model = self._aliases.get(model, model)
        while True:
            route = self._take(model, body)
            if route is None:
                route = await self._wait(model, token, body)
            if route.checks_key or self._proofs is None or await self._is_proven(route, self._proofs):
                return route

    def _take(self, model: str, body: bytes) -> Route | None:
        """Choose and count a route; None if there is none with room, or if others wait for one already."""
        routes = self._routes.get(model)
        if not routes or model in self._queued:
            return None
        route = routes[0]
        if len(routes) > 1 or (route.limit and not self._has_room(route)):
            found = self._choose(model, routes, body)
            if found is None:
                return None
            route = found
        self._in_flight[route.id] = self._in_flight.get(route.id, 0) + 1
        self._used.add(route.nonce)
        return route

    def _choose(self, model: str, routes: list[Route], body: bytes) -> Route | None:
        among = self._affine.get(model)
        if among is not None and body:
            chain = self.prefixes.chain_of(model, body)
            if chain:
                return self.prefixes.choose(chain, among, self._busy)
        self._turn += 1
        route = choose_route(routes, self._in_flight, self._turn, self._elsewhere.of)
        if not route.limit or self._has_room(route):
            return route
        return self._least_busy(routes)

    def _least_busy(self, routes: list[Route]) -> Route | None:
        """Of all routes the least busy one with room; None if there is none."""
        return min((one for one in routes if self._has_room(one)), key=self._busy, default=None)

    def _busy(self, route: Route) -> int:
        if route.limit and not self._has_room(route):
            return FULL
        return self._in_flight.get(route.id, 0) + self._elsewhere.of(route.nonce)

    def _has_room(self, route: Route) -> bool:
        """Whether a replica can answer one more request now. While other frontends have requests that wait for it too,
        each takes its share, and one place at least: what they tell is a second old, and whoever is full could
        otherwise keep the others out for ever.
        """
        if not route.limit:
            return True
        own, contenders = self._in_flight.get(route.id, 0), self._elsewhere.contenders(route.model)
        if contenders:
            return own < max(1, route.limit // (contenders + 1))
        return own + self._elsewhere.of(route.nonce) < route.limit

    async def _is_proven(self, route: Route, proofs: RouteProofs) -> bool:
        """Whether a route that was taken may be used; otherwise it is given back and not used again."""
        is_proven: bool | None = None
        try:
            is_proven = await proofs.holds(route)
        finally:
            if is_proven is False:
                self.drop(route)  # before the release, which would give it to a request that waits
            if not is_proven:
                self.release(route)
        return is_proven

    async def _wait(self, model: str, token: str, body: bytes) -> Route:
        """Wait for a load, or for a replica that has room."""
        while True:
            if not self._routes.get(model):
                await self._waits.wait(model)
                route = self._take(model, body)
            else:
                route = await self.queues.wait(model, token, body, self.release) or self._take(model, body)
            if route is not None:
                return route

    def release(self, route: Route) -> None:
        left = self._in_flight.get(route.id, 0) - 1
        if left > 0:
            self._in_flight[route.id] = left
        else:
            self._in_flight.pop(route.id, None)
        if route.model in self._queued:
            self._hand_over(route.model, route)

    def room_changed(self) -> None:
        """Give routes to requests that wait, after there may be more room than before."""
        for model in self.queues.lengths():
            if self._routes.get(model):
                self._hand_over(model, None)
            else:
                self.queues.send_away(model)

    def _hand_over(self, model: str, freed: Route | None) -> None:
        """Give routes with room to the requests whose turn it is; `freed` is looked at first."""
        while model in self._queued:
            route = self._known.get(freed.id) if freed is not None else None
            if route is None or not self._has_room(route):
                route = self._least_busy(self._routes.get(model, []))
            waiter = self.queues.take(model) if route is not None else None
            if route is None or waiter is None:
                return
            self._in_flight[route.id] = self._in_flight.get(route.id, 0) + 1
            self._used.add(route.nonce)
            if model in self._affine:
                self.prefixes.observe(self.prefixes.chain_of(model, waiter.body), route)
            waiter.place.set_result(route)

    def drop(self, route: Route) -> None:
        """Stop using a route that could not be reached, until another process has its slot or a later report of its
        node still shows this process: a busy machine may miss one connection.
        """
        self._dropped.setdefault(route, None)
        left = [one for one in self._routes.get(route.model, ()) if one.id != route.id]
        self._routes[route.model] = left
        self._known.pop(route.id, None)
        among = self._affine.pop(route.model, None)
        if among is not None and len(left) > 1:
            self._affine[route.model] = Candidates(left, self._known, among.thresholds)
        if not left and route.model in self._queued:
            self.queues.send_away(route.model)

    def count_with(self, elsewhere: OtherCounts) -> None:
        """Set what counts the requests of the other frontends."""
        self._elsewhere = elsewhere

    def on_gone(self, forget: Callable[[str], None]) -> None:
        """Set the callback for addresses that have no route any more: whoever stops the process waits until nobody is
        connected to it.
        """
        self._forget = forget

    def counts(self) -> dict[str, int]:
        """Requests in flight here, by the nonce of their process."""
        # A copy: transactions ask for this in other threads, while requests come and go.
        return {route_id.rpartition("/")[2]: count for route_id, count in self._in_flight.copy().items()}

    def used_since(self) -> set[str]:
        used, self._used = self._used | set(self.counts()), set()
        return used

    def was_used(self, nonce: str) -> bool:
        """Whether a process got a request since the last `used_since`, or has one now."""
        return nonce in self._used or nonce in self.counts()

    def in_flight_of(self, nonce: str) -> int:
        own = self.counts().get(nonce, 0) if self._in_flight else 0
        return own + self._elsewhere.of(nonce)

    def queued(self, model: str) -> int:
        """Requests of all frontends that wait for a replica of the model that has room."""
        return self.queues.lengths().get(model, 0) + self._elsewhere.queued(model)

    def disturbed_ago(self, model: str) -> float | None:
        """Seconds since a request last could not go to the replica that has its prefix, on any frontend."""
        ages = (self.prefixes.disturbed().get(model), self._elsewhere.disturbed_ago(model))
        return min((age for age in ages if age is not None), default=None)

    def pressing(self) -> set[str]:
        """The models with such requests, or for which `disturbed_ago` knows a time: few, of however many there are."""
        return {*self.queues.lengths(), *self.prefixes.disturbed(), *self._elsewhere.pressing()}

    def waiting(self) -> dict[str, int]:
        """Requests that wait here for a load, by model."""
        return {model: pending.waiters for model, pending in self._pending.items()}

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    def routes(self) -> list[Route]:
        return [route for routes in self._routes.values() for route in routes]

    async def _look_again(self, looked_at: float | None) -> None:
        """Refresh the routes once for all waiting requests; raises `Unavailable` if the store does not answer."""
        async with self._refreshing:
            if self._looked_at == looked_at:
                await self.step()

    async def step(self) -> None:
        """Refresh the routes: ready replicas on nodes that are neither offline nor drained."""
        began = asyncio.get_running_loop().time()
        before, dropped = self._rows_before, dict(self._dropped)

        def work(connection: Connection) -> FoundRoutes:
            return self._rows.read(connection, before, dropped)

        found = await self._store.look(work)
        # Another step may have ended meanwhile, and changes are those since what was given.
        changed = found.changed if before is self._rows_before else None
        self._rows_before, self._aliases = found.known, found.known.aliases
        self._apply(found, {route.id for route in dropped}, changed)
        self._looked_at = began
        self._waits.look_now()
        self.room_changed()
        self.prefixes.sweep()

    def confirm(self, seen: ServingChecksums, now: float, seen_at: float) -> bool:
        """Whether these checksums, which the store had `now` by its clock and `seen_at` by the loop's, are those of the
        routes. If nobody waits for routes either, they count as refreshed then.
        """
        known = self._rows_before
        if known is None or self._dropped or self._pending or self._queued or not known.is_of(seen, now):
            return False
        self._looked_at = max(seen_at, self._looked_at or seen_at)
        self.prefixes.sweep()
        return True

    def _apply(self, found: FoundRoutes, dropped: set[str], changed: Collection[str] | None) -> None:
        """Use the routes of models that changed; None for all models."""
        every = found.known.routes
        looked_at = {*every, *self._routes} if changed is None else {*changed, *(one.model for one in self._dropped)}
        # A dropped route is kept only as long as its row exists.
        standing = {one.id for model in looked_at for one in every.get(model, ())} - found.shown
        self._dropped = {
            route: at if at is not None or route.id not in dropped else found.now
            for route, at in self._dropped.items()
            if route.id in standing
        }
        dead = {route.id for route in self._dropped}
        gone: set[str] = set()
        for model in looked_at:
            for route in self._routes.pop(model, ()):
                self._known.pop(route.id, None)
                gone.add(route.address)
            self._affine.pop(model, None)
            some = [route for route in every.get(model, ()) if route.id not in dead]
            if not some:
                continue
            self._routes[model] = some
            self._known.update((route.id, route) for route in some)
            thresholds = self.prefixes.thresholds_of(found.known.schedules.get(model)) if len(some) > 1 else None
            if thresholds is not None:
                self._affine[model] = Candidates(some, self._known, thresholds)
        gone -= {route.address for model in looked_at for route in every.get(model, ())}
        for address in gone - {route.address for some in every.values() for route in some} if gone else ():
            self._forget(address)

    def _dead_of(self, model: str) -> set[str]:
        return {route.nonce for route in self._dropped if route.model == model}

    def in_flight_to(self, node_id: NodeId, model: str, slot: int) -> int:
        """Requests of this frontend that a replica is answering, whether it still has a route or not."""
        place = route_place(node_id, model, slot)
        return sum(count for route_id, count in self._in_flight.items() if route_id.startswith(place))


def model_not_found(model: str) -> NotFound:
    return NotFound(
        f"cannot find a model named {shown(model)}: GET /v1/models lists the served models, "
        "`enginehouse models list` also those that can be loaded",
        code="model_not_found",
        param="model",
    )
