"""Executes commands: one at a time per subject, each once, and none that is older than one already seen.

A repeated attempt is answered from the journal; a repeat of a running intent joins it. Install, upgrade and delete of
one backend exclude each other and starts from it; starts run concurrently. A newer request for a subject supersedes a
running older one, and a cancelled command ends at once, unless it is past its point of no return. An accepted attempt
that ended this way is recorded as such, so that a second copy of its message does not start it again. A shutdown of the
worker records nothing: the command may be sent again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec
from msgspec import Struct

from enginehouse.core.action import Action, RemoveModel, StartReplica, phrase, subject_of
from enginehouse.core.errors import Conflict, EnginehouseError
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Outcome
from enginehouse.core.progress import ReportProgress
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.host import disk
from enginehouse.worker.commands.actions import Actions, UnderWay
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.commands.work import Work, outcome_of
from enginehouse.worker.locks import Locks

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
SUPERSEDED = "superseded"
KEPT_CANCELS = 1000  # of commands that have not arrived yet; a cancelled intent is never sent again


class _Open(Struct, kw_only=True):
    """A running intent, and the future of its outcome, which all its attempts await."""

    current: UnderWay
    end: asyncio.Future[Outcome]


class Executor:
    def __init__(self, parts: CommandPorts, changed: Callable[[], None], locks: Locks | None = None) -> None:
        """`locks` are by subject; what else changes backends and processes holds the same."""
        self._parts = parts
        self._changed = changed
        self._locks = locks or Locks()
        self._acting = Actions(parts, self._locks)
        self._open: dict[IntentId, _Open] = {}
        self._cancelled: OrderedDict[IntentId, None] = OrderedDict()

    def running(self) -> tuple[IntentId, ...]:
        """The running intents."""
        return tuple(self._open)

    def cancel(self, intent: IntentId) -> None:
        """Cancel all attempts of an intent. A no-op past the point of no return."""
        found = self._open.get(intent)
        if found is not None:
            found.current.give_up(CANCELLED)
            return
        # The cancellation may arrive before its command.
        self._cancelled[intent] = None
        while len(self._cancelled) > KEPT_CANCELS:
            self._cancelled.popitem(last=False)

    async def perform(self, work: Work, report: ReportProgress) -> Outcome:
        """Execute a command and return its outcome. Errors become outcomes; no `EnginehouseError` is raised."""
        command = work.command
        if command is None:
            return await self._attempt(work, UnderWay(subject=subject_of(work.action), reports=[report]))
        recorded = self._parts.journal.result_of(command.intent, command.attempt)
        if recorded is not None:
            return recorded
        if command.intent in self._cancelled:
            return Outcome(code=CANCELLED, message=f"cannot {phrase(work.action)}: it was cancelled")
        found = self._open.get(command.intent)
        if found is not None:
            found.current.attempts.add(command.attempt)
            found.current.reports.append(report)
            return await asyncio.shield(found.end)
        return await self._perform_once(work, command, report)

    async def _perform_once(self, work: Work, command: Command, report: ReportProgress) -> Outcome:
        current = UnderWay(
            subject=subject_of(work.action),
            starts=work.action.model.name if isinstance(work.action, StartReplica) else "",
            generation=command.generation,
            attempts={command.attempt},
            reports=[report],
        )
        here = _Open(current=current, end=asyncio.get_running_loop().create_future())
        self._open[command.intent] = here
        try:
            async with asyncio.TaskGroup() as group:
                current.task = group.create_task(self._accept_and_attempt(work, command, current))
            outcome = await self._end_of(work, current, current.task)
            if current.is_accepted:
                # Also a cancelled outcome: a second copy of the same message must not start the command again.
                await self._record(command.intent, current, outcome)
            here.end.set_result(outcome)
            return outcome
        finally:
            del self._open[command.intent]
            here.end.cancel()
            self._changed()

    async def _accept_and_attempt(self, work: Work, command: Command, current: UnderWay) -> Outcome:
        try:
            await self._parts.journal.accept(current.subject, command)
            if isinstance(work.action, RemoveModel):
                await self._parts.journal.accept(_removal(work.action.model), command)
        except EnginehouseError as error:
            return outcome_of(error)
        current.is_accepted = True
        for other in self._open.values():
            if other.current.subject == current.subject and other.current.generation < current.generation:
                other.current.give_up(SUPERSEDED)
            if isinstance(work.action, RemoveModel) and other.current.starts == work.action.model:
                other.current.give_up(SUPERSEDED)
        return await self._attempt(work, current)

    def _check_files(self, action: Action) -> None:
        """Refuse a delayed or repeated start that would restore files removed by a newer request."""
        if not isinstance(action, StartReplica) or action.files is None:
            return
        if self._parts.journal.generation_of(_removal(action.model.name)) > action.files:
            raise Conflict(f"cannot {phrase(action)}: its files were removed by a newer request", code=SUPERSEDED)

    async def _end_of(self, work: Work, current: UnderWay, task: asyncio.Task[Outcome]) -> Outcome:
        if not task.cancelled():
            outcome = task.result()
            # An interrupted step may report the cancellation as a failure.
            if outcome.succeeded or not current.ended_by:
                return outcome
        elif not current.can_return:
            try:
                return await self._acting.outcome_after_swap(work, current)
            except OSError as error:
                # A retry finds the requested version installed.
                return _failed(error, phrase(work.action), current)
        wanted = phrase(work.action)
        reason = (
            "it was cancelled"
            if current.ended_by == CANCELLED
            else f"a newer request for {current.subject} replaced it"
        )
        log.info("command.%s action=%r", current.ended_by, wanted)
        return Outcome(code=current.ended_by, message=f"cannot {wanted}: {reason}", stopped=current.stopped)

    async def _record(self, intent: IntentId, current: UnderWay, outcome: Outcome) -> None:
        recorded: set[int] = set()
        while missing := current.attempts - recorded:  # an attempt may join while another is being written
            attempt = min(missing)
            recorded.add(attempt)
            result = CommandResult(intent=intent, attempt=attempt, outcome=outcome)
            try:
                await self._parts.journal.record(result)
            except EnginehouseError as error:
                # The command is done, and the reply says so. Only a repeat after a restart would execute it again.
                log.warning("journal.not_written intent=%s error=%s", intent, error)

    async def _attempt(self, work: Work, current: UnderWay) -> Outcome:
        wanted = phrase(work.action)
        log.info("command.started action=%r", wanted)
        try:
            async with self._locks.hold(current.subject):
                if work.command is not None:
                    # A newer command may have arrived while this one waited for the lock.
                    self._parts.journal.check(current.subject, work.command)
                    self._check_files(work.action)
                outcome = await self._acting.act(work, current)
        except EnginehouseError as error:
            outcome = msgspec.structs.replace(outcome_of(error), stopped=current.stopped)
        except OSError as error:
            outcome = _failed(error, wanted, current)
        if outcome.succeeded:
            log.info("command.done action=%r", wanted)
        else:
            log.warning("command.failed action=%r code=%s error=%s", wanted, outcome.code, outcome.message)
        return outcome


def _failed(error: OSError, wanted: str, current: UnderWay) -> Outcome:
    return msgspec.structs.replace(outcome_of(disk.storage_error(error, wanted)), stopped=current.stopped)


def _removal(model: str) -> str:
    """The journal's subject for the newest removal of a model's files."""
    return f"removed:{model}"
