"""Carries out commands: one at a time per subject, each once, refusing what is older than what was seen.

A repeat of a finished attempt is answered from the journal, a repeat of a running intent joins it. Install, upgrade and
delete of one backend exclude each other and exclude starts from it; starts go side by side. A command that is
cancelled, because the worker stops, leaves no trace in the journal: it was not done, and it will be sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from msgspec import Struct

from enginehouse.core.action import (
    InstallBackend,
    PullModel,
    RemoveBackend,
    StartReplica,
    StopReplica,
    phrase,
    subject_of,
)
from enginehouse.core.errors import Conflict, EnginehouseError
from enginehouse.core.gallery import Gallery
from enginehouse.core.intent import Outcome
from enginehouse.core.replica import RunningReplica, process_key
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.host import disk
from enginehouse.worker.commands import Work, outcome_of
from enginehouse.worker.install import Installer, InstallWish, Report
from enginehouse.worker.journal import Journal
from enginehouse.worker.locks import Locks
from enginehouse.worker.pull import Models
from enginehouse.worker.replicas import StartWish
from enginehouse.worker.supervisor import Supervisor
from enginehouse.worker.threads import in_thread
from enginehouse.worker.trees import Trees

log = logging.getLogger(__name__)


LookUp = Callable[[str], Awaitable[Sequence[Gallery]]]  # the galleries that a message of a Go frontend names


class Parts(Struct, frozen=True, kw_only=True):
    """What actions act on."""

    trees: Trees
    installer: Installer
    models: Models
    supervisor: Supervisor
    journal: Journal
    look_up: LookUp


class _Open(Struct, kw_only=True):
    """A running intent: its attempts so far, and its end."""

    attempts: set[int]
    end: asyncio.Future[Outcome]


class Actions:
    def __init__(self, parts: Parts, changed: Callable[[], None]) -> None:
        self._parts = parts
        self._changed = changed
        self._locks = Locks()
        self._open: dict[str, _Open] = {}

    def running(self) -> tuple[str, ...]:
        """The intents being worked on."""
        return tuple(self._open)

    async def perform(self, work: Work, report: Report) -> Outcome:
        """Do it, or say why not. Never raises one of our errors."""
        command = work.command
        if command is None:
            return await self._attempt(work, report)
        recorded = self._parts.journal.result_of(command.intent, command.attempt)
        if recorded is not None:
            return recorded
        running = self._open.get(command.intent)
        if running is not None:
            running.attempts.add(command.attempt)
            return await asyncio.shield(running.end)
        return await self._perform_once(work, command, report)

    async def _perform_once(self, work: Work, command: Command, report: Report) -> Outcome:
        running = _Open(attempts={command.attempt}, end=asyncio.get_running_loop().create_future())
        self._open[command.intent] = running
        try:
            try:
                await self._parts.journal.accept(subject_of(work.action), command)
            except EnginehouseError as error:
                outcome = outcome_of(error)
            else:
                outcome = await self._attempt(work, report)
                await self._record(command.intent, running, outcome)
            running.end.set_result(outcome)
            return outcome
        finally:
            del self._open[command.intent]
            running.end.cancel()
            self._changed()

    async def _record(self, intent: str, running: _Open, outcome: Outcome) -> None:
        recorded: set[int] = set()
        while missing := running.attempts - recorded:  # one may join while another is being written
            attempt = min(missing)
            recorded.add(attempt)
            result = CommandResult(intent=intent, attempt=attempt, outcome=outcome)
            try:
                await self._parts.journal.record(result)
            except EnginehouseError as error:
                # It was done all the same, and the reply says so; only a repeat after a restart would do it again.
                log.warning("journal.not_written intent=%s error=%s", intent, error)

    async def _attempt(self, work: Work, report: Report) -> Outcome:
        wanted = phrase(work.action)
        log.info("command.started action=%r", wanted)
        try:
            async with self._locks.hold(subject_of(work.action)):
                if work.command is not None:
                    # A newer one may have come while this one waited for its turn.
                    self._parts.journal.check(subject_of(work.action), work.command)
                outcome = await self._act(work, work.command.generation if work.command else 0, report)
        except EnginehouseError as error:
            outcome = outcome_of(error)
        except OSError as error:
            outcome = outcome_of(disk.storage_error(error, wanted))
        if outcome.succeeded:
            log.info("command.done action=%r", wanted)
        else:
            log.warning("command.failed action=%r code=%s error=%s", wanted, outcome.code, outcome.message)
        return outcome

    async def _act(self, work: Work, generation: int, report: Report) -> Outcome:
        action = work.action
        match action:
            case InstallBackend():
                return await self._install(action, generation, report)
            case RemoveBackend():
                stopped = await self._parts.supervisor.stop_from(action.directory)
                await self._parts.installer.remove(action.directory)
                return Outcome(stopped=stopped)
            case PullModel():
                await self._parts.models.pull(action.model, generation, report)
                return Outcome()
            case StartReplica():
                return await self._start(action, generation, report)
            case StopReplica():
                return await self._stop(action, work.expected_address)
            case _:
                assert_never(action)

    async def _install(self, action: InstallBackend, generation: int, report: Report) -> Outcome:
        """The new tree first, then the swap, and only then the processes of the old one."""
        directory = action.resolved.directory
        stopped: tuple[str, ...] = ()

        async def stop_old() -> None:
            nonlocal stopped
            inode = await in_thread(self._parts.trees.inode_of, directory)
            stopped = await self._parts.supervisor.stop_from(directory, but_inode=inode)

        wish = InstallWish(resolved=action.resolved, generation=generation, force=action.force, upgrade=action.upgrade)
        installed = await self._parts.installer.install(wish, report, stop_old)
        return Outcome(digest=installed.digest, stopped=stopped)

    async def _start(self, action: StartReplica, generation: int, report: Report) -> Outcome:
        report("starting", "", 0, 0)
        wish = StartWish(
            model=action.model, slot=action.slot, directory=action.directory, key=action.key, generation=generation
        )
        async with self._locks.hold(subject_of(PullModel(model=action.model))):
            await self._parts.models.restore(action.model, report)
        async with self._locks.hold(f"backend:{action.directory}", exclusive=False):
            started = await self._parts.supervisor.start(wish)
        return Outcome(address=started.address, nonce=started.nonce)

    async def _stop(self, action: StopReplica, expected_address: str) -> Outcome:
        key = process_key(action.model, action.slot)
        current = self._parts.supervisor.find(key)
        if current is None:
            return Outcome()
        if expected_address and not _is_at(current, expected_address):
            raise Conflict(f"cannot stop {key}: it is at {current.address}, not at {expected_address}")
        await self._parts.supervisor.stop(key)
        return Outcome(stopped=(key,), address=current.address)


def _is_at(replica: RunningReplica, address: str) -> bool:
    """By the advertised address or by the loopback one, which is what LocalAI's workers report."""
    port = replica.address.rpartition(":")[2]
    return address == replica.address or address in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}")
