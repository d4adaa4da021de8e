"""One run about serving from one seed: misfortunes, then calm until all is as it is wanted, then more calm.

Deterministic as the other runs are, and judged by the same ledgers as well.
"""

from __future__ import annotations

import asyncio

from tests.sim.loop import SimLoop
from tests.sim.options import Options
from tests.sim.run import Result, run_world
from tests.sim.serving.callers import Callers
from tests.sim.serving.judgement import judge_operators, settle, stay
from tests.sim.serving.operators import Operators
from tests.sim.serving.options import ServingOptions
from tests.sim.serving.world import ServingWorld
from tests.sim.store import EPOCH, Database

from enginehouse.store import models

STEP_LIMIT = 2_000_000


def run_serving(serving: ServingOptions) -> Result:
    def make(options: Options, loop: SimLoop, database: Database) -> ServingWorld:
        return ServingWorld(serving, loop, database)

    return run_world(serving.weather, make, _phases, STEP_LIMIT)


async def _phases(world: ServingWorld) -> None:
    operators, callers = Operators(world), Callers(world)
    _add_models(world)
    for frontend in world.frontends:
        frontend.start()
    for machine in world.machines:
        machine.start()
    async with asyncio.TaskGroup() as safety:
        for fault in world.options.faults:
            safety.create_task(world.strike(fault))
        for wish in world.serving.wishes:
            safety.create_task(operators.ask(wish))
        for asking in world.serving.askings:
            safety.create_task(callers.ask(asking))
        safety.create_task(asyncio.sleep(world.options.safety_seconds))
    world.calm_down()
    await settle(world)
    judge_operators(world, operators)
    await stay(world)
    await asyncio.sleep(0)  # a violation of the last moment ends the run before its end does


def _add_models(world: ServingWorld) -> None:
    """Every model is served from the start, and cold."""
    database = world.database
    database.connection.execute("begin")
    for model in world.galleries[0].models:
        models.add(database.held, model, EPOCH)
    database.connection.execute("commit")
