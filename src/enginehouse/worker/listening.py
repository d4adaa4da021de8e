"""Takes messages from the bus: each its own task, each answered, a malformed one too.

The number at work is bounded; what is beyond is refused at once. A reply that nobody can hear, because the bus is
away, is not kept: the next report carries the result.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from enginehouse.core import wire
from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.host import disk
from enginehouse.ports import Bus, Message
from enginehouse.worker.actions import Actions, Parts
from enginehouse.worker.commands import Known, decode, encode_reply, galleries_wanted, outcome_of
from enginehouse.worker.progress import Told, publishing
from enginehouse.worker.threads import in_thread

MAX_MESSAGES = 256  # at work at once


class Listener:
    """Use `run` once; it returns when `until` is set, with every task of its own ended."""

    def __init__(self, bus: Bus, node_id: str, parts: Parts, actions: Actions) -> None:
        self._bus = bus
        self._node_id = node_id
        self._parts = parts
        self._actions = actions
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None

    async def run(self, listening: asyncio.Event, until: asyncio.Event) -> None:
        """`listening` is set when every subject is heard. `Unavailable` when one cannot be."""
        refused: Unavailable | None = None
        async with asyncio.TaskGroup() as self._group:
            try:
                for verb in wire.WORKER_SUBJECTS:
                    await self._bus.subscribe(wire.node_subject(self._node_id, verb), partial(self._receive, verb))
                listening.set()
                await until.wait()
            except Unavailable as error:
                refused = error  # raised below: a task group would wrap it
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()
        if refused is not None:
            raise refused

    def _receive(self, verb: str, message: Message) -> None:
        if self._group is None:
            return  # leaving: it will be sent again
        task = self._group.create_task(self._take(verb, message, is_over=len(self._tasks) >= MAX_MESSAGES))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, verb: str, message: Message, is_over: bool) -> None:
        if is_over:
            busy = Unavailable(f"cannot take another command: {MAX_MESSAGES} are at work", code="resource_exhausted")
            answer = encode_reply(verb, outcome_of(busy), None)
        else:
            answer = await self._answer(verb, message)
        if message.reply:
            with contextlib.suppress(Unavailable):
                await self._bus.publish(message.reply, answer)

    async def _answer(self, verb: str, message: Message) -> bytes:
        if verb == wire.RUNNING:
            return wire.encode(wire.ModelsRunningReply(models=self._parts.supervisor.running()))
        try:
            installed = await in_thread(self._parts.trees.list_installed)
            if verb == wire.LIST:
                return wire.encode(wire.BackendListReply(backends=installed))
            named = galleries_wanted(verb, message.payload)
            galleries = await self._parts.look_up(named) if named is not None else ()
            known = Known(installed=installed, galleries=galleries)
            work = await in_thread(decode, verb, message.payload, known)
        except EnginehouseError as error:
            return encode_reply(verb, outcome_of(error), None)
        except OSError as error:
            failure = disk.storage_error(error, "read what is installed")
            if verb == wire.LIST:
                return wire.encode(wire.BackendListReply(backends=None, error=failure.message))
            return encode_reply(verb, outcome_of(failure), None)
        command = work.command
        told = Told(
            node_id=self._node_id,
            op_id=work.op_id,
            about=work.about,
            intent=command.intent if command else "",
            attempt=command.attempt if command else 0,
        )
        async with publishing(self._bus, told) as publisher:
            outcome = await self._actions.perform(work, publisher.report)
        return encode_reply(verb, outcome, work)
