"""The one way to repeat a step: on wake or interval, backing off while it fails.

A step that raises is logged the first time and ever more seldom after that; the loop goes on. What is none of our own
errors, which say what happened and are no bug, is logged with its traceback. That is one of the two broad `except`s in
the program: a bug in one loop must neither stop the others nor hide, so `failures` is what the readiness answer looks
at; a loop that only tidies up is no part of that. That the store or the bus is away they tell themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from enginehouse.core.errors import EnginehouseError

log = logging.getLogger(__name__)

BACKOFF_CAP_SECONDS = 30.0  # of loops that are slow anyway
QUICK_SECONDS = 1.5  # of those that somebody watches
STUCK_FAILURES = 3  # in a row
_TOLD_ELSEWHERE = frozenset({"store_unavailable", "bus_unavailable"})


class Loop:
    """Repeats `step` until cancelled. `wake` makes the next step start at once; many wakes during a step make one
    more step.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        interval_seconds: float,
        *,
        first_seconds: float = 0.0,
        is_housekeeping: bool = False,
    ) -> None:
        self.name = name
        self._is_housekeeping = is_housekeeping
        self.failures = 0
        self._step = step
        self._interval_seconds = interval_seconds
        self._first_seconds = first_seconds
        self._woken = asyncio.Event()

    @property
    def is_stuck(self) -> bool:
        """Whether somebody goes without what it does."""
        return self.failures >= STUCK_FAILURES and not self._is_housekeeping

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        if self._first_seconds:
            await asyncio.sleep(self._first_seconds)
        while True:
            self._woken.clear()
            pause = self._interval_seconds
            try:
                await self._step()
            except Exception as error:
                self.failures += 1
                # Never much longer than the loop's own pace: what it watches must be true again soon after the cause
                # is gone, and one question more a second hurts nobody who is away.
                longest = max(QUICK_SECONDS, min(BACKOFF_CAP_SECONDS, self._interval_seconds))
                pause = min(longest, 0.5 * 2 ** min(self.failures, 10))
                is_told = isinstance(error, EnginehouseError) and error.code in _TOLD_ELSEWHERE
                if not is_told and self.failures & (self.failures - 1) == 0:  # the 1st, 2nd, 4th, 8th …
                    log.warning(
                        "loop.step_failed loop=%s failures=%d error=%s",
                        self.name,
                        self.failures,
                        error,
                        exc_info=self.failures == 1 and not isinstance(error, EnginehouseError),
                    )
                # A wake must not shorten the pause after a failure, or a busy source of wakes would spin.
                slept = min(pause, 1.0)
                await asyncio.sleep(slept)
                pause -= slept
            else:
                self.failures = 0
            try:
                async with asyncio.timeout(pause):
                    await self._woken.wait()
            except TimeoutError:
                pass


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
    """Loops wake each other; they are made after the objects that ask for it, so the names come first."""

    def __init__(self) -> None:
        self.loops: dict[str, Loop] = {}
        self.on_connected: list[Callable[[], None]] = []
        self.is_stopping = False

    def note_stop(self) -> None:
        """Not ready from then on."""
        self.is_stopping = True

    def stop_with(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Not ready from then on, and whoever watches is told."""

        def stop() -> None:
            self.is_stopping = True
            tell()

        return stop

    def wake_all(self) -> None:
        """What was away is back: nobody sits out a pause that was meant for its absence."""
        for loop in self.loops.values():
            loop.wake()

    def connected(self) -> None:
        """The bus is there, perhaps another one than before."""
        for call in self.on_connected:
            call()
        self.of("dispatch", "revoke")()

    def of(self, *names: str) -> Callable[[], None]:
        def wake() -> None:
            for name in names:
                if name in self.loops:
                    self.loops[name].wake()

        return wake
