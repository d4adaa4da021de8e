"""An event loop without a clock and without the outside: time is a number, and a seed chooses who runs next.

Every callback belongs to the process in whose context it was made, so a process can be frozen (nothing of it runs,
its timers wait) for a pause or for ever; the latter is a kill: no clean-up of it ever runs. What is given to an
executor runs at once, inline, at a later moment of virtual time. It must not touch sockets, threads or the real time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
PROCESS: ContextVar[Process] = ContextVar("process")
INLINE_SECONDS = (0.0002, 0.004)  # what a small transaction or a small write takes


class Process:
    """One program on one machine, as the scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_frozen = False
        self.is_dead = False
        self.slowness = 1.0  # how much longer than usual its executor takes
        self.queue: deque[asyncio.Handle] = deque()
        # Kept to the end of the run: collecting a killed coroutine would run its clean-up after all.
        self.tasks: list[asyncio.Task[Any]] = []
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that must not end with an error: whatever it raises ends the run."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        task = loop.create_task(work, context=self.context)
        task.add_done_callback(loop.note_end, context=self.context)
        return task

    def kill(self) -> None:
        self.is_frozen = self.is_dead = True


class SimTask(asyncio.Task[Any]):
    """A group keeps its tasks in a set, and cancels them in the order of that: by their numbers, not by addresses."""

    def __init__(self, number: int, work: Any, loop: SimLoop, context: Context | None) -> None:
        self._number = number
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


class StepLimit(Exception):
    """The run did not come to its end within its steps: something spins."""


class SimLoop(asyncio.BaseEventLoop):
    _stopping: bool

    def __init__(self, chance: Random, *, shuffle: float = 0.0, step_limit: int = 400_000) -> None:
        super().__init__()
        self._chance = chance
        self._shuffle = shuffle
        self._step_limit = step_limit
        self._now = 0.0
        # With numbers, because comparing timers themselves is much slower; those of one moment in the order of making.
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = self._tasks_made = 0
        self.steps = 0
        self.failure: BaseException | None = None
        self._is_over = False
        self.outside = Process("outside")
        self.processes = [self.outside]
        self._living = [self.outside]  # and those that died since the last one was born

    def time(self) -> float:
        return self._now

    def new_process(self, name: str) -> Process:
        process = Process(name)
        self.processes.append(process)
        self._living = [one for one in self.processes if not one.is_dead]
        return process

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        self._tasks_made += 1
        task = SimTask(self._tasks_made, coro, self, context)
        owner = PROCESS.get(self.outside) if context is None else context.get(PROCESS, self.outside)
        owner.tasks.append(task)
        return task

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Straight into the queue of its process: half of all steps come this way."""
        owner = PROCESS.get(self.outside) if context is None else context.get(PROCESS, self.outside)
        handle = asyncio.Handle(callback, args, self, context)
        owner.queue.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timers_made += 1
        heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Inline, but neither begun nor known at once: a kill or a cancellation may fall on either side of it."""
        future: asyncio.Future[T] = self.create_future()
        slowness = PROCESS.get(self.outside).slowness
        until_begun = self._chance.uniform(*INLINE_SECONDS) * slowness
        until_known = self._chance.uniform(*INLINE_SECONDS) * slowness

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = func(*args)
            except Exception as error:
                self.call_later(until_known, _settle, future, None, error)
            else:
                self.call_later(until_known, _settle, future, result, None)

        self.call_later(until_begun, run)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There are no threads to wait for."""

    def fail(self, failure: BaseException) -> None:
        """End the run with this, from wherever: product code may not catch it."""
        if self.failure is None and not self._is_over:
            self.failure = failure

    def note_end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _run_once(self) -> None:
        """Callback after callback, and to the next timer where there is none. Called by `run_forever`, and leaves only
        to be ended: the way through there costs as much as a small step.
        """
        while not self._stopping:
            self._sort_due()
            runnable = [process for process in self._living if process.queue and not process.is_frozen]
            if not runnable:
                self._jump()
                continue
            chosen = runnable[0] if len(runnable) == 1 else self._chance.choice(runnable)
            handle = self._taken(chosen.queue)
            if handle._cancelled:
                continue
            self.steps += 1
            handle._run()
            if self.failure is not None:
                raise self.failure
            if self.steps > self._step_limit:
                raise StepLimit(f"{self.steps} steps and no end")

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            raise StepLimit("nothing can ever happen again")
        self._now = max(self._now, timers[0][0])

    def _sort_due(self) -> None:
        timers, now = self._timers, self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                timer._context.get(PROCESS, self.outside).queue.append(timer)  # type: ignore[attr-defined]

    def _taken(self, queue: deque[asyncio.Handle]) -> asyncio.Handle:
        if len(queue) > 1 and self._shuffle and self._chance.random() < self._shuffle:
            place = self._chance.randrange(len(queue))
            handle = queue[place]
            del queue[place]
            return handle
        return queue.popleft()

    def _write_to_self(self) -> None:
        """Nobody sleeps in a selector here."""

    def end(self, step_limit: int = 50_000) -> None:
        """After the run: let every task end, those of killed processes too: nothing is left to the collector."""
        self.failure, self._is_over = None, True
        self._step_limit = self.steps + step_limit
        self._living = self.processes
        for process in self.processes:
            process.is_frozen = False
        for _ in range(20):
            left = [task for process in self.processes for task in process.tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            try:
                self.run_until_complete(_ended(left))
            except StepLimit:
                break
        self.close()


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=60.0)
