"""Sealed text is read with the secret that it was sealed with, and with no other."""

from __future__ import annotations

import pytest

from enginehouse.host.sealing import seal, unseal

SECRET = "eh-admin-0123456789abcdef0123456789abcdef"


def test_text_is_read_with_its_secret_and_differs_every_time() -> None:
    first, second = seal(SECRET, "tests", "täxt"), seal(SECRET, "tests", "täxt")
    assert first != second
    assert unseal(SECRET, "tests", first) == unseal(SECRET, "tests", second) == "täxt"
    assert "täxt" not in first


@pytest.mark.parametrize(
    ("secret", "purpose", "change"),
    [(SECRET + "x", "tests", str), (SECRET, "others", str), (SECRET, "tests", lambda text: "A" + text[1:])],
)
def test_another_secret_purpose_or_text_reads_nothing(secret: str, purpose: str, change: object) -> None:
    assert callable(change)
    assert unseal(secret, purpose, change(seal(SECRET, "tests", "text") + "")) is None


@pytest.mark.parametrize("text", ["", "no", "ä", "AAAA" * 20])
def test_what_was_never_sealed_is_no_error(text: str) -> None:
    assert unseal(SECRET, "tests", text) is None
