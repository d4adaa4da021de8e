"""Requests that come together begin a few at a time, and whatever else arrives runs in between."""

from __future__ import annotations

import asyncio
import itertools

from enginehouse.api.turns import Turns

AT_ONCE, CALLS = 3, 20


async def begin(turns: Turns, begun: list[int], number: int) -> None:
    await turns.take()
    begun.append(number)


async def test_many_that_come_together_begin_a_few_per_round_and_in_order() -> None:
    turns, begun, seen = Turns(AT_ONCE), list[int](), [0]
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number in range(CALLS):
            group.create_task(begin(turns, begun, number))
        while len(begun) < CALLS:
            await asyncio.sleep(0)  # one round, as of a request that arrives meanwhile
            seen.append(len(begun))
    assert begun == list(range(CALLS))
    assert max(after - before for before, after in itertools.pairwise(seen)) <= AT_ONCE


async def test_one_alone_waits_for_nothing() -> None:
    turns, begun = Turns(AT_ONCE), list[int]()
    for number in range(AT_ONCE):
        coroutine = begin(turns, begun, number)
        try:
            coroutine.send(None)
        except StopIteration:
            continue
        raise AssertionError("it waited")
    assert begun == list(range(AT_ONCE))


async def test_who_was_cancelled_takes_no_turn_from_the_others() -> None:
    turns, begun = Turns(AT_ONCE), list[int]()
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        tasks = [group.create_task(begin(turns, begun, number)) for number in range(CALLS)]
        await asyncio.sleep(0)
        for task in tasks[AT_ONCE : 2 * AT_ONCE]:
            task.cancel()
    assert begun == [*range(AT_ONCE), *range(2 * AT_ONCE, CALLS)]
    await begin(turns, begun, CALLS)
    assert begun[-1] == CALLS
