"""Steps that fail: what counts, what is told, and how soon the next one is."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from enginehouse.core.errors import Unavailable
from enginehouse.loop import STUCK_FAILURES, Loop, Wakes


class Failing:
    """A step that fails until it is mended."""

    def __init__(self, code: str) -> None:
        self._code = code
        self.is_mended = False
        self.done = asyncio.Event()
        self.failed = asyncio.Event()

    async def step(self) -> None:
        if not self.is_mended:
            self.failed.set()
            raise Unavailable("cannot do it now", code=self._code)
        self.done.set()


@pytest.mark.parametrize("is_housekeeping", [False, True])
async def test_a_loop_that_only_tidies_up_keeps_nobody_from_being_ready(is_housekeeping: bool) -> None:
    loop = Loop("tidy", Failing("upstream_error").step, 60.0, is_housekeeping=is_housekeeping)
    loop.failures = STUCK_FAILURES
    assert loop.is_stuck != is_housekeeping
    loop.failures = STUCK_FAILURES - 1
    assert not loop.is_stuck


@pytest.mark.parametrize(("code", "lines"), [("store_unavailable", 0), ("bus_unavailable", 0), ("upstream_error", 1)])
async def test_what_the_store_and_the_bus_tell_themselves_is_not_told_by_every_loop(
    caplog: pytest.LogCaptureFixture, code: str, lines: int
) -> None:
    failing = Failing(code)
    loop = Loop("step", failing.step, 60.0)
    with caplog.at_level(logging.INFO):
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            running = group.create_task(loop.run())
            await failing.failed.wait()
            running.cancel()
    assert caplog.text.count("loop.step_failed") == lines
    assert loop.failures == 1


async def test_what_is_back_is_noticed_at_once_however_long_the_pause_has_become() -> None:
    failing, wakes = Failing("store_unavailable"), Wakes()
    loop = Loop("step", failing.step, 30.0)
    loop.failures = 20  # the next pause is half a minute
    wakes.loops = {"step": loop}
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await failing.failed.wait()
        failing.is_mended = True
        began = time.monotonic()
        wakes.wake_all()
        await failing.done.wait()
        assert time.monotonic() - began < 3.0
        running.cancel()


async def test_a_step_that_takes_long_is_followed_by_a_rest_however_often_it_is_woken() -> None:
    took, steps, rests = 0.02, 5, 4.0
    done = asyncio.Event()
    count = 0

    async def step() -> None:
        nonlocal count
        end = time.perf_counter() + took
        while time.perf_counter() < end:
            pass  # work, not waiting
        count += 1
        loop.wake()
        if count == steps:
            done.set()

    loop = Loop("busy", step, 60.0, rests=rests)
    began = time.perf_counter()
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await done.wait()
        running.cancel()
    assert time.perf_counter() - began >= took * steps + rests * took * (steps - 1)


async def test_a_loop_rests_while_there_is_nothing_to_do_unless_it_is_woken() -> None:
    asked, steps = 0, 0
    is_enough, has_stepped = asyncio.Event(), asyncio.Event()

    def is_idle() -> bool:
        nonlocal asked
        asked += 1
        if asked == 3:
            is_enough.set()
        return True

    async def step() -> None:
        nonlocal steps
        steps += 1
        has_stepped.set()

    loop = Loop("idle", step, 0.01)
    loop.rest_while(is_idle)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await is_enough.wait()
        assert steps == 1
        has_stepped.clear()
        loop.wake()
        await has_stepped.wait()
        running.cancel()


async def test_a_step_that_failed_is_repeated_though_there_seems_to_be_nothing_to_do() -> None:
    failing = Failing("upstream_error")
    loop = Loop("idle", failing.step, 0.01)
    loop.rest_while(lambda: True)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await failing.failed.wait()
        failing.is_mended = True
        await failing.done.wait()
        running.cancel()


async def test_two_steps_are_so_far_apart_however_often_the_loop_is_woken() -> None:
    spacing, steps = 0.05, 4
    begun: list[float] = []
    done = asyncio.Event()

    async def step() -> None:
        begun.append(time.perf_counter())
        loop.wake()
        if len(begun) == steps:
            done.set()

    loop = Loop("woken", step, 60.0, spacing_seconds=spacing)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        running = group.create_task(loop.run())
        await done.wait()
        running.cancel()
    assert begun[-1] - begun[0] >= spacing * (steps - 1) * 0.99
