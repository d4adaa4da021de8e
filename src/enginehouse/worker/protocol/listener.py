"""Receives messages from the bus: each has its own task and gets a reply, even if it is malformed.

The number of concurrent messages is bounded per subject, so that a burst on one subject does not affect the others.
Messages beyond the limit are refused at once; messages beyond the queue of refusals are counted and dropped. The
arrival of a command is reported before any name is resolved. Replies are not queued while the bus is away: the next
report carries the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from enginehouse.core import subjects, wire
from enginehouse.core.errors import EnginehouseError, Malformed, Unavailable
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.progress import ReportProgress
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.ports import Bus, Message
from enginehouse.worker.commands.actions import VANISHED
from enginehouse.worker.commands.executor import Executor
from enginehouse.worker.commands.ports import CommandPorts
from enginehouse.worker.commands.work import Work, outcome_of
from enginehouse.worker.protocol.decode import Head, WorkRequest, encode_reply, head_of, look_ups_for, read, work_of
from enginehouse.worker.protocol.names import KnownNames
from enginehouse.worker.protocol.progress import ReportedCommand, publishing
from enginehouse.worker.protocol.stops import stop_backend, unload

log = logging.getLogger(__name__)

MAX_MESSAGES = 256  # concurrent on one subject; more than a node has backends, models or replicas
MAX_REFUSALS = 4096  # queued; a few hundred kilobytes, sent in a tenth of a second
LOOKS = 3  # attempts to resolve a name whose backend is deleted each time before the command runs


class Listener:
    """Call `run` once; it returns when `until` is set and all its tasks have ended."""

    def __init__(
        self,
        bus: Bus,
        node_id: NodeId,
        parts: CommandPorts,
        actions: Executor,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus = bus
        self._node_id = node_id
        self._parts = parts
        self._actions = actions
        self._leave = leave  # called for the message `stop`
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_progress: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        self._refused: deque[tuple[str, str]] = deque()
        self._is_refusing = asyncio.Event()
        self.dropped = 0

    async def run(self, listening: asyncio.Event, until: asyncio.Event) -> None:
        """Set `listening` when all subjects are subscribed. Raises `Unavailable` if one cannot be."""
        refused: Unavailable | None = None
        async with asyncio.TaskGroup() as self._group:
            refusing = self._group.create_task(self._refuse())
            try:
                for verb in subjects.WORKER_SUBJECTS:
                    await self._bus.subscribe(subjects.node_subject(self._node_id, verb), partial(self._receive, verb))
                listening.set()
                await until.wait()
            except Unavailable as error:
                refused = error  # raised below: a task group would wrap it
            finally:
                self._group = None
                for task in (refusing, *self._tasks):
                    task.cancel()
        if refused is not None:
            raise refused

    def _receive(self, verb: str, message: Message) -> None:
        if self._group is None:
            return  # shutting down; the message will be sent again
        if self._in_progress[verb] >= MAX_MESSAGES:
            self._refuse_later(verb, message)
            return
        self._in_progress[verb] += 1
        task = self._group.create_task(self._take(verb, message))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, verb))

    def _forget(self, verb: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._in_progress[verb] -= 1

    def _refuse_later(self, verb: str, message: Message) -> None:
        if message.reply and len(self._refused) < MAX_REFUSALS:
            self._refused.append((verb, message.reply))
            self._is_refusing.set()
        else:
            self._drop(verb, f"{MAX_MESSAGES} messages are in progress")

    def _drop(self, verb: str, reason: object) -> None:
        """Count and log a message or reply that is dropped."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …, so that a flood does not fill the log
            log.error("worker.dropped verb=%s dropped=%d reason=%s", verb, self.dropped, reason)

    async def _refuse(self) -> None:
        busy = Unavailable(f"cannot take another command: {MAX_MESSAGES} are in progress", code="resource_exhausted")
        while True:
            await self._is_refusing.wait()
            self._is_refusing.clear()
            while self._refused:
                verb, reply = self._refused.popleft()
                await self._reply(verb, reply, encode_reply(verb, outcome_of(busy), None))

    async def _reply(self, verb: str, reply: str, answer: bytes) -> None:
        try:
            await self._bus.publish(reply, answer)
        except Unavailable:
            pass  # the bus is away, so the requester is unreachable
        except EnginehouseError as error:  # too large for the bus; other messages must not be affected
            self._drop(verb, error)

    async def _take(self, verb: str, message: Message) -> None:
        try:
            match verb:
                case subjects.STOP:
                    await stop_backend(self._parts, message.payload)
                case subjects.CANCEL:
                    self._actions.cancel(wire.decode(message.payload, wire.CancelRequest, "the cancellation").intent)
                case subjects.STOP_NODE:
                    log.info("worker.stop_requested")
                    self._leave()
                case _:
                    answer = await self._answer(verb, message.payload)
                    if message.reply:
                        await self._reply(verb, message.reply, answer)
        except Malformed as error:  # of a verb without a reply
            self._drop(verb, error)

    async def _answer(self, verb: str, payload: bytes) -> bytes:
        match verb:
            case subjects.RUNNING:
                return wire.encode(wire.ModelsRunningReply(models=self._parts.supervisor.running()))
            case subjects.UNLOAD:
                return encode_reply(verb, await unload(self._parts, payload), None)
            case subjects.LIST:
                try:
                    return wire.encode(wire.BackendListReply(backends=await self._parts.trees.list_installed()))
                except OSError as error:
                    return encode_reply(verb, outcome_of(_unreadable(error)), None)
        try:
            request = read(verb, payload)
        except EnginehouseError as error:
            return encode_reply(verb, outcome_of(error), None)
        async with publishing(self._bus, self._reported_command(head_of(request))) as publisher:
            outcome, work = await self._perform(request, publisher.report)
        return encode_reply(verb, outcome, work)

    def _reported_command(self, head: Head) -> ReportedCommand:
        command = head.command
        return ReportedCommand(
            node_id=self._node_id,
            op_id=head.op_id,
            about=head.about,
            intent=command.intent if command else IntentId(""),
            attempt=command.attempt if command else 0,
        )

    async def _perform(self, request: WorkRequest, report: ReportProgress) -> tuple[Outcome, Work | None]:
        for _ in range(LOOKS):
            try:
                work = await self._decode(request)
            except EnginehouseError as error:
                return outcome_of(error), None
            except OSError as error:
                return outcome_of(_unreadable(error)), None
            outcome = await self._actions.perform(work, report)
            if outcome.code != VANISHED:
                break
        return outcome, work

    async def _decode(self, request: WorkRequest) -> Work:
        """Resolve the names in a request. Only what is needed is loaded: a fully resolved request costs nothing."""
        needs, known = look_ups_for(request), KnownNames()
        if needs.installed:
            aliases = await self._parts.trees.aliases() if needs.aliases else {}
            known = KnownNames(installed=await self._parts.trees.list_installed(), aliases=aliases)
            needs = look_ups_for(request, known)
        if needs.galleries is None:
            return work_of(request, known)
        galleries = await self._parts.look_up(needs.galleries)
        known = KnownNames(installed=known.installed, aliases=known.aliases, galleries=galleries)
        return await in_thread(work_of, request, known)


def _unreadable(error: OSError) -> EnginehouseError:
    return disk.storage_error(error, "read what is installed")
