"""The supervisor of a machine that serves: engines with addresses, memory and requests under way.

It keeps what the real one promises beyond the other runs: ports rest after their use, a stop with a drain waits for
requests, and an engine that ended by itself is started again. Ports and the rules of restarts are the real ones. A
start for which the machine has no memory is a violation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from tests.sim.disk import Engine
from tests.sim.engines import SimSupervisor
from tests.sim.loop import PROCESS

from enginehouse.core.errors import EnginehouseError
from enginehouse.core.progress import ReportProgress, no_progress
from enginehouse.core.replica import FailedReplica
from enginehouse.worker.engines.process_table import EndedProcess, Started, StartRequest, Stopped
from enginehouse.worker.engines.restarts import PendingRestart, RestartRules, Restarts

if TYPE_CHECKING:
    from tests.sim.serving.machines import ServingMachine

IDLE_LOOK_SECONDS = 0.2
# A quarter of the real ones, as everything that is waited for here.
RULES = RestartRules(window_seconds=150.0, first_seconds=0.25, longest_seconds=15.0)


class ServingSupervisor(SimSupervisor):
    def __init__(self, machine: ServingMachine, changed: Callable[[], None]) -> None:
        super().__init__(machine.disk, changed)
        self._machine = machine
        self._restarts = Restarts(RULES, machine.world.loop.time)

    def restarting(self) -> tuple[str, ...]:
        return self._restarts.pending()

    def failed(self) -> tuple[FailedReplica, ...]:
        return self._restarts.failed()

    async def start(self, request: StartRequest, report: ReportProgress = no_progress) -> Started:
        self._restarts.drop(request.process_key)
        return await super().start(request, report)

    async def stop(self, process_key: str) -> EndedProcess | None:
        self._restarts.drop_where(lambda request: request.process_key == process_key)
        return await super().stop(process_key)

    async def stop_from(self, directory: str, *, kept: Collection[int] = (), newest: int | None = None) -> Stopped:
        if newest is None:
            self._restarts.drop_where(lambda request: request.directory == directory)
        return await super().stop_from(directory, kept=kept, newest=newest)

    async def stop_model(self, model: str) -> Stopped:
        self._restarts.drop_where(lambda request: request.model.name == model)
        return await super().stop_model(model)

    async def stop_all(self) -> Stopped:
        self._restarts.drop_where(lambda _: True)
        return await super().stop_all()

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        for _ in range(max(1, round(limit_seconds / IDLE_LOOK_SECONDS))):
            engine = self._disk.engines.get(process_key)
            if engine is None or not self._machine.world.uses_of(engine.nonce):
                return True
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        return False

    async def _start(self, request: StartRequest) -> Started:
        try:
            return await super()._start(request)
        finally:
            self._machine.coming.pop(request.process_key, None)

    def _take(self, request: StartRequest) -> None:
        self._machine.coming[request.process_key] = self._machine.world.memory_of(request.model)

    def _begin(self, request: StartRequest, inode: int) -> Engine:
        machine = self._machine
        port = machine.ports.take(request.process_key, lambda _: True)
        engine = self._disk.begin_engine(request, inode)
        engine.address = f"{machine.host}:{port}"
        engine.checks_key = machine.world.checks_key(request.model.name)
        engine.memory_bytes = machine.world.memory_of(request.model)
        machine.ports.note(port, checks_key=engine.checks_key)
        machine.world.began(machine, engine)
        return engine

    def _crash(self, key: str) -> None:
        engine = self._disk.engines[key]
        super()._crash(key)
        if self._machine.world.serving.restarts:
            identity = (engine.request.model.revision, engine.request.directory, engine.inode)
            pending = self._restarts.note_end(engine.request, identity, "killed")
            if pending is not None:
                PROCESS.get().spawn(self._start_again(pending))

    async def _start_again(self, pending: PendingRestart) -> None:
        request = pending.request
        if not await pending.is_due():
            return
        async with self._turn(request.process_key):
            if pending.is_dropped:
                return
            with contextlib.suppress(EnginehouseError):
                await self._start(request)
            self._restarts.drop(request.process_key)
        self._changed()
