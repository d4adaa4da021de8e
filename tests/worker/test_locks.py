"""Shared and exclusive locks: fair, and kept only while wanted."""

from __future__ import annotations

import asyncio

from enginehouse.worker.locks import Locks


async def test_shared_ones_go_together_and_an_exclusive_one_alone_in_the_order_of_asking() -> None:
    locks = Locks()
    order: list[str] = []
    release = asyncio.Event()

    async def hold(name: str, exclusive: bool) -> None:
        async with locks.hold("a", exclusive=exclusive):
            order.append(name)
            await release.wait()
            order.append(f"-{name}")

    async with asyncio.TaskGroup() as group:
        for name, exclusive in (("s1", False), ("s2", False), ("x", True), ("s3", False)):
            group.create_task(hold(name, exclusive))
            await asyncio.sleep(0)
        assert order == ["s1", "s2"]
        release.set()
    assert order.index("x") == order.index("-x") - 1
    assert order.index("-x") < order.index("s3")
    assert not locks._locks


async def test_one_that_gives_up_waiting_does_not_block_the_next() -> None:
    locks = Locks()
    entered = asyncio.Event()

    async def wait(exclusive: bool) -> None:
        async with locks.hold("a", exclusive=exclusive):
            entered.set()

    async with asyncio.TaskGroup() as group:
        async with locks.hold("a", exclusive=False):
            impatient = group.create_task(wait(True))
            group.create_task(wait(False))
            await asyncio.sleep(0)
            assert not entered.is_set()
            impatient.cancel()
            await asyncio.wait_for(entered.wait(), 5)
    assert not locks._locks


async def test_one_that_is_cancelled_the_moment_it_gets_in_passes_the_place_on() -> None:
    locks = Locks()

    async def wait() -> None:
        async with locks.hold("a"):
            pass

    async with asyncio.TaskGroup() as group:
        async with locks.hold("a"):
            first, second = group.create_task(wait()), group.create_task(wait())
            await asyncio.sleep(0)
        # Let in by the line above, cancelled before it has run.
        first.cancel()
        await asyncio.wait_for(second, 5)
    assert not locks._locks
