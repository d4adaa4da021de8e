"""Challenges: what a worker signs to prove, now, that it has the key it shows.

A challenge carries the store's time at which it was given out and a mark of the cluster, so that any frontend
recognises it without having kept it. It is taken once: whoever accepts a registration notes its challenge, in the same
transaction. Its time also orders registrations: an earlier one never replaces what a later one has brought.
"""

from __future__ import annotations

import hashlib
import hmac

from enginehouse.core.errors import Conflict

LIFE_SECONDS = 60.0  # between asking for it and registering with it lies one round trip
CODE = "challenge_refused"  # a worker asks for another one


def make_challenge(key: bytes, nonce: str, now: float) -> str:
    told = f"{now:.6f}/{nonce}"
    return f"{told}/{_mark(key, told)}"


def issued_at(key: bytes, challenge: str, now: float) -> float:
    """When it was given out; `Conflict` where it is not ours, or too old."""
    told, _, mark = challenge.rpartition("/")
    if not hmac.compare_digest(mark.encode(), _mark(key, told).encode()):
        raise Conflict("cannot accept this challenge: ask for one first (POST /api/node/challenge)", code=CODE)
    at = float(told.partition("/")[0])
    if now > at + LIFE_SECONDS:
        raise Conflict(f"cannot accept this challenge: it is more than {LIFE_SECONDS:.0f} s old", code=CODE)
    return at


def challenge_hash(challenge: str) -> str:
    return hashlib.sha256(challenge.encode()).hexdigest()


def _mark(key: bytes, told: str) -> str:
    return hmac.new(key, told.encode(), hashlib.sha256).hexdigest()
