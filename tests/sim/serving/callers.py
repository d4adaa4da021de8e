"""Callers of the inference API: each gets a route, uses the engine behind it, and remembers how it ended.

They do what `api.openai` does around the router: three routes are tried, one that cannot be reached is dropped. What
answers is whoever listens at the address of the route, as on a network.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.sim.loop import PROCESS
from tests.sim.serving.frontends import ROUTE_SECONDS, WAIT_SECONDS, ServingFrontend
from tests.sim.serving.options import Asking

from enginehouse.api.openai import ROUTES_TRIED
from enginehouse.build_frontend import Frontend
from enginehouse.core.errors import EnginehouseError, Unavailable, Upstream, http_status
from enginehouse.core.routing import Route

if TYPE_CHECKING:
    from tests.sim.serving.world import ServingWorld

CONNECT_SECONDS = 0.005
UNREACHABLE_SECONDS = 2.0  # until a machine that is cut off is given up
LOST = frozenset({"connection_lost", "connection_refused"})
SLACK_SECONDS = 8.0  # looks at the store, connections that time out
# From the end of a process until no frontend sends anything there: its worker tells at once, and tries again where the
# link is slow; a frontend that did nothing itself reads the routes at its next turn.
EXIT_KNOWN_SECONDS = 4.0 + ROUTE_SECONDS
# A machine that is gone is given up after twice STALE, by a look every few seconds.
NODE_KNOWN_SECONDS = 15.0 + 2.5 + EXIT_KNOWN_SECONDS


class Callers:
    def __init__(self, world: ServingWorld) -> None:
        self._world = world
        self.answered = 0
        self.refused = 0
        self.broken = 0

    async def ask(self, asking: Asking) -> None:
        await asyncio.sleep(asking.at)
        world, began = self._world, self._world.loop.time()
        frontend = world.frontends[asking.frontend % len(world.frontends)]
        assert isinstance(frontend, ServingFrontend)
        who = f"caller-{asking.number}"
        world.trace.note(who, f"asks {frontend.name} for {asking.model}")
        limit = WAIT_SECONDS + ROUTES_TRIED * (asking.seconds + UNREACHABLE_SECONDS) + SLACK_SECONDS
        try:
            nonce = await frontend.call(lambda to: self._infer(frontend, to, asking), limit)
        except EnginehouseError as error:
            world.trace.note(who, f"hears {error.code}")
            self.refused += 1
            is_peaceful = world.calm_seconds(frontend.name, "store") > limit
            if error.code in LOST:
                waited = world.loop.time() - began
                never = f"{who} waited {waited:.1f} s for {asking.model} and got nothing"
                world.judge("answers", never if waited >= limit and is_peaceful else "")
            else:
                self._judge_refusal(who, asking, error)
        else:
            world.trace.note(who, f"was answered by {nonce}")
            self.answered += 1

    def _judge_refusal(self, who: str, asking: Asking, error: EnginehouseError) -> None:
        """A request that is not answered hears when to come again. That a model is not there must be so."""
        world = self._world
        if error.code == "model_not_found":
            never_there = f"{who} heard that {asking.model} does not exist"
            world.judge("answers", "" if world.may_be_absent(asking.model) else never_there)
        elif error.code == "store_unavailable":
            world.judge("answers", "" if http_status(error) == 503 else f"{who} heard {error!r}")
        elif error.code == "upstream_error" and isinstance(error, Upstream):
            self.broken += 1  # its engine died: told as that
        elif http_status(error) != 503 or not error.retry_after_seconds:
            world.judge("answers", f"{who} heard {error!r} ({http_status(error)}) and not when to ask again")

    async def _infer(self, frontend: ServingFrontend, to: Frontend, asking: Asking) -> str:
        """In the process of the frontend."""
        for _ in range(ROUTES_TRIED):
            with self._world.choosing(asking.model):
                route = await to.router.acquire(asking.model)
                self._world.note_use(route.nonce)
            try:
                self._judge_route(frontend, route, asking)
                nonce = await self._use(route, asking)
                if nonce:
                    return nonce
                to.router.drop(route)
            finally:
                to.router.release(route)
        error = Unavailable("cannot reach any replica", code="replica_unreachable")
        error.retry_after_seconds = 1.0
        raise error

    async def _use(self, route: Route, asking: Asking) -> str:
        """The nonce of who answered; "" where nobody did and another route may be tried."""
        world = self._world
        machine, _ = world.engines[route.nonce]
        await asyncio.sleep(CONNECT_SECONDS if machine.name not in world.cut_links else UNREACHABLE_SECONDS)
        engine = world.engine_at(route.address)
        if engine is None or (engine.checks_key and engine.request.key != route.key):
            world.trace.note(PROCESS.get().name, f"cannot use {route.nonce}")
            return ""
        if engine.nonce != route.nonce:
            world.judge("G12", f"{engine.nonce} answered a request that was meant for {route.nonce}")
        with world.using(engine.nonce, PROCESS.get()):
            await asyncio.sleep(asking.seconds)
        if not world.is_alive(engine.nonce):
            raise Upstream("cannot finish the answer: the engine has ended", code="upstream_error")
        return engine.nonce

    def _judge_route(self, frontend: ServingFrontend, route: Route, asking: Asking) -> None:
        """G12 and G13 of what the router chose."""
        world, now = self._world, self._world.loop.time()
        machine, engine = world.engines[route.nonce]
        if engine.request.model.name != asking.model:
            world.judge("G12", f"{asking.model} was asked for, and {route.nonce} was chosen")
        deleted_at = world.deleted_at.get(asking.model, now)
        if world.began_at[route.nonce] < deleted_at:
            known = min(now - deleted_at, self._known_for(frontend.name))
            gone = f"{route.nonce} was chosen {known:.1f} s after {asking.model} had been deleted"
            world.judge("G12", gone if known > ROUTE_SECONDS + 1.0 else "")
        ended_at = world.ended_at.get(route.nonce)
        if ended_at is None:
            return
        known = min(now - ended_at, self._known_for(frontend.name, machine.name))
        bound = EXIT_KNOWN_SECONDS if machine.process is not None else NODE_KNOWN_SECONDS
        dead = f"{frontend.name} chose {route.nonce}, which ended {now - ended_at:.1f} s ago"
        world.judge("G13", dead if known > bound else "")

    def _known_for(self, *names: str) -> float:
        """For how long nothing kept a frontend from knowing; a store that does not confirm keeps every loop from it."""
        if self._world.store_weather.unknown_rate:
            return 0.0
        return self._world.calm_seconds("store", *names)
