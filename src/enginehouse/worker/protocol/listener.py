"""Takes messages from the bus: each its own task, each answered, a malformed one too.

The number at work is bounded per subject, so that a burst on one leaves the others alone; what is beyond is refused at
once, and what is beyond that is counted and dropped. That a command has arrived is told before anything is looked up.
A reply that nobody can hear, because the bus is away, is not kept: the next report carries the result.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from enginehouse.core import subjects, wire
from enginehouse.core.errors import EnginehouseError, Malformed, Unavailable
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
from enginehouse.worker.protocol.progress import Told, publishing
from enginehouse.worker.protocol.stops import stop_backend, unload

log = logging.getLogger(__name__)

MAX_MESSAGES = 256  # at work at once on one subject: more than a node has backends, models or replicas
MAX_REFUSALS = 4096  # waiting to be told no: a few hundred kilobytes, and gone in a tenth of a second
LOOKS = 3  # at what a name means, where what it meant is deleted each time before its turn


class Listener:
    """Use `run` once; it returns when `until` is set, with every task of its own ended."""

    def __init__(
        self, bus: Bus, node_id: str, parts: CommandPorts, actions: Executor, leave: Callable[[], None] = lambda: None
    ) -> None:
        self._bus = bus
        self._node_id = node_id
        self._parts = parts
        self._actions = actions
        self._leave = leave  # what `stop` asks for
        self._tasks: set[asyncio.Task[None]] = set()
        self._at_work: Counter[str] = Counter()
        self._group: asyncio.TaskGroup | None = None
        self._refused: deque[tuple[str, str]] = deque()
        self._is_refusing = asyncio.Event()
        self.dropped = 0

    async def run(self, listening: asyncio.Event, until: asyncio.Event) -> None:
        """`listening` is set when every subject is heard. `Unavailable` when one cannot be."""
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
            return  # leaving: it will be sent again
        if self._at_work[verb] >= MAX_MESSAGES:
            self._turn_away(verb, message)
            return
        self._at_work[verb] += 1
        task = self._group.create_task(self._take(verb, message))
        self._tasks.add(task)
        task.add_done_callback(partial(self._forget, verb))

    def _forget(self, verb: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._at_work[verb] -= 1

    def _turn_away(self, verb: str, message: Message) -> None:
        if message.reply and len(self._refused) < MAX_REFUSALS:
            self._refused.append((verb, message.reply))
            self._is_refusing.set()
        else:
            self._drop(verb, f"{MAX_MESSAGES} are at work")

    def _drop(self, verb: str, reason: object) -> None:
        """Without an answer, but never without a trace."""
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th …: a flood must not fill the log
            log.error("worker.dropped verb=%s dropped=%d reason=%s", verb, self.dropped, reason)

    async def _refuse(self) -> None:
        busy = Unavailable(f"cannot take another command: {MAX_MESSAGES} are at work", code="resource_exhausted")
        while True:
            await self._is_refusing.wait()
            self._is_refusing.clear()
            while self._refused:
                verb, reply = self._refused.popleft()
                await self._say(verb, reply, encode_reply(verb, outcome_of(busy), None))

    async def _say(self, verb: str, reply: str, answer: bytes) -> None:
        try:
            await self._bus.publish(reply, answer)
        except Unavailable:
            pass  # the bus is away, and so is whoever asked
        except EnginehouseError as error:  # more than the bus takes: nobody else is to be harmed by it
            self._drop(verb, error)

    async def _take(self, verb: str, message: Message) -> None:
        try:
            match verb:
                case subjects.STOP:
                    await stop_backend(self._parts, message.payload)
                case subjects.CANCEL:
                    self._actions.cancel(wire.decode(message.payload, wire.CancelRequest, "the cancellation").intent)
                case subjects.STOP_NODE:
                    log.info("worker.told_to_stop")
                    self._leave()
                case _:
                    answer = await self._answer(verb, message.payload)
                    if message.reply:
                        await self._say(verb, message.reply, answer)
        except Malformed as error:  # of the verbs that have no answer
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
        async with publishing(self._bus, self._told(head_of(request))) as publisher:
            outcome, work = await self._perform(request, publisher.report)
        return encode_reply(verb, outcome, work)

    def _told(self, head: Head) -> Told:
        command = head.command
        return Told(
            node_id=self._node_id,
            op_id=head.op_id,
            about=head.about,
            intent=command.intent if command else "",
            attempt=command.attempt if command else 0,
        )

    async def _perform(self, request: WorkRequest, report: ReportProgress) -> tuple[Outcome, Work | None]:
        for _ in range(LOOKS):
            try:
                work = await self._understand(request)
            except EnginehouseError as error:
                return outcome_of(error), None
            except OSError as error:
                return outcome_of(_unreadable(error)), None
            outcome = await self._actions.perform(work, report)
            if outcome.code != VANISHED:
                break
        return outcome, work

    async def _understand(self, request: WorkRequest) -> Work:
        """Look up what the request's names need, and no more: a request of ours that names everything costs nothing."""
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
