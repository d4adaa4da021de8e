"""A failing run made smaller: faults, requests and rates are left out one after another while the same guarantee fails.

Greedy and bounded; what is left is not the smallest, but small enough to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from tests.sim.options import Options
from tests.sim.run import Result, run

MAX_RUNS = 300
RATES = (
    "shuffle",
    "drop_rate",
    "duplicate_rate",
    "late_rate",
    "reorder_rate",
    "late_link_rate",
    "collision_rate",
    "unknown_rate",
    "failing_rate",
    "hopeless_rate",
    "stalling_rate",
    "full_disk_rate",
    "disk_error_rate",
    "read_error_rate",
)


def shrink(options: Options, guarantee: str, tell: Callable[[str], None]) -> tuple[Options, Result]:
    """The smallest options found on which `guarantee` fails, and how it does."""
    best, result = options, run(options)
    runs, shrunk = 1, True
    while shrunk and runs < MAX_RUNS:
        shrunk = False
        for smaller in _smaller(best):
            runs += 1
            found = run(smaller)
            if found.guarantee == guarantee:
                best, result, shrunk = smaller, found, True
                tell(f"{len(best.requests)} requests, {len(best.faults)} faults, {found.steps} steps")
                break
            if runs >= MAX_RUNS:
                break
    return best, result


def _smaller(options: Options) -> Iterator[Options]:
    replace = msgspec.structs.replace
    for count in (len(options.faults), 1):
        for at in range(0, len(options.faults), max(count, 1)):
            yield replace(options, faults=options.faults[:at] + options.faults[at + count :])
    for at in range(len(options.requests)):
        yield replace(options, requests=options.requests[:at] + options.requests[at + 1 :])
    for rate in RATES:
        if getattr(options, rate):
            yield replace(options, **{rate: 0.0})
    if options.old_nodes:
        yield replace(options, old_nodes=0)
    if options.nodes > 1:
        yield replace(options, nodes=options.nodes - 1)
    if options.frontends > 1:
        yield replace(options, frontends=options.frontends - 1)
