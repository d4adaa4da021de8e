"""Thousands of loads, unloads, evictions, cancels and failures on one frontend: nothing of it stays behind.

The frontend is whole, with its store on SQLite; the workers are stubs in memory that have what they were told to have.
Memory, tasks, descriptors and the rows of what is under way are the same after the last step as after the first
hundred. Operations and intents are history: they are kept for a week, and the last thousand for longer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import sys
from functools import partial

import msgspec
import psutil
import pytest
from sqlalchemy import Table, func, select
from tests.frontend.world import MODEL, Time, World, installed

from enginehouse.core import node_api
from enginehouse.core.action import StartReplica, StopReplica
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import HeldModel
from enginehouse.core.replica import RunningReplica
from enginehouse.frontend.acceptance import Requester
from enginehouse.store import models, schema
from enginehouse.store.db import Connection

IS_PROOF = bool(os.environ.get("ENGINEHOUSE_PROOF"))
STEPS = 10_000 if IS_PROOF else 300
WARM_STEPS = 2_000 if IS_PROOF else 100  # after these nothing may grow: caches are full and the history is pruned
STEP_SECONDS = 300.0  # of the store's clock: the week of the history is over after two thousand steps
GIB = 1024**3
NAMES = ("one", "two", "three", "four", "five")
BY = Requester(author="someone")
GONE = Outcome(code="backend_exited", message="cannot start: it exited")
# Allocations of Python that are not given back. Two hundred steps were seen to leave some fifty.
GROWN_BLOCKS = 5_000 if IS_PROOF else 1_000


class Machine:
    """A stub of a worker: room for one engine, which it starts and stops as it is told."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.running: dict[str, RunningReplica] = {}
        self._sequence = 0

    def carry_out(self, intent: Intent, chance: random.Random) -> Outcome:
        action = intent.action
        if isinstance(action, StopReplica):
            self.running.pop(action.model, None)
            return Outcome()
        if not isinstance(action, StartReplica):
            return Outcome()
        if chance.random() < 0.1:
            return GONE
        nonce = f"{chance.getrandbits(64):016x}"
        self.running[action.model.name] = RunningReplica(
            model_id=action.model.name,
            replica_index=action.slot,
            address="h:9",
            nonce=nonce,
            generation=intent.generation,
            revision=action.model.revision,
            memory_bytes=4 * GIB,
        )
        return Outcome(address="h:9", nonce=nonce)

    async def report(self, world: World) -> None:
        self._sequence += 1
        free = 6 * GIB - 4 * GIB * len(self.running)
        await world.reports.heartbeat(self.node_id, node_api.HeartbeatRequest(available_ram=max(1, free)))
        await world.report(
            self.node_id,
            sequence=self._sequence,
            backends=(installed("engine", "sha256:1"),),
            models=tuple(HeldModel(name, ("ab",)) for name in NAMES),
            replicas=tuple(self.running.values()),
        )


class Soak:
    def __init__(self, world: World, time: Time, machines: list[Machine]) -> None:
        self._world, self._time, self._machines = world, time, machines
        self._chance = random.Random(1)
        self._steps = 0
        self.starts = self.stops = self.failures = self.cancels = 0

    async def step(self) -> None:
        """One request, carried out or cancelled on its way."""
        self._time.passed += STEP_SECONDS
        name, chance = self._chance.choice(NAMES), self._chance.random()
        try:
            if chance < 0.25:
                await self._world.operations.request_unload(name, None, BY)
            elif chance < 0.45:
                begun = await self._world.loader.ensure(name, ())
                await self._world.loader.step()
                if begun:
                    await self._world.cancellation.cancel(begun, None, "someone")
                    self.cancels += 1
            else:
                await self._world.loader.ensure(name, ())
        except EnginehouseError:
            self.failures += 1  # nothing to unload, or the load before it just failed
        await self._carry_out()
        self._steps += 1
        if self._steps % 5 == 0:
            await self._look_around()

    async def _carry_out(self) -> None:
        """Until nothing is under way."""
        for _ in range(12):
            await self._world.loader.step()
            await self._world.dispatcher.step()
            done = 0
            for machine in self._machines:
                intents = await self._world.open_intents(machine.node_id)
                for intent in intents:
                    outcome = machine.carry_out(intent, self._chance)
                    self.starts += isinstance(intent.action, StartReplica) and not outcome.code
                    self.stops += isinstance(intent.action, StopReplica)
                    await self._world.reply(intent, outcome)
                    done += 1
                if intents:
                    self._time.passed += 1.0
                    await machine.report(self._world)
            if not done and not await self._world.store.transaction(lambda c: rows_of(c, schema.operations, open=True)):
                return

    async def _look_around(self) -> None:
        """What the loops of a frontend do meanwhile."""
        world = self._world
        world.bus.take()
        await world.router.step()
        routes = world.router.routes()
        if routes:
            world.router.release(await world.router.acquire(routes[0].model))
        await world.reconciler.uses_step()
        await world.counts.step()
        await world.board.step()
        await world.board.catch_up_step()
        await world.cancellation.prune_step()

    async def measure(self) -> dict[str, int]:
        gc.collect()
        counted = {
            table.name: await self._world.store.transaction(partial(rows_of, table=table))
            for table in (schema.reservations, schema.leases, schema.replicas)
        }
        return {
            **counted,
            "tasks": len(asyncio.all_tasks()),
            "descriptors": psutil.Process().num_fds(),
            "blocks": sys.getallocatedblocks(),
        }


def rows_of(connection: Connection, table: Table, *, open: bool = False) -> int:
    query = select(func.count()).select_from(table)
    if open:
        query = query.where(table.c.is_steered)
    return int(connection.execute(query).scalar_one())


@pytest.mark.slow
async def test_nothing_grows_with_the_number_of_loads(
    world: World, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "enginehouse")  # the runner keeps every line that is logged
    machines = [Machine((await world.join(name)).id) for name in ("first", "second", "third")]
    for name in NAMES:
        model = msgspec.structs.replace(MODEL, name=name, config={"memory": 4 * GIB})
        await world.store.transaction(partial(models.insert, model=model, now=1.0))
    soak = Soak(world, time, machines)
    for machine in machines:
        await machine.report(world)
    for _ in range(WARM_STEPS):
        await soak.step()
    before = await soak.measure()
    for _ in range(STEPS - WARM_STEPS):
        await soak.step()
    after = await soak.measure()
    assert min(soak.starts, soak.stops, soak.cancels) > STEPS // 20, "it did all of it"
    for what, bound in (("reservations", len(machines)), ("replicas", len(machines)), ("leases", 12)):
        assert after[what] <= bound, (what, before, after)
    assert after["tasks"] == before["tasks"]
    assert after["descriptors"] <= before["descriptors"] + 2
    assert after["blocks"] - before["blocks"] < GROWN_BLOCKS, (before, after)
    print(f"{STEPS} steps: {soak.starts} starts, {soak.stops} stops, {soak.cancels} cancels; {before} -> {after}")
