"""Challenges: a worker signs one to prove that it holds the key it presents.

A challenge contains the store's time of issue and a MAC of the cluster, so any frontend recognises it without storing
it. It is valid once: the transaction that accepts a registration records its challenge. Its time also orders
registrations, so an earlier one never replaces a later one.
"""

from __future__ import annotations

import hashlib
import hmac

from enginehouse.core.errors import Conflict

LIFE_SECONDS = 60.0  # only one round trip lies between challenge and registration
CODE = "challenge_refused"  # a worker requests a new one


def make_challenge(key: bytes, nonce: str, now: float) -> str:
    content = f"{now:.6f}/{nonce}"
    return f"{content}/{_mac(key, content)}"


def issued_at(key: bytes, challenge: str, now: float) -> float:
    """Return when the challenge was issued; raise `Conflict` if it is not ours or has expired."""
    content, _, mac = challenge.rpartition("/")
    if not hmac.compare_digest(mac.encode(), _mac(key, content).encode()):
        raise Conflict(
            "cannot accept this challenge: this cluster did not issue it. Request one with POST /api/node/challenge",
            code=CODE,
        )
    at = float(content.partition("/")[0])
    if now > at + LIFE_SECONDS:
        raise Conflict(
            f"cannot accept this challenge: it is more than {LIFE_SECONDS:.0f} s old. Request a new one", code=CODE
        )
    return at


def challenge_hash(challenge: str) -> str:
    return hashlib.sha256(challenge.encode()).hexdigest()


def _mac(key: bytes, content: str) -> str:
    return hmac.new(key, content.encode(), hashlib.sha256).hexdigest()
