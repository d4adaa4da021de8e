"""Progress on the bus: at once, not too often, never backwards, always the last word."""

from __future__ import annotations

import asyncio

from tests.bus.memory import MemoryBus
from tests.worker.world import until

from enginehouse.core import subjects, wire
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.progress import Progress
from enginehouse.worker.protocol.progress import ReportedCommand, publishing

TOLD = ReportedCommand(node_id=NodeId("n"), op_id="op", about="llama-cpp", intent=IntentId("i"), attempt=2)


def events(bus: MemoryBus) -> list[Progress]:
    subject = subjects.progress_subject(NodeId("n"), "op")
    said = [wire.decode(payload, wire.ProgressEvent, "progress") for to, payload in bus.said if to == subject]
    return [wire.progress_of(event) for event in said]


async def test_the_first_event_is_there_before_any_work() -> None:
    bus = MemoryBus()
    async with publishing(bus, TOLD):
        (first,) = events(bus)
        assert (first.phase, first.attempt, first.sequence) == ("resolving", 2, 1)


async def test_many_reports_make_few_events_and_the_last_is_always_sent() -> None:
    bus = MemoryBus()
    started = asyncio.get_running_loop().time()
    done = 0
    async with publishing(bus, TOLD) as publisher:
        while asyncio.get_running_loop().time() < started + 0.6:
            done += 1
            publisher.report("downloading", "file", done, 10**9)
            await asyncio.sleep(0)
    took = asyncio.get_running_loop().time() - started
    seen = events(bus)
    assert 4 <= len(seen) <= 3 + took / 0.25
    assert seen[-1].done_bytes == done
    assert [event.sequence for event in seen] == list(range(1, len(seen) + 1))


async def test_a_quiet_time_is_followed_by_an_event_at_once() -> None:
    bus = MemoryBus()
    async with publishing(bus, TOLD) as publisher:
        publisher.report("downloading", "file", 1, 10)
        await until(lambda: len(events(bus)) == 2, limit_seconds=0.2)


async def test_numbers_never_fall() -> None:
    bus = MemoryBus()
    async with publishing(bus, TOLD) as publisher:
        publisher.report("downloading", "a", 50, 100)
        await until(lambda: events(bus)[-1].done_bytes == 50)
        publisher.report("extracting", "b", 10, 20)
    last = events(bus)[-1]
    assert (last.phase, last.done_bytes, last.total_bytes) == ("extracting", 50, 100)


async def test_without_an_operation_nothing_is_sent() -> None:
    bus = MemoryBus()
    async with publishing(bus, ReportedCommand(node_id=NodeId("n"), op_id="", about="x")) as publisher:
        publisher.report("downloading", "a", 50, 100)
    assert bus.said == []
