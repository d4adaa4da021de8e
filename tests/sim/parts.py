"""The parts of a worker in memory, on a simulated disk: an installer that takes its time, model files.

They keep the promises of the real ones and no others: the new tree is put in place at the end or not at all, past that
point a cancellation is heard only when everything is in order, and where the disk refuses to keep it the tree before is
back. What they are asked in the wrong order (files taken away under a process that uses them) is a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

from msgspec import Struct
from tests.sim.disk import ENDED, WORK, Disk
from tests.sim.ledgers import WorkerChecks

from enginehouse.core.action import StartReplica, StopReplica, phrase, subject_of
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.errors import NotFound, Unavailable, Upstream
from enginehouse.core.intent import Outcome
from enginehouse.core.model import HeldModel, Model, PinnedFile
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import ReportProgress
from enginehouse.host.blocking import _wait_for_end, in_thread
from enginehouse.host.disk import storage_error
from enginehouse.worker.backends.installer import Installed, InstallRequest, Swapped
from enginehouse.worker.commands.executor import Executor
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.commands.work import Work

T = TypeVar("T")
A = TypeVar("A")
TOTAL_BYTES = 1_000_000
STALL_SECONDS = 6.0
PULL_SECONDS = (0.01, 0.3, 2.0)
SYNC_SECONDS = (0.001, 0.01, 0.3, 1.5)  # a small tree, and a large one on a slow disk


class InstallWeather(Struct):
    seconds: float = 0.5
    failing_rate: float = 0.0
    hopeless_rate: float = 0.0
    stalling_rate: float = 0.0


class SimInstaller:
    def __init__(self, disk: Disk, weather: InstallWeather, chance: Random) -> None:
        self._disk = disk
        self._weather = weather
        self._chance = chance

    async def install(self, request: InstallRequest, report: ReportProgress, swapped: Swapped) -> Installed:
        resolved, disk = request.resolved, self._disk
        with disk.working(f"backend:{resolved.directory}"):
            await in_thread(disk.settle, resolved.directory)
            known = disk.trees.get(resolved.directory) if disk.is_readable(resolved.directory) else None
            if known is not None and (request.keep or known.digest == resolved.digest) and not request.force:
                await in_thread(disk.note_generation, resolved.directory, request.generation, resolved.meta)
                return Installed(digest=known.digest, changed=False)
            report("resolving", "", 0, 0)
            await self._fetch(report)
            before = disk.inode_of(resolved.directory)
            try:
                await in_thread(disk.swap, resolved, request.generation)
            finally:
                inode = disk.inode_of(resolved.directory)
                if inode is not None and inode != before:
                    await swapped()
                    # The tree before it becomes the previous version; older ones are removed.
                    kept = {inode, before or 0}
                    disk.check_unused("replaced", directory=resolved.directory, but_inodes=kept)
                    await self._work_on(self._chance.choice(SYNC_SECONDS))
                    await in_thread(self._sync, resolved.directory)
            return Installed(digest=resolved.digest, fetched_bytes=TOTAL_BYTES)

    def _sync(self, directory: str) -> None:
        try:
            self._disk.sync(directory)
        except OSError:
            self._disk.refuse(directory)
            raise

    async def _fetch(self, report: ReportProgress) -> None:
        chance, weather = self._chance, self._weather
        pieces = chance.randint(1, 5)
        bad_piece = chance.randrange(pieces)
        luck = chance.random()
        for piece in range(pieces):
            self._disk.check_read("a layer")
            await asyncio.sleep(weather.seconds / pieces * chance.uniform(0.5, 1.5))
            if piece == bad_piece:
                if luck < weather.failing_rate:
                    raise Upstream("cannot fetch a layer: the registry answered 500", code="upstream_error")
                if luck < weather.failing_rate + weather.hopeless_rate:
                    raise NotFound("cannot find the image", code="not_found")
                if luck < weather.failing_rate + weather.hopeless_rate + weather.stalling_rate:
                    await asyncio.sleep(STALL_SECONDS)
                    raise Unavailable("cannot fetch a layer: nothing came", code="stalled")
            report("downloading", f"layer {piece}", TOTAL_BYTES * (piece + 1) // pieces, TOTAL_BYTES)

    async def remove(self, directory: str) -> None:
        with self._disk.working(f"backend:{directory}"):
            self._disk.check_unused("removed", directory=directory)
            await self._work_on(self._chance.choice(SYNC_SECONDS))
            await in_thread(self._disk.remove, directory)

    async def _work_on(self, seconds: float) -> None:
        """Something that a cancellation does not interrupt, as work in a thread is not."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        loop.call_later(seconds, done.set_result, None)
        await _wait_for_end(done)

    def recover(self) -> None:
        self._disk.recover()


class SimTrees:
    """What `InstalledBackends` looks at."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        return self._disk.list_installed()

    def inode_of(self, directory: str) -> int | None:
        return self._disk.inode_of(directory) if self._disk.is_readable(directory) else None

    def metadata_of(self, directory: str) -> None:
        self._disk.metadata_of(directory)

    def forget_generations(self) -> None:
        self._disk.forget_generations()


class SimModels:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def recover(self) -> None:
        """Nothing is ever half there."""

    def held_models(self) -> tuple[HeldModel, ...]:
        self._disk.check_read("the models")
        held = self._disk.models.values()
        return tuple(one if self._disk.is_readable(one.name) else HeldModel(one.name, ()) for one in held)

    async def pull(
        self, model: Model, generation: int | None, report: ReportProgress, peers: Sequence[FilePeer] = ()
    ) -> tuple[PinnedFile, ...]:
        with self._disk.working(f"model:{model.name}"):
            report("downloading", model.name, 0, TOTAL_BYTES)
            await asyncio.sleep(self._disk.chance.choice(PULL_SECONDS))
            held = HeldModel(model.name, tuple(file.sha256 for file in model.files), generation or 0)
            await self._changed(self._disk.hold_model, held, f"place the files of {model.name}")
            return ()

    async def restore(self, model: Model, report: ReportProgress) -> None:
        if model.name not in self._disk.models or not self._disk.is_readable(model.name):
            await self.pull(model, None, report)

    async def remove(self, name: str) -> bool:
        with self._disk.working(f"model:{name}"):
            self._disk.check_unused("removed", model=name)
            return await self._changed(self._disk.drop_model, name, f"remove the files of {name}")

    async def _changed(self, change: Callable[[A], T], about: A, doing: str) -> T:
        try:
            return await in_thread(change, about)
        except OSError as error:
            raise storage_error(error, doing) from error


class SimActions(Executor):
    """The real actions; the disk may know for which command it is written."""

    def __init__(self, parts: CommandPorts, changed: Callable[[], None], checks: WorkerChecks) -> None:
        super().__init__(parts, changed)
        self._checks = checks

    def held_locks(self) -> list[str]:
        return list(self._locks._locks)

    async def perform(self, work: Work, report: ReportProgress) -> Outcome:
        ended: list[str] = []
        token, other = WORK.set(work), ENDED.set(ended)
        # A start is not seen to begin: it may wait for its files as long as they take.
        if work.command is not None and not isinstance(work.action, StartReplica | StopReplica):
            self._checks.asked(subject_of(work.action), work.command)
        try:
            outcome = await super().perform(work, report)
            if not isinstance(work.action, StartReplica):
                self._checks.told_of_ended(phrase(work.action), ended, outcome.stopped)
            return outcome
        finally:
            WORK.reset(token)
            ENDED.reset(other)
            if work.command is not None:
                self._checks.answered(work.command)
