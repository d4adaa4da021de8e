"""Time as product code may know it: the store's clock, the clock it was given, the time of its own loop.

A wall clock that jumps must expire, hasten and reorder nothing (G25). In the simulated code nothing reads one, and this
file keeps it so: while a run lasts, reading a clock of the machine from product code is a violation, whatever it would
have said. So is the real monotonic clock, which would make a seed another run each time. Each life of a process has a
monotonic clock that begins somewhere else, as on another machine: times of two processes cannot be compared.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import sys
import time
from collections.abc import Callable, Iterator
from random import Random
from types import BuiltinFunctionType, ModuleType
from typing import Any

from tests.sim.loop import SimLoop
from tests.sim.trace import Violation

CLOCKS = (
    *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"),
    *("localtime", "gmtime", "ctime", "strftime"),
)
# A mutant stands for product code.
WATCHED = ("enginehouse", "tests.sim.mutants", "tests.sim.lapses")
LATEST_BEGIN = 1_000_000.0  # seconds: a machine that has been up for days


class SimClock:
    """The monotonic clock of one process, and its chance."""

    def __init__(self, now: Callable[[], float], chance: Random) -> None:
        self._now = now
        self._chance = chance
        self._began = chance.uniform(0.0, LATEST_BEGIN)

    def monotonic(self) -> float:
        return self._began + self._now()

    def random(self) -> float:
        return self._chance.random()


@contextlib.contextmanager
def no_wall_clock(loop: SimLoop) -> Iterator[None]:
    """While this lasts, product code that reads a clock of the machine ends the run."""

    def guarded(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith(WATCHED):
                loop.fail(Violation("G25", f"{caller} reads the clock of the machine: {name}"))
            return real(*arguments)

        return read

    class Date(datetime.datetime):
        """Renders times; knows none."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            loop.fail(Violation("G25", "product code reads the clock of the machine: datetime"))
            return super().now(tz)

        utcnow = today = now

    with contextlib.ExitStack() as stack:
        for name in CLOCKS:
            real = getattr(time, name)
            stack.callback(setattr, time, name, real)
            setattr(time, name, guarded(name, real))
        for module, name in _dates():
            stack.callback(setattr, module, name, datetime.datetime)
            setattr(module, name, Date)
        yield


@functools.cache
def _dates() -> tuple[tuple[ModuleType, str], ...]:
    """Where product code, loaded by now, has the class under a name of its own. None may have a clock so."""
    clocks = {getattr(time, name): name for name in CLOCKS}
    found: list[tuple[ModuleType, str]] = []
    for module in [one for name, one in sys.modules.items() if name.startswith("enginehouse")]:
        for name, value in vars(module).items():
            if value is datetime.datetime:
                found.append((module, name))
            is_clock = isinstance(value, BuiltinFunctionType) and value in clocks
            assert not is_clock, f"{module.__name__} has taken {name} out of its module, where nobody watches it"
    return tuple(found)
