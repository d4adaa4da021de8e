"""A failing run about serving made smaller: faults, wishes, callers and rates are left out while the same fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from msgspec.structs import replace
from tests.sim.run import Result
from tests.sim.serving.options import ServingOptions
from tests.sim.serving.run import run_serving
from tests.sim.shrink import RATES

MAX_RUNS = 150
T = TypeVar("T")


def shrink_serving(
    options: ServingOptions, guarantee: str, tell: Callable[[str], None]
) -> tuple[ServingOptions, Result]:
    """The smallest options found on which `guarantee` fails, and how it does."""
    best, result = options, run_serving(options)
    runs, shrunk = 1, True
    while shrunk and runs < MAX_RUNS:
        shrunk = False
        for smaller in _smaller(best):
            runs += 1
            found = run_serving(smaller)
            if found.guarantee == guarantee:
                best, result, shrunk = smaller, found, True
                tell(f"{len(best.wishes)} wishes, {len(best.askings)} callers, {len(best.weather.faults)} faults")
                break
            if runs >= MAX_RUNS:
                break
    return best, result


def _smaller(options: ServingOptions) -> Iterator[ServingOptions]:
    weather = options.weather
    for faults in _without_one(weather.faults):
        yield replace(options, weather=replace(weather, faults=faults))
    for askings in ((), *_without_one(options.askings)):
        if askings != options.askings:
            yield replace(options, askings=askings)
    for wishes in _without_one(options.wishes):
        yield replace(options, wishes=wishes)
    for rate in RATES:
        if getattr(weather, rate):
            yield replace(options, weather=replace(weather, **{rate: 0.0}))
    if weather.frontends > 1:
        yield replace(options, weather=replace(weather, frontends=weather.frontends - 1))


def _without_one(some: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    for at in range(len(some)):
        yield some[:at] + some[at + 1 :]
