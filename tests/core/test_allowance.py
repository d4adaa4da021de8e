"""What a token may use."""

from __future__ import annotations

import pytest

from enginehouse.core.allowance import MAX_PATTERNS, MAX_PER_MINUTE, Allowance, make_allowance
from enginehouse.core.errors import Invalid


@pytest.mark.parametrize(
    ("patterns", "model", "is_admitted"),
    [
        ((), "anything", True),
        (("tiny",), "tiny", True),
        (("tiny",), "tiny-chat", False),
        (("tiny",), "Tiny", False),
        (("tiny-*",), "tiny-chat", True),
        (("org/*",), "org/a/b", True),
        (("org/*",), "other/a", False),
        (("a", "b?"), "b1", True),
        (("a", "b?"), "b", False),
        (("[ab]1",), "a1", True),
        (("x.y",), "xzy", False),
    ],
)
def test_models_are_allowed_by_name_or_pattern(patterns: tuple[str, ...], model: str, is_admitted: bool) -> None:
    assert Allowance(models=patterns).admits(model) is is_admitted


def test_nothing_limited_is_no_allowance() -> None:
    assert make_allowance((), 0, 0) is None
    assert make_allowance(("a", "a"), 0, 0) == Allowance(models=("a",))
    only_models = make_allowance(("a",), 0, 0)
    assert only_models is not None
    assert not only_models.is_counted
    for limits in ((1, 0), (0, 1)):
        made = make_allowance((), *limits)
        assert made is not None
        assert made.is_counted


@pytest.mark.parametrize(
    ("models", "requests", "tokens", "param"),
    [
        (("",), 0, 0, "model"),
        (("a" * 256,), 0, 0, "model"),
        (tuple(f"m{number}" for number in range(MAX_PATTERNS + 1)), 0, 0, "models"),
        ((), -1, 0, "requests_per_minute"),
        ((), 0, MAX_PER_MINUTE + 1, "tokens_per_minute"),
    ],
)
def test_limits_that_mean_nothing_are_refused(models: tuple[str, ...], requests: int, tokens: int, param: str) -> None:
    with pytest.raises(Invalid) as caught:
        make_allowance(models, requests, tokens)
    assert caught.value.param == param
    assert caught.value.message.startswith("cannot ")
