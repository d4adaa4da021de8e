"""Calls that share transactions: each is answered for itself, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from tests.frontend.world import World

from enginehouse.core.errors import Conflict, EnginehouseError, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.frontend.fleet.shared_transactions import Performed, SharedTransactions
from enginehouse.store.db import Connection

GATHER_SECONDS = 0.05


class Calls:
    """Work that answers with the word it was given, and fails for some words."""

    def __init__(self, world: World, *, most: int = 10) -> None:
        self.batches: list[list[str]] = []
        self.published: list[list[str]] = []
        self.shared = SharedTransactions(world.store, self._perform, self._publish, most=most)
        self.shared.gather_seconds = GATHER_SECONDS

    def _perform(self, _connection: Connection, asked: Sequence[str]) -> Performed[str, list[str]]:
        self.batches.append([*asked])
        if "fault" in asked:
            raise ZeroDivisionError
        if "refused" in asked:
            raise Conflict("cannot do this")
        answers: list[str | EnginehouseError] = [
            NotFound("cannot find this", code="not_found") if one == "unknown" else one for one in asked
        ]
        return Performed(answers, [*asked])

    async def _publish(self, effects: list[str]) -> None:
        self.published.append(effects)

    async def make(self, *words: str, nodes: Sequence[str] = ()) -> list[str | Exception]:
        """The answer or the error of each of these at once."""
        by_node = zip(nodes or [str(number) for number in range(len(words))], words, strict=True)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(NodeId(node), word)) for node, word in by_node]
        return [task.result() for task in tasks]

    async def _one(self, node_id: NodeId, word: str) -> str | Exception:
        try:
            return await self.shared.add(node_id, word)
        except (EnginehouseError, ZeroDivisionError) as error:
            return error


async def test_calls_share_the_next_transaction_and_what_it_did_is_published_once(world: World) -> None:
    calls = Calls(world)
    assert await calls.make("a", "b", "c", "d") == ["a", "b", "c", "d"]
    assert len(calls.batches) <= 2
    assert calls.published == calls.batches


async def test_the_second_call_of_a_node_is_in_the_transaction_after(world: World) -> None:
    calls = Calls(world)
    assert await calls.make("a", "b", "c", nodes=["x", "x", "x"]) == ["a", "b", "c"]
    assert calls.batches == [["a"], ["b"], ["c"]]


async def test_no_transaction_takes_more_calls_than_it_may(world: World) -> None:
    calls = Calls(world, most=2)
    assert len(await calls.make(*"abcdefg")) == 7
    assert max(map(len, calls.batches)) == 2


async def test_a_transaction_that_is_full_does_not_wait_for_more(world: World) -> None:
    calls = Calls(world, most=2)
    calls.shared.gather_seconds = 100.0
    async with asyncio.timeout(10):
        await calls.make(*"abcde")
    assert list(map(len, calls.batches)) == [1, 2, 2]


async def test_one_that_is_answered_with_an_error_takes_nobody_with_it(world: World) -> None:
    answers = await Calls(world).make("a", "unknown", "b")
    assert [answers[0], type(answers[1]), answers[2]] == ["a", NotFound, "b"]


@pytest.mark.parametrize(("word", "error"), [("refused", Conflict), ("fault", ZeroDivisionError)])
@pytest.mark.parametrize("place", [0, 1, 3])
async def test_where_one_fails_the_others_are_done_without_it(
    world: World, word: str, error: type[Exception], place: int
) -> None:
    calls = Calls(world)
    words = [*"abcd"]
    words[place] = word
    answers = await calls.make(*words)
    failed = [one for one in answers if isinstance(one, Exception)]
    assert failed, "somebody is told of it"
    assert {type(one) for one in failed} == {error}
    if word == "refused":
        assert [one for one in answers if one not in failed] == [one for one in words if one != word]
    else:
        # Nobody expects a fault: whoever had the turn is told of it too, and does it again.
        assert len(failed) <= 2


async def test_each_is_told_that_the_store_is_away(world: World) -> None:
    calls = Calls(world)
    world.store.is_away = True
    assert [type(one) for one in await calls.make("a", "b")] == [Unavailable, Unavailable]
    world.store.is_away = False
    assert await calls.make("a", "b") == ["a", "b"]


async def test_one_that_leaves_while_it_has_the_turn_takes_no_other_with_it(world: World) -> None:
    calls = Calls(world)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        await calls.make("first")  # so that the next one has to wait
        leaving = group.create_task(calls.shared.add(NodeId("x"), "a"))
        staying = group.create_task(calls.shared.add(NodeId("y"), "b"))
        await asyncio.sleep(0)
        leaving.cancel()
    assert staying.result() == "b"
