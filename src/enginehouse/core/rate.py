"""Rates per minute from counts in steps of five seconds: whether one more fits, and if not, when.

Pure: counts and time are arguments. A step counts until its last moment is a minute ago, so no minute ever contains
more than the limit; after a burst the wait is up to a step longer than a minute. Steps are numbered by the store's
clock, so the steps of all frontends are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

STEP_SECONDS = 5.0  # a minute is 13 rows per token, and the longest wait is 65 s
WINDOW_SECONDS = 60.0
_STEPS = int(WINDOW_SECONDS / STEP_SECONDS)


class Remainder(Struct, frozen=True):
    """How a limit stands. `wait_seconds` is 0 if one more fits; `reset_seconds` is when the limit is unused again."""

    limit: int
    left: int
    wait_seconds: float
    reset_seconds: float


def step_of(now: float) -> int:
    return int(now // STEP_SECONDS)


def oldest_step(now: float) -> int:
    """The oldest step that still counts."""
    return step_of(now) - _STEPS


def ends_at(step: int) -> float:
    """When a step no longer counts."""
    return (step + 1) * STEP_SECONDS + WINDOW_SECONDS


def remainder(counts: Mapping[int, int], limit: int, now: float) -> Remainder:
    """How a limit stands with these counts by step."""
    oldest = oldest_step(now)
    live = sorted((step, count) for step, count in counts.items() if step >= oldest and count)
    used = sum(count for _, count in live)
    left = max(0, limit - used)
    reset = ends_at(live[-1][0]) - now if live else 0.0
    if left:
        return Remainder(limit, left, 0.0, reset)
    for step, count in live:
        used -= count
        if used < limit:
            return Remainder(limit, 0, max(0.001, ends_at(step) - now), reset)
    return Remainder(limit, 0, WINDOW_SECONDS, WINDOW_SECONDS)  # a limit of 0 or less, which nothing fits
