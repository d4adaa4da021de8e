"""Which replica answers a request: chosen among routes in memory, with no database on the path of a warm request.

Routes are rebuilt from the store when something changed and every few seconds besides. In-flight counts live here and
nowhere else, so none can leak beyond this process. A request for a model without a route asks the loader once and waits
for the route to appear; the load outlives it.
"""

from __future__ import annotations

import asyncio
from math import ceil
from typing import Protocol

from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable
from enginehouse.core.routing import Route, choose_route
from enginehouse.store import nodes, replicas
from enginehouse.store.db import Connection, Store

LOOK_AGAIN_SECONDS = 1.0  # a waiting request asks how its load is doing; another frontend may be the one doing it


class Loads(Protocol):
    """What the router needs of the loader."""

    async def ensure(self, model: str) -> str:
        """Have a load of this model under way; its operation's id. Raises when the model is unknown or cannot load."""

    async def failure(self, operation_id: str) -> EnginehouseError | None:
        """Why that load ended without a replica; None while it goes on or after it succeeded."""

    async def loading(self, operation_id: str) -> dict[str, object]:
        """The `loading` object of a 503."""


class Pending:
    """The load that requests for one model wait for together."""

    def __init__(self) -> None:
        self.asking = asyncio.Lock()
        self.operation_id = ""
        self.waiters = 0
        self.is_over = False


class Router:
    def __init__(self, store: Store, loads: Loads, *, wait_seconds: float) -> None:
        self._store = store
        self._loads = loads
        self._wait_seconds = wait_seconds
        self._routes: dict[str, list[Route]] = {}
        self._in_flight: dict[str, int] = {}
        self._dropped: set[str] = set()
        self._pending: dict[str, Pending] = {}
        self._changed = asyncio.Event()
        self._turn = 0

    async def acquire(self, model: str) -> Route:
        routes = self._routes.get(model)
        if not routes:
            routes = await self._load(model)
        self._turn += 1
        route = choose_route(routes, self._in_flight, self._turn)
        self._in_flight[route.id] = self._in_flight.get(route.id, 0) + 1
        return route

    def release(self, route: Route) -> None:
        left = self._in_flight.get(route.id, 0) - 1
        if left > 0:
            self._in_flight[route.id] = left
        else:
            self._in_flight.pop(route.id, None)

    def drop(self, route: Route) -> None:
        """Known dead: not chosen again until the store says that another process has its slot."""
        self._dropped.add(route.id)
        left = [one for one in self._routes.get(route.model, ()) if one.id != route.id]
        self._routes[route.model] = left

    @property
    def in_flight(self) -> int:
        return sum(self._in_flight.values())

    def routes(self) -> list[Route]:
        return [route for routes in self._routes.values() for route in routes]

    async def step(self) -> None:
        """Rebuild the routes: ready replicas on nodes that are not offline."""

        def work(connection: Connection) -> list[Route]:
            by_id = {node.id: node for node in nodes.every(connection)}
            return [
                Route(
                    model=replica.model,
                    slot=replica.slot,
                    node_id=replica.node_id,
                    node_name=by_id[replica.node_id].name,
                    address=replica.address,
                    key=replica.key,
                    revision=replica.revision,
                    nonce=replica.nonce,
                )
                for replica in replicas.every(connection)
                if replica.node_id in by_id and by_id[replica.node_id].health != "offline"
            ]

        found = await self._store.transaction(work)
        # A dropped route is remembered only as long as its row stands.
        self._dropped &= {route.id for route in found}
        routes: dict[str, list[Route]] = {}
        for route in found:
            if route.id not in self._dropped:
                routes.setdefault(route.model, []).append(route)
        self._routes = routes
        self._changed.set()
        self._changed = asyncio.Event()

    async def _load(self, model: str) -> list[Route]:
        """Wait for a route. Of all the requests that wait for one model, one at a time asks the store."""
        pending = self._pending.setdefault(model, Pending())
        pending.waiters += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                async with pending.asking:
                    if not pending.operation_id:
                        pending.operation_id = await self._loads.ensure(model)
                return await self._wait_for_route(model, pending)
        except TimeoutError:
            raise await self._still_loading(model, pending.operation_id) from None
        finally:
            pending.waiters -= 1
            if not pending.waiters or pending.is_over:
                self._pending.pop(model, None)

    async def _wait_for_route(self, model: str, pending: Pending) -> list[Route]:
        while True:
            changed = self._changed
            if routes := self._routes.get(model):
                pending.is_over = True
                return routes
            if not pending.asking.locked():
                async with pending.asking:
                    failure = await self._loads.failure(pending.operation_id)
                if failure is not None:
                    pending.is_over = True
                    raise failure
            try:
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _still_loading(self, model: str, operation_id: str) -> Unavailable:
        error = Unavailable(
            f"cannot answer yet: {model} is still loading; try again in a moment", code="model_loading", param="model"
        )
        error.retry_after_seconds = min(300.0, max(5.0, ceil(self._wait_seconds)))
        error.details["loading"] = await self._loads.loading(operation_id)
        return error


def model_not_found(model: str) -> NotFound:
    return NotFound(
        f"cannot find a model named {model!r}: GET /v1/models lists what is served, "
        "`enginehouse models list` what could be",
        code="model_not_found",
        param="model",
    )
