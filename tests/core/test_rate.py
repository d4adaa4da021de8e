"""Rates per minute: never more than the limit in any minute, and the wait that is told is enough."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.rate import STEP_SECONDS, WINDOW_SECONDS, ends_at, oldest_step, remainder, step_of

moments = st.lists(st.floats(0, 600, allow_nan=False, width=32), min_size=1, max_size=60).map(sorted)


@given(moments, st.integers(1, 8))
def test_no_minute_contains_more_than_the_limit(arrivals: list[float], limit: int) -> None:
    counts: Counter[int] = Counter()
    admitted: list[float] = []
    for now in arrivals:
        if remainder(counts, limit, now).left:
            counts[step_of(now)] += 1
            admitted.append(now)
    for begin in admitted:
        assert sum(begin <= one < begin + WINDOW_SECONDS for one in admitted) <= limit


@given(moments, st.integers(1, 8))
def test_after_the_wait_that_was_told_one_more_fits_and_not_a_moment_before(arrivals: list[float], limit: int) -> None:
    counts = Counter(step_of(one) for one in arrivals)
    now = arrivals[-1]
    found = remainder(counts, limit, now)
    if found.left:
        assert found.wait_seconds == 0
    else:
        assert 0 < found.wait_seconds <= WINDOW_SECONDS + STEP_SECONDS + 0.01
        assert remainder(counts, limit, now + found.wait_seconds + 1e-4).left
        assert found.wait_seconds < 0.01 or not remainder(counts, limit, now + found.wait_seconds - 0.005).left


@given(moments, st.integers(1, 8))
def test_after_the_reset_nothing_is_used(arrivals: list[float], limit: int) -> None:
    counts = Counter(step_of(one) for one in arrivals)
    reset = remainder(counts, limit, arrivals[-1]).reset_seconds
    assert remainder(counts, limit, arrivals[-1] + reset + 1e-4).left == limit


def test_what_is_left_is_the_limit_less_what_the_last_minute_has() -> None:
    now = 1000.0
    counts = {step_of(now): 3, oldest_step(now): 2, oldest_step(now) - 1: 50}
    found = remainder(counts, 10, now)
    assert (found.limit, found.left) == (10, 5)
    used_up = remainder(counts, 4, now)
    assert (used_up.left, used_up.wait_seconds) == (0, ends_at(oldest_step(now)) - now)
