"""Deliberate faults of what lets loops rest: a glance that does not see what is there, for as long as it counts."""

from __future__ import annotations

from random import Random

from tests.sim.lapses import QUICK, request
from tests.sim.mutation import Mutant, Patch
from tests.sim.options import Fault, SimRequest

from enginehouse.frontend.quiet_loops import QuietLoops
from enginehouse.frontend.watching.hints import ChangeHints


def _sees_no_change() -> list[Patch]:
    """No hint arrives either: each of the two finds what the other one missed."""
    return [(QuietLoops, "_has_told", lambda self: True), (ChangeHints, "_take", lambda self, message: None)]


def _sees_nothing_due() -> list[Patch]:
    return [(QuietLoops, "_has_nothing_due", lambda self: True)]


def _sees_nothing_running() -> list[Patch]:
    return [(QuietLoops, "_has_none", lambda self, has: True)]


def _two_installs(chance: Random) -> tuple[SimRequest, ...]:
    return (request(0, 1.0, "install", "one@alpha"), request(1, chance.uniform(1.0, 2.0), "install", "one@beta"))


RESTING = (
    Mutant(
        "nobody notices what another frontend has changed",
        ("G9",),
        _sees_no_change,
        {"late_rate": 0.3, "reorder_rate": 0.5, "duplicate_rate": 0.3},
    ),
    Mutant("nobody notices that something is due", ("G5", "end"), _sees_nothing_due, {"failing_rate": 0.5}),
    Mutant(
        "nobody takes over what a dead frontend has begun",
        ("end", "G9"),
        _sees_nothing_running,
        {**QUICK, "frontends": 2, "install_seconds": 4.0, "drop_rate": 0.5},
        _two_installs,
        (Fault(at=3.0, seconds=1.0, kind="kill_frontend", target=0),),
    ),
)
