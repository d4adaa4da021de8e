"""Repetition of a step, on wake or at an interval, with backoff while it fails.

A failed step is logged the first time and then at growing intervals; the loop continues. Unexpected exceptions are
logged with a traceback, our own errors are not. This is one of the two broad `except`s in the program: a bug in one
loop must neither stop the others nor stay hidden. Readiness checks `failures`, except for housekeeping loops. The store
and the bus log their own outages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from enginehouse.core.errors import EnginehouseError

log = logging.getLogger(__name__)

BACKOFF_CAP_SECONDS = 30.0  # for slow loops
QUICK_SECONDS = 1.5  # for loops whose results users watch
STUCK_FAILURES = 3  # in a row
_LOGGED_ELSEWHERE = frozenset({"store_unavailable", "bus_unavailable"})


def _never() -> bool:
    return False


class Loop:
    """Repeats `step` until cancelled. `wake` starts the next step at once; wakes during a step cause one more."""

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        interval_seconds: float,
        *,
        first_seconds: float = 0.0,
        is_housekeeping: bool = False,
        rests: float = 0.0,
        spacing_seconds: float = 0.0,
    ) -> None:
        """`rests`: how many times as long as a step took the loop rests after it, whoever wakes it. The cost of a step
        that reads all of something is then bounded by this share, however often it changes. `spacing_seconds`: the
        least time between the beginnings of two steps, whoever wakes the loop.
        """
        self.name = name
        self._is_housekeeping = is_housekeeping
        self.failures = 0
        self._step = step
        self._interval_seconds = interval_seconds
        self._first_seconds = first_seconds
        self._rests = rests
        self._spacing_seconds = spacing_seconds
        self._is_idle: Callable[[], bool] = _never
        self._woken = asyncio.Event()

    def rest_while(self, is_idle: Callable[[], bool]) -> None:
        """Leave out the steps that nobody woke the loop for while `is_idle` says that they would find nothing to do. A
        step that failed is always repeated.
        """
        self._is_idle = is_idle

    @property
    def is_stuck(self) -> bool:
        """Whether the loop fails repeatedly and readiness depends on it."""
        return self.failures >= STUCK_FAILURES and not self._is_housekeeping

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        if self._first_seconds:
            await asyncio.sleep(self._first_seconds)
        while True:
            self._woken.clear()
            pause, began = self._interval_seconds, asyncio.get_running_loop().time()
            try:
                await self._step()
            except Exception as error:
                self.failures += 1
                # Not much longer than the loop's own interval: its results must be current again soon after the cause
                # is gone, and one more query per second does no harm.
                longest = max(QUICK_SECONDS, min(BACKOFF_CAP_SECONDS, self._interval_seconds))
                pause = min(longest, 0.5 * 2 ** min(self.failures, 10))
                is_logged = isinstance(error, EnginehouseError) and error.code in _LOGGED_ELSEWHERE
                if not is_logged and self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                    log.warning(
                        "loop.step_failed loop=%s failures=%d error=%s",
                        self.name,
                        self.failures,
                        error,
                        exc_info=self.failures == 1 and not isinstance(error, EnginehouseError),
                    )
                # A wake must not shorten the pause after a failure, or frequent wakes would cause a busy loop.
                slept = min(pause, 1.0)
                await asyncio.sleep(slept)
                pause -= slept
            else:
                self.failures = 0
                took = asyncio.get_running_loop().time() - began
                rest = min(pause, max(self._rests * took, self._spacing_seconds - took))
                if rest > 0:
                    await asyncio.sleep(rest)
                    pause -= rest
            while not await self._is_woken_within(pause) and not self.failures and self._is_idle():
                pause = self._interval_seconds

    async def _is_woken_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                return await self._woken.wait()
        except TimeoutError:
            return False


class Signal:
    """A callback that is connected after it was handed out: objects are built before the object that listens."""

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None

    def connect(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self) -> None:
        if self._call is not None:
            self._call()


class Wakes:
    """Lets objects wake loops by name, because the loops are created after those objects."""

    def __init__(self) -> None:
        self.loops: dict[str, Loop] = {}
        self.on_connected: list[Callable[[], None]] = []
        self.is_stopping = False

    def note_stop(self) -> None:
        """Report not ready from now on."""
        self.is_stopping = True

    def stop_with(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Return a function that reports not ready and then calls `tell`."""

        def stop() -> None:
            self.is_stopping = True
            tell()

        return stop

    def wake_all(self) -> None:
        """The store is available again: end all pauses that were meant for its absence."""
        for loop in self.loops.values():
            loop.wake()

    def connected(self) -> None:
        """The bus is connected, perhaps to another server than before."""
        for call in self.on_connected:
            call()
        self.of("dispatch", "revoke")()

    def of(self, *names: str) -> Callable[[], None]:
        def wake() -> None:
            for name in names:
                if name in self.loops:
                    self.loops[name].wake()

        return wake
