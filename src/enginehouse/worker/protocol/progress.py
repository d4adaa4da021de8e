"""Publishes the progress of a command: the first event at once, then at most one every 250 ms, and always the last one.

Best effort: while the bus is away, events are dropped and never queued. Numbers never decrease within an attempt,
whatever the steps of the work report, because the frontend shows them as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct

from enginehouse.core import subjects, wire
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.progress import Phase, Progress
from enginehouse.ports import Bus

WINDOW_SECONDS = 0.25  # LocalAI's value: four events a second look smooth and cost the bus little


class ReportedCommand(Struct, frozen=True, kw_only=True):
    """The command that progress events belong to."""

    node_id: NodeId
    op_id: str
    about: str  # the backend or model, as the request named it
    intent: IntentId = IntentId("")
    attempt: int = 0


class Publisher:
    def __init__(self, bus: Bus, command: ReportedCommand) -> None:
        self._bus = bus
        self._command = command
        self._latest = Progress(attempt=command.attempt)
        self._changed = asyncio.Event()
        self._sequence = 0
        # Without an operation ID that fits into a subject, no events are published; the frontend gets only the reply.
        self._is_published = subjects.can_be_token(command.op_id)

    def report(self, phase: Phase, file: str, done_bytes: int, total_bytes: int) -> None:
        """Set the latest progress. Call it on the loop's thread, as often as needed."""
        self._latest = Progress(
            phase=phase,
            file=file,
            done_bytes=max(done_bytes, self._latest.done_bytes),
            total_bytes=max(total_bytes, self._latest.total_bytes),
            attempt=self._command.attempt,
        )
        self._changed.set()

    async def publish(self) -> None:
        """Publish the latest progress unless it was already published."""
        if not self._changed.is_set() or not self._is_published:
            return
        self._changed.clear()
        self._sequence += 1
        progress = msgspec.structs.replace(self._latest, sequence=self._sequence)
        command = self._command
        event = wire.progress_event(command.op_id, command.node_id, command.about, command.intent, progress)
        with contextlib.suppress(Unavailable):
            await self._bus.publish(subjects.progress_subject(command.node_id, command.op_id), wire.encode(event))

    async def pump(self) -> None:
        while True:
            await self._changed.wait()
            await self.publish()
            await asyncio.sleep(WINDOW_SECONDS)


@contextlib.asynccontextmanager
async def publishing(bus: Bus, command: ReportedCommand) -> AsyncIterator[Publisher]:
    """Open a publisher. Its first event, sent before anything else, reports that the command has arrived."""
    publisher = Publisher(bus, command)
    publisher.report("resolving", "", 0, 0)
    await publisher.publish()
    async with asyncio.TaskGroup() as group:
        pump = group.create_task(publisher.pump())
        try:
            yield publisher
        finally:
            pump.cancel()
            await publisher.publish()
