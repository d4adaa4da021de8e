"""Ed25519 keys and signatures."""

from __future__ import annotations

import pytest

from enginehouse.host import signing


def test_a_signature_is_verified_with_the_public_key() -> None:
    key = signing.make_key()
    signature = signing.sign(key, b"message")
    assert signing.verify(signing.public_key_of(key), b"message", signature)


def test_a_key_is_restored_from_its_seed() -> None:
    key = signing.make_key()
    restored = signing.load_key(signing.seed_of(key))
    assert signing.public_key_of(restored) == signing.public_key_of(key)
    assert signing.sign(restored, b"message") == signing.sign(key, b"message")


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError):
        signing.load_key(b"short")


def test_another_message_key_or_signature_is_not_verified() -> None:
    key, other = signing.make_key(), signing.make_key()
    public_key, signature = signing.public_key_of(key), signing.sign(key, b"message")
    assert not signing.verify(public_key, b"another", signature)
    assert not signing.verify(signing.public_key_of(other), b"message", signature)
    assert not signing.verify(public_key, b"message", signing.sign(other, b"message"))


@pytest.mark.parametrize("malformed", ["", "zz", "00", "00" * 31, "é" * 64])
def test_malformed_input_is_not_verified(malformed: str) -> None:
    key = signing.make_key()
    assert not signing.verify(malformed, b"message", signing.sign(key, b"message"))
    assert not signing.verify(signing.public_key_of(key), b"message", malformed)
