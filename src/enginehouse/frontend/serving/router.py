"""Chooses the replica for a request from routes in memory; a request for a loaded model needs no database.

Routes are rebuilt from the store after changes and every few seconds. Routes that could not be refreshed for a minute,
because the store was away or this process was frozen, are not used: their replicas may have been removed meanwhile.
In-flight counts exist only here, so they cannot leak beyond this process. A request for a model without a route starts
or joins a load and waits for the route; the load continues if the request ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from math import ceil
from typing import Protocol

from enginehouse.core.errors import EnginehouseError, NotFound, Unavailable
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.model import Model, ServedModel, served_model
from enginehouse.core.name import shown
from enginehouse.core.replica import Replica
from enginehouse.core.routing import Route, choose_route
from enginehouse.store import db, models, nodes, replicas
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

MEMORY_SECONDS = 60.0  # how long routes are used without a refresh
NO_NODE = NodeId("")  # of a route to a server elsewhere
LOOK_AGAIN_SECONDS = 1.0  # a waiting request checks its load, which another frontend may steer


class Loads(Protocol):
    """The part of the loader that the router uses."""

    async def ensure(self, model: str, dead: Collection[str], waiting_for: str = "") -> OperationId:
        """Start or join a load and return its operation's id; "" if there is a replica other than the processes known
        to be `dead`. Raises if the model is unknown or its last load just failed, or if the load that the caller was
        `waiting_for` was cancelled or superseded.
        """

    async def loading(self, operation_id: OperationId) -> dict[str, object]:
        """Return the `loading` object of a 503."""


class RouteProofs(Protocol):
    async def holds(self, route: Route) -> bool:
        """Whether the process behind a route is still the one that was started."""


class Pending:
    """The load that the waiting requests for one model share."""

    def __init__(self) -> None:
        self.asking = asyncio.Lock()
        self.operation_id = OperationId("")
        self.waiters = 0
        self.asked = 0
        self.failure: EnginehouseError | None = None


class Router:
    def __init__(
        self,
        store: Store,
        loads: Loads,
        *,
        wait_seconds: float | None,
        memory_seconds: float = MEMORY_SECONDS,
        proofs: RouteProofs | None = None,
        key_of: Callable[[str], str] = lambda credential: "",
    ) -> None:
        """`wait_seconds` is how long a request waits for a load; None means no limit. `key_of` gives the value of a
        credential, for servers elsewhere.
        """
        self._store = store
        self._loads = loads
        self._wait_seconds = wait_seconds
        self._proofs = proofs
        self._key_of = key_of
        self._routes: dict[str, list[Route]] = {}
        self._served: dict[tuple[str, str], ServedModel] = {}
        self._in_flight: dict[str, int] = {}
        # When each was dropped, by the store's clock; None until the next step sets it.
        self._dropped: dict[Route, float | None] = {}
        self._pending: dict[str, Pending] = {}
        self._changed = asyncio.Event()
        self._turn = 0
        self._memory_seconds = memory_seconds
        self._looked_at: float | None = None
        self._refreshing = asyncio.Lock()

    async def acquire(self, model: str) -> Route:
        if self._looked_at is None or asyncio.get_running_loop().time() - self._looked_at > self._memory_seconds:
            await self._look_again(self._looked_at)
        while True:
            routes = self._routes.get(model)
            if not routes:
                routes = await self._load(model)
            self._turn += 1
            route = choose_route(routes, self._in_flight, self._turn)
            if route.checks_key or self._proofs is None or await self._proofs.holds(route):
                break
            self.drop(route)
        self._in_flight[route.id] = self._in_flight.get(route.id, 0) + 1
        return route

    def release(self, route: Route) -> None:
        left = self._in_flight.get(route.id, 0) - 1
        if left > 0:
            self._in_flight[route.id] = left
        else:
            self._in_flight.pop(route.id, None)

    def drop(self, route: Route) -> None:
        """Stop using a route that could not be reached, until another process has its slot or a later report of its
        node still shows this process: a busy machine may miss one connection.
        """
        self._dropped.setdefault(route, None)
        left = [one for one in self._routes.get(route.model, ()) if one.id != route.id]
        self._routes[route.model] = left

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
        """Rebuild the routes: ready replicas on nodes that are neither offline nor drained."""

        began = asyncio.get_running_loop().time()
        dropped = {route.id: at for route, at in self._dropped.items()}

        def work(connection: Connection) -> tuple[list[Route], set[str], float]:
            by_id = nodes.serving(connection)
            found = [
                Route(
                    model=replica.model,
                    slot=replica.slot,
                    node_id=replica.node_id,
                    node_name=by_id[replica.node_id],
                    address=replica.address,
                    key=replica.key,
                    revision=replica.revision,
                    nonce=replica.nonce,
                    checks_key=replica.checks_key,
                    protocol=replica.protocol,
                    served=self._served_by(replica),
                )
                for replica in replicas.every(connection)
                if replica.node_id in by_id
            ]
            found += [route for one in models.with_endpoints(connection) if (route := self._route_elsewhere(one))]
            alive = {
                route.id for route in found if route.id in dropped and _is_shown(connection, route, dropped[route.id])
            }
            return found, alive, db.now(connection)

        found, alive, now = await self._store.transaction(work)
        # A dropped route is kept only as long as its row exists.
        standing = {route.id for route in found} - alive
        self._dropped = {
            route: at if at is not None or route.id not in dropped else now
            for route, at in self._dropped.items()
            if route.id in standing
        }
        dead = {route.id for route in self._dropped}
        routes: dict[str, list[Route]] = {}
        for route in found:
            if route.id not in dead:
                routes.setdefault(route.model, []).append(route)
        self._routes = routes
        used = {(route.model, route.revision) for route in found}
        self._served = {key: served for key, served in self._served.items() if key in used}
        self._looked_at = began
        self._changed.set()
        self._changed = asyncio.Event()

    def _route_elsewhere(self, model: Model) -> Route | None:
        """The route to a server that is no node of the cluster; None if its credential is not known here."""
        try:
            key = self._key_of(model.credential)
        except EnginehouseError as error:
            log.warning("endpoint.skipped model=%s error=%s", model.name, error)
            return None
        return Route(
            model=model.name,
            slot=0,
            node_id=NO_NODE,
            node_name=model.endpoint,
            address=model.endpoint,
            key=key,
            revision=model.revision,
            nonce=model.revision,
        )

    def _served_by(self, replica: Replica) -> ServedModel | None:
        """The configuration of a replica; read once per model and revision."""
        if not replica.definition:
            return None
        key = (replica.model, replica.revision)
        if key not in self._served:
            self._served[key] = served_model(replica.definition)
        return self._served[key]

    async def _load(self, model: str) -> list[Route]:
        """Wait for a route. Of the requests that wait for one model, one at a time queries the store."""
        pending = self._pending.setdefault(model, Pending())
        pending.waiters += 1
        try:
            async with asyncio.timeout(self._wait_seconds):
                return await self._wait_for_route(model, pending)
        except TimeoutError:
            raise await self._still_loading(model, pending.operation_id) from None
        finally:
            pending.waiters -= 1
            if not pending.waiters:
                self._close(model, pending)

    def _close(self, model: str, pending: Pending) -> None:
        """End the sharing: later requests begin a new wait."""
        if self._pending.get(model) is pending:
            del self._pending[model]

    async def _wait_for_route(self, model: str, pending: Pending) -> list[Route]:
        while True:
            changed = self._changed
            if routes := self._routes.get(model):
                self._close(model, pending)
                return routes
            await self._ask(model, pending)
            if pending.failure is not None:
                raise pending.failure
            try:
                async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _ask(self, model: str, pending: Pending) -> None:
        """Check the load once for all waiting requests; all of them get the same error."""
        asked = pending.asked
        async with pending.asking:
            if pending.asked != asked:
                return  # checked while this request waited for the lock
            dead = {route.nonce for route in self._dropped if route.model == model}
            try:
                found = await self._loads.ensure(model, dead, pending.operation_id)
                pending.operation_id = found or pending.operation_id
            except EnginehouseError as error:
                pending.failure = error
                self._close(model, pending)
            pending.asked += 1

    async def _still_loading(self, model: str, operation_id: OperationId) -> Unavailable:
        error = Unavailable(
            f"cannot answer yet: {model} is still loading; retry in a moment", code="model_loading", param="model"
        )
        error.retry_after_seconds = min(300.0, max(5.0, ceil(self._wait_seconds or 0.0)))
        if operation_id:
            error.details["loading"] = await self._loads.loading(operation_id)
        else:
            error.details["loading"] = {"model": model, "state": "pending", "progress": 0.0}
        return error


def _is_shown(connection: Connection, route: Route, since: float | None) -> bool:
    """Whether the route's node reported its process after that moment. A server elsewhere reports nothing: it is tried
    again after each step.
    """
    if route.node_id == NO_NODE:
        return since is not None
    node = nodes.get(connection, route.node_id) if since is not None else None
    if node is None or since is None or node.report.mark <= since:
        return False
    return any(one.model_id == route.model and one.nonce == route.nonce for one in node.report.replicas)


def model_not_found(model: str) -> NotFound:
    return NotFound(
        f"cannot find a model named {shown(model)}: GET /v1/models lists the served models, "
        "`enginehouse models list` also those that can be loaded",
        code="model_not_found",
        param="model",
    )
