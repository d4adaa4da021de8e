"""A frontend of a run about serving: the simulated one, with the loops that route, reconcile and count."""

from __future__ import annotations

import msgspec
from tests.sim.bus import SimBus
from tests.sim.frontends import SimFrontend

from enginehouse.build_frontend import Frontend
from enginehouse.frontend.serving.counts import TELL_SECONDS
from enginehouse.loop import Loop
from enginehouse.settings.programs import FrontendSettings

ROUTE_SECONDS = 2.5  # half of the real one; a quarter would only cost more
RECONCILE_SECONDS = 2.5
USES_SECONDS = 1.25
WAIT_SECONDS = 15.0
MEMORY_SECONDS = 15.0


class ServingFrontend(SimFrontend):
    async def _listen(self, objects: Frontend, bus: SimBus) -> None:
        await objects.router.step()
        await super()._listen(objects, bus)
        await objects.proofs.listen()
        await objects.counts.listen()

    def _set(self, settings: FrontendSettings) -> FrontendSettings:
        return msgspec.structs.replace(
            settings, model_load_wait_seconds=WAIT_SECONDS, route_memory_seconds=MEMORY_SECONDS
        )

    def _more_loops(self, made: Frontend) -> list[Loop]:
        return [
            Loop("route", made.router.step, ROUTE_SECONDS),
            Loop("reconcile", made.reconciler.step, RECONCILE_SECONDS),
            Loop("note-uses", made.reconciler.uses_step, USES_SECONDS),
            Loop("tell-counts", made.counts.step, TELL_SECONDS),
        ]
