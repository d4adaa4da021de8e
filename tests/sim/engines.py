"""The supervisor of a simulated worker: engine processes that come up in their time and live as long as their worker.

It keeps the promises of the real one: a start in a slot that is taken replaces what runs there unless it is the same, a
start from what is not installed is refused, starts and stops of one key take turns, and a stop waits for a start that
is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from types import TracebackType

from tests.sim.disk import ENDED, Disk, Engine

from enginehouse.core.errors import Hopeless, Unavailable
from enginehouse.core.progress import ReportProgress, no_progress
from enginehouse.core.replica import FailedReplica, RunningReplica
from enginehouse.host.blocking import in_thread
from enginehouse.worker.engines.process_table import EndedProcess, Started, StartRequest, Stopped

START_SECONDS = (0.05, 0.2, 1.0)  # all well below what a command may wait for its turn
STOP_SECONDS = 0.05
ADDRESS = "10.0.0.1:50051"


class SimSupervisor:
    def __init__(self, disk: Disk, changed: Callable[[], None]) -> None:
        self._disk = disk
        self._changed = changed
        self._coming: dict[str, StartRequest] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def __aenter__(self) -> SimSupervisor:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop_all()

    def listen_on(self, host: str) -> None:
        """Addresses do not matter here."""

    def restarting(self) -> tuple[str, ...]:
        return ()

    def failed(self) -> tuple[FailedReplica, ...]:
        return ()

    def tidy(self) -> None:
        """There is nothing to tidy."""

    async def measure(self) -> None:
        """Engines here take no memory."""

    def running(self) -> tuple[RunningReplica, ...]:
        return tuple(self._report(one) for one in self._disk.engines.values())

    def find(self, process_key: str) -> RunningReplica | None:
        engine = self._disk.engines.get(process_key)
        return None if engine is None else self._report(engine)

    def crash(self, all_of_them: bool = False) -> None:
        """One of them ends by itself, or every one."""
        for key in list(self._disk.engines)[: None if all_of_them else 1]:
            self._crash(key)

    def _crash(self, key: str) -> None:
        self._disk.end_engine(key)
        self._changed()

    async def start(self, request: StartRequest, report: ReportProgress = no_progress) -> Started:
        async with self._turn(request.process_key):
            self._coming[request.process_key] = request
            try:
                return await self._start(request)
            finally:
                del self._coming[request.process_key]

    async def _start(self, request: StartRequest) -> Started:
        disk, key = self._disk, request.process_key
        inode = await in_thread(disk.inode_of, request.directory) if disk.is_readable(request.directory) else None
        current = disk.engines.get(key)
        if current is not None and inode is not None and _serves(current, request, inode):
            current.request = request
            return _started(current)
        if current is not None:
            await self._end(key)
        if inode is None:
            raise Unavailable(f"cannot start {key}: {request.directory} is not installed", code="not_found")
        if request.model.name not in disk.models or not disk.is_readable(request.model.name):
            raise Hopeless(f"cannot start {key}: its files are not on this node", code="not_found")
        self._take(request)
        await asyncio.sleep(disk.chance.choice(START_SECONDS))
        engine = self._begin(request, inode)
        self._changed()
        return _started(engine)

    def _take(self, request: StartRequest) -> None:
        """Its process takes memory from now on."""

    def _begin(self, request: StartRequest, inode: int) -> Engine:
        engine = self._disk.begin_engine(request, inode)
        engine.address = ADDRESS
        return engine

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        """Answers under way take a moment."""
        await asyncio.sleep(min(limit_seconds, self._disk.chance.choice(START_SECONDS)))
        return True

    async def until_all_idle(self, limit_seconds: float) -> None:
        """Answers are short here."""

    async def stop(self, process_key: str) -> EndedProcess | None:
        async with self._turn(process_key):
            return EndedProcess() if await self._end(process_key) else None

    async def stop_from(self, directory: str, *, kept: Collection[int] = (), newest: int | None = None) -> Stopped:
        return await self._stop_each(
            [
                key
                for key, one in self._disk.engines.items()
                if one.request.directory == directory
                and (newest is None or one.inode != newest)
                and one.inode not in kept
            ]
        )

    async def stop_model(self, model: str) -> Stopped:
        requests = self._coming | {key: one.request for key, one in self._disk.engines.items()}
        return await self._stop_each([key for key, request in requests.items() if request.model.name == model])

    async def stop_all(self) -> Stopped:
        return await self._stop_each([*self._coming, *self._disk.engines])

    async def _stop_each(self, keys: list[str]) -> Stopped:
        return Stopped(keys=tuple([key for key in dict.fromkeys(keys) if await self.stop(key)]))

    async def _end(self, key: str) -> bool:
        if key not in self._disk.engines:
            return False
        await asyncio.sleep(STOP_SECONDS)
        is_ended = self._disk.end_engine(key)
        if is_ended:
            ENDED.get([]).append(key)
            self._changed()
        return is_ended

    def _report(self, engine: Engine) -> RunningReplica:
        request = engine.request
        return RunningReplica(
            model_id=request.model.name,
            replica_index=request.slot,
            address=engine.address,
            nonce=engine.nonce,
            backend=request.directory,
            revision=request.model.revision,
            generation=request.generation,
            checks_key=engine.checks_key,
            memory_bytes=engine.memory_bytes,
            outdated=self._disk.inode_of(request.directory) not in (None, engine.inode),
        )

    def _turn(self, key: str) -> asyncio.Lock:
        return self._turns.setdefault(key, asyncio.Lock())


def _serves(current: Engine, request: StartRequest, inode: int) -> bool:
    known = current.request
    return (known.key, known.model.revision, known.directory, current.inode) == (
        *(request.key, request.model.revision, request.directory),
        inode,
    )


def _started(engine: Engine) -> Started:
    return Started(engine.address, engine.nonce, engine.checks_key)
