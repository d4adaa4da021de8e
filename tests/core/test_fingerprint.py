"""Fingerprints: one form to be read aloud, and what people type instead."""

from __future__ import annotations

import pytest

from enginehouse.core.fingerprint import fingerprint_of, is_fingerprint_of
from enginehouse.core.version import is_older

KEY = "3f2a91bc07de55a1" + "0" * 48


def test_it_is_four_groups_of_four_digits() -> None:
    assert fingerprint_of(KEY) == "3f2a-91bc-07de-55a1"
    assert fingerprint_of("") == ""


@pytest.mark.parametrize("text", [fingerprint_of(KEY), "3F2A 91BC 07DE 55A1", "3f2a91bc07de55a1", KEY, KEY[:40]])
def test_people_may_type_it_otherwise(text: str) -> None:
    assert is_fingerprint_of(text, KEY)


@pytest.mark.parametrize("text", ["", "3f2a", "3f2a-91bc-07de-55a", "3f2a-91bc-07de-55a2", "g" * 16, KEY + "0"])
def test_a_part_of_it_or_another_one_is_not_enough(text: str) -> None:
    assert not is_fingerprint_of(text, KEY)
    assert not is_fingerprint_of(text, "")


@pytest.mark.parametrize(
    ("version", "than", "expected"),
    [
        ("0.1.0", "0.2.0", True),
        ("0.9", "0.10", True),
        ("0.2.0", "0.2.0", False),
        ("0.10", "0.9", False),
        ("", "0.2.0", False),
        ("v3.4", "4.0", False),
        ("1.0.dev1", "1.0.1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, than: str, expected: bool) -> None:
    assert is_older(version, than) is expected
