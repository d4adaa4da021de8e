"""NATS keys, held against the library of NATS itself."""

from __future__ import annotations

import secrets

import nkeys
import pytest

from enginehouse.bus import nkey
from enginehouse.bus.nkey import KeyPair

ROLES = {
    nkey.OPERATOR: nkeys.PREFIX_BYTE_OPERATOR,
    nkey.ACCOUNT: nkeys.PREFIX_BYTE_ACCOUNT,
    nkey.USER: nkeys.PREFIX_BYTE_USER,
}


@pytest.mark.parametrize("role", ROLES)
def test_a_key_is_written_read_and_used_as_by_the_library_of_nats(role: int) -> None:
    secret = secrets.token_bytes(32)
    seed = nkey.encode_seed(secret, role)
    theirs = nkeys.from_seed(seed.encode())
    assert seed.encode() == nkeys.encode_seed(secret, ROLES[role])
    assert nkey.decode_seed(seed) == (role, secret)
    assert KeyPair(seed).public == theirs.public_key.decode()
    assert KeyPair(seed).sign(b"x") == theirs.sign(b"x")


def test_what_is_no_seed_or_a_damaged_one_is_refused() -> None:
    seed = nkey.encode_seed(secrets.token_bytes(32), nkey.USER)
    other = "A" if seed[20] != "A" else "B"
    damaged = (seed[:20] + other + seed[21:], seed[:-1], seed + "A", seed[8:], "", "é", seed.lower())
    for text in (*damaged, KeyPair(seed).public):
        with pytest.raises(ValueError):  # base64 has words of its own
            nkey.decode_seed(text)
