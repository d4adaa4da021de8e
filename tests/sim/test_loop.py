"""The loop of the simulation: time is virtual, frozen processes do nothing, and a seed decides the order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from random import Random
from typing import Any, TypeVar

import pytest
from tests.sim.loop import SimLoop, StepLimit

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], loop: SimLoop) -> T:
    try:
        return loop.run_until_complete(work)
    finally:
        loop.end()


def test_a_day_passes_at_once() -> None:
    loop = SimLoop(Random(1))

    async def sleep() -> float:
        async with asyncio.timeout(100_000), asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(86_400))
        return loop.time()

    began = time.monotonic()
    assert run(sleep(), loop) == 86_400
    assert time.monotonic() - began < 5


def test_a_timeout_is_virtual_too() -> None:
    async def wait() -> None:
        async with asyncio.timeout(3600):
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run(wait(), SimLoop(Random(1)))


def test_what_goes_to_a_thread_runs_inline_and_later() -> None:
    loop = SimLoop(Random(1))

    async def work() -> tuple[int, float]:
        return await asyncio.to_thread(lambda: 42), loop.time()

    result, at = run(work(), loop)
    assert result == 42
    assert at > 0


def test_a_frozen_process_does_nothing_and_goes_on_where_it_was() -> None:
    loop = SimLoop(Random(1))
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(loop.time())
            await asyncio.sleep(1)

    async def freeze() -> list[float]:
        process = loop.new_process("clock")
        process.spawn(tick())
        await asyncio.sleep(2.5)
        process.is_frozen = True
        await asyncio.sleep(10)
        process.is_frozen = False
        await asyncio.sleep(1.5)
        return ticks

    assert run(freeze(), loop) == [0, 1, 2, 12.5, 13.5]


def test_nothing_of_a_killed_process_runs_not_even_its_clean_up() -> None:
    loop = SimLoop(Random(1))
    cleaned: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(5)
        finally:
            cleaned.append("up")

    async def kill() -> list[str]:
        process = loop.new_process("victim")
        process.spawn(work())
        await asyncio.sleep(1)
        process.kill()
        await asyncio.sleep(100)
        return list(cleaned)

    assert run(kill(), loop) == []


def test_an_error_of_a_process_ends_the_run() -> None:
    loop = SimLoop(Random(1))

    async def fail() -> None:
        raise ZeroDivisionError

    async def spawn() -> None:
        loop.new_process("broken").spawn(fail())
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        run(spawn(), loop)


def test_waiting_for_nothing_is_an_end_and_not_a_hang() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StepLimit):
        run(wait(), SimLoop(Random(1)))


def test_a_group_cancels_its_tasks_in_an_order_that_no_address_decides() -> None:
    def ended() -> list[int]:
        loop = SimLoop(Random(1))
        done: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(100)
            finally:
                done.append(number)

        async def fail() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(20):
                    group.create_task(wait(number))
                await asyncio.sleep(1)
                raise ZeroDivisionError

        with pytest.raises(ExceptionGroup):
            run(fail(), loop)
        return done

    before, between = ended(), [object() for _ in range(1000)]
    assert before == ended() == list(range(20))
    assert between


def order(seed: int) -> list[str]:
    loop = SimLoop(Random(seed), shuffle=0.5)
    done: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            done.append(name)
            await asyncio.sleep(0)

    async def both() -> list[str]:
        for name in ("first", "second", "third"):
            loop.new_process(name).spawn(work(name))
        await asyncio.sleep(1)
        return done

    return run(both(), loop)


def test_the_order_is_that_of_the_seed() -> None:
    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(20)}) > 10
