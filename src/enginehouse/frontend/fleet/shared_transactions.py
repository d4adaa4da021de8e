"""Runs the same work for many callers in one transaction.

Calls that arrive while a transaction is under way, or soon after it, share the next one, run by whichever of them has
the next turn. Nobody is answered before its own part is committed, and a database that is away is told to each. What
fails otherwise is tried again for each alone, so that nobody is answered for another's fault.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.store.db import Connection, Store

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Effects = TypeVar("Effects")

# Between two transactions of one frontend: a worker waits so much longer for its answer. It grows with the calls of
# the last one, up to five times as much, so that a thousand nodes cost two transactions a second and eight nodes are
# answered at once.
GATHER_SECONDS = 0.1
PER_STEP = 2  # calls of one transaction for each further step of the pause
MOST_STEPS = 5


class _Waiting(Struct, Generic[Asked, Answer], kw_only=True):
    node_id: NodeId
    asked: Asked
    is_alone: bool = False  # a transaction with others failed
    answer: Answer | None = None
    error: EnginehouseError | None = None

    @property
    def is_over(self) -> bool:
        return self.answer is not None or self.error is not None

    def note(self, answer: Answer | EnginehouseError) -> None:
        if isinstance(answer, EnginehouseError):
            self.error = answer
        else:
            self.answer = answer


class Performed(Struct, Generic[Answer, Effects]):
    """What one transaction did: an answer or an error per call, in their order, and what is to be published."""

    answers: Sequence[Answer | EnginehouseError]
    effects: Effects


class SharedTransactions(Generic[Asked, Answer, Effects]):
    """`perform` is given at most one call per node, in the order of their ids, so that two frontends do not wait for
    each other. `publish` is called after the commit.
    """

    def __init__(
        self,
        store: Store,
        perform: Callable[[Connection, Sequence[Asked]], Performed[Answer, Effects]],
        publish: Callable[[Effects], Awaitable[None]],
        *,
        most: int,
    ) -> None:
        self._store = store
        self._perform = perform
        self._publish = publish
        self._most = most
        self._waiting: list[_Waiting[Asked, Answer]] = []
        self._turn = asyncio.Lock()
        self._began_at = -math.inf
        self._steps = 1
        self.gather_seconds = GATHER_SECONDS

    @property
    def pause_seconds(self) -> float:
        """The time between two transactions as it is now."""
        return self.gather_seconds * self._steps

    async def add(self, node_id: NodeId, asked: Asked) -> Answer:
        """Do this together with what waits. Returns when it is committed."""
        mine: _Waiting[Asked, Answer] = _Waiting(node_id=node_id, asked=asked)
        done: list[Effects] = []
        self._waiting.append(mine)
        async with self._turn:
            while not mine.is_over:
                done += await self._run_next(mine)
        for effects in done:
            await self._publish(effects)
        if mine.error is not None:
            raise mine.error
        assert mine.answer is not None
        return mine.answer

    async def _run_next(self, mine: _Waiting[Asked, Answer]) -> list[Effects]:
        """Run one transaction for what waits, and return what is to be published."""
        running = asyncio.get_running_loop()
        pause = self._began_at + self.pause_seconds - running.time()
        if pause > 0 and len(self._waiting) < self._most:
            await asyncio.sleep(pause)
        self._began_at = running.time()
        batch = self._take()
        self._steps = min(1 + len(batch) // PER_STEP, MOST_STEPS)
        asked = [one.asked for one in batch]
        left = [one for one in batch if one is not mine]  # who has the turn hears of a fault itself
        is_fault = True
        try:
            done = await self._store.transaction(lambda connection: self._perform(connection, asked))
            for one, answer in zip(batch, done.answers, strict=True):
                one.note(answer)
        except Unavailable as error:
            for one in batch:
                one.note(error)
            return []
        except EnginehouseError as error:
            if len(batch) == 1:
                batch[0].note(error)
            left = batch
            return []
        except asyncio.CancelledError:
            is_fault = False
            raise
        finally:
            again = [one for one in left if not one.is_over]
            for one in again:
                one.is_alone = one.is_alone or is_fault
            self._waiting[:0] = again
        return [done.effects]

    def _take(self) -> list[_Waiting[Asked, Answer]]:
        """Those of the next transaction, by node. A second call of a node waits for the one after."""
        if self._waiting[0].is_alone:
            return [self._waiting.pop(0)]
        taken: dict[NodeId, _Waiting[Asked, Answer]] = {}
        later: list[_Waiting[Asked, Answer]] = []
        for one in self._waiting:
            if one.is_alone or one.node_id in taken or len(taken) >= self._most:
                later.append(one)
            else:
                taken[one.node_id] = one
        self._waiting = later
        return [taken[node_id] for node_id in sorted(taken)]
