"""The steps of each action, their order, and the point after which an action can no longer be cancelled.

Install: build the new tree, swap it in, then stop the processes of the old tree, or leave them running until the
frontend has replaced them. Delete: stop the processes first; a process that survives a kill keeps its files. This
module knows nothing of attempts, repeated commands or the journal.
"""

from __future__ import annotations

import asyncio
import logging
from typing import assert_never

from msgspec import Struct, field

from enginehouse.core.action import (
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    UnknownAction,
    phrase,
    subject_of,
)
from enginehouse.core.backend import ALREADY, version_name
from enginehouse.core.errors import Conflict, Invalid, Unavailable
from enginehouse.core.intent import Outcome
from enginehouse.core.progress import Phase, ReportProgress
from enginehouse.core.replica import process_key
from enginehouse.worker.backends.inspection import check_removable
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.commands.work import Work
from enginehouse.worker.engines.process_table import StartRequest, Stopped, is_at
from enginehouse.worker.locks import Locks

log = logging.getLogger(__name__)

ALREADY_ABSENT = "already_absent"  # the message of a delete that found nothing
VANISHED = "vanished"  # the backend was deleted between decoding the command and executing it


class UnderWay(Struct, kw_only=True):
    """One command that is being executed."""

    subject: str
    starts: str = ""  # the model of a start; "" for other actions
    generation: int = 0
    attempts: set[int] = field(default_factory=set)
    reports: list[ReportProgress] = field(default_factory=list)  # one per attempt that waits for the outcome
    task: asyncio.Task[Outcome] | None = None
    ended_by: str = ""  # `cancelled` or `superseded`, set when it is requested
    is_accepted: bool = False
    can_return: bool = True  # can be cancelled; False after the first visible change
    stopped: tuple[str, ...] = ()

    def report(self, phase: Phase, file: str, done_bytes: int, total_bytes: int) -> None:
        for report in self.reports:
            report(phase, file, done_bytes, total_bytes)

    def give_up(self, code: str) -> None:
        """Cancel the task, at most once: a second cancellation would interrupt the clean-up after the first."""
        if self.can_return and not self.ended_by:
            self.ended_by = code
            if self.task is not None:
                self.task.cancel()


class Actions:
    """Call `act` with the lock of the subject held."""

    def __init__(self, parts: CommandPorts, locks: Locks) -> None:
        self._parts = parts
        self._locks = locks

    async def act(self, work: Work, current: UnderWay) -> Outcome:
        action = work.action
        match action:
            case InstallBackend():
                return await self._keep(action) if work.is_kept else await self._install(action, current)
            case RemoveBackend():
                return await self._remove(action, current)
            case PullModel():
                pins = await self._parts.models.pull(action.model, current.generation, current.report, work.peers)
                return Outcome(pinned=pins)
            case RemoveModel():
                return await self._remove_model(action, current)
            case StartReplica():
                return await self._start(action, work.install_first, current)
            case StopReplica():
                return await self._stop(action, work.expected_address, current)
            case UnknownAction():
                raise Invalid(
                    f"cannot do {phrase(action)}: this worker does not support it; upgrade the worker",
                    code="unsupported",
                )
            case _:
                assert_never(action)

    async def outcome_after_swap(self, work: Work, current: UnderWay) -> Outcome:
        """The outcome of an install that was cancelled after its tree had been swapped in."""
        assert isinstance(work.action, InstallBackend), (
            "only an install can be cancelled after its first visible change"
        )
        directory = work.action.resolved.directory
        installed = await self._parts.trees.list_installed()
        digest = next((backend.digest for backend in installed if backend.name == directory), "")
        return Outcome(digest=digest, stopped=current.stopped)

    async def _keep(self, action: InstallBackend) -> Outcome:
        directory = action.resolved.directory
        for backend in await self._parts.trees.list_installed():
            if backend.name == directory and not backend.is_meta and not backend.is_broken:
                note = f"{ALREADY}{version_name(backend.version, backend.digest)}"
                return Outcome(digest=backend.digest, message=note)
        raise Unavailable(f"cannot keep {directory}: it was deleted meanwhile; repeat the request", code=VANISHED)

    async def _install(self, action: InstallBackend, current: UnderWay) -> Outcome:
        directory = action.resolved.directory
        stopped: Stopped | None = None
        before = await self._parts.trees.inode_of(directory)

        async def stop_old() -> None:
            nonlocal stopped
            current.can_return = False
            newest = await self._parts.trees.inode_of(directory)
            # The replaced tree becomes the previous version, so its processes can go on. The tree that was the previous
            # version until now is removed.
            kept = (before,) if action.rolling and before is not None else ()
            stopped = await self._parts.supervisor.stop_from(directory, kept=kept, newest=newest)
            current.stopped = stopped.keys

        request = InstallRequest(
            resolved=action.resolved,
            generation=current.generation,
            force=action.force,
            upgrade=action.upgrade,
            keep=action.keep,
        )
        try:
            installed = await self._parts.installer.install(request, current.report, stop_old)
        except asyncio.CancelledError:
            # The cancellation may have arrived between the swap and the call of `stop_old`.
            if current.ended_by and stopped is None:
                after = await self._parts.trees.inode_of(directory)
                if after is not None and after != before:
                    await stop_old()
            raise
        # A survivor still uses the old tree, but gets no more requests: its address is never handed out again.
        survivors = stopped.survivors if stopped is not None else ()
        message = f"still running from the old version: {', '.join(survivors)}" if survivors else installed.note
        return Outcome(digest=installed.digest, stopped=current.stopped, message=message)

    async def _remove(self, action: RemoveBackend, current: UnderWay) -> Outcome:
        directory = action.directory
        check_removable(await self._parts.trees.list_installed(), directory)
        was_there = await self._parts.trees.inode_of(directory) is not None
        current.can_return = False
        self._check_ended(await self._parts.supervisor.stop_from(directory), f"delete {directory}", current)
        await self._parts.installer.remove(directory)
        return Outcome(stopped=current.stopped, message="" if was_there else ALREADY_ABSENT)

    async def _remove_model(self, action: RemoveModel, current: UnderWay) -> Outcome:
        current.can_return = False
        stopped = await self._parts.supervisor.stop_model(action.model)
        self._check_ended(stopped, f"remove the files of {action.model}", current)
        was_there = await self._parts.models.remove(action.model)
        return Outcome(stopped=current.stopped, message="" if was_there else ALREADY_ABSENT)

    def _check_ended(self, stopped: Stopped, wanted: str, current: UnderWay) -> None:
        current.stopped = stopped.keys
        if stopped.survivors:
            raise Unavailable(
                f"cannot {wanted}: {', '.join(stopped.survivors)} did not end after SIGKILL and still uses the files; "
                "nothing was removed",
                code="process_survived",
            )

    async def _start(self, action: StartReplica, install: InstallBackend | None, current: UnderWay) -> Outcome:
        if install is not None:
            async with self._locks.hold(f"backend:{action.directory}"):
                await self._install(install, current)
        current.report("starting", "", 0, 0)
        request = StartRequest(
            model=action.model,
            slot=action.slot,
            directory=action.directory,
            key=action.key,
            generation=current.generation,
            process_only=action.process_only,
        )
        if not action.process_only:
            async with self._locks.hold(subject_of(PullModel(model=action.model))):
                await self._parts.models.restore(action.model, current.report)
        async with self._locks.hold(f"backend:{action.directory}", exclusive=False):
            started = await self._parts.supervisor.start(request, current.report)
        return Outcome(
            address=started.address, nonce=started.nonce, checks_key=started.checks_key, protocol=started.protocol
        )

    async def _stop(self, action: StopReplica, expected_address: str, current: UnderWay) -> Outcome:
        key = process_key(action.model, action.slot)
        found = self._parts.supervisor.find(key)
        if found is None:
            return Outcome()
        if expected_address and not is_at(found, expected_address):
            raise Conflict(f"cannot stop {key}: it is at {found.address}, not at {expected_address}")
        if action.drain_seconds:
            await self._parts.supervisor.until_idle(key, action.drain_seconds)
        current.can_return = False
        ended = await self._parts.supervisor.stop(key)
        return Outcome(stopped=(key,), address=found.address, freed=ended.freed if ended is not None else None)
