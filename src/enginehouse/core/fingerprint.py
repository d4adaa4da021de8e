"""The fingerprint of a node's key: what one person reads aloud and another one compares. Pure.

The first 64 bits of the public key, as four groups of four digits. Nobody can make another key with the same ones in
reasonable time. There is one form everywhere; what people type may leave out the dashes, or be the whole key.
"""

from __future__ import annotations

import re

DIGITS = 16
_GROUP = 4
_HEX = re.compile(r"[0-9a-f]+")


def fingerprint_of(public_key: str) -> str:
    """Such as `3f2a-91bc-07de-55a1`; "" without a key."""
    digits = public_key[:DIGITS]
    return "-".join(digits[start : start + _GROUP] for start in range(0, len(digits), _GROUP))


def is_fingerprint_of(text: str, public_key: str) -> bool:
    """Whether `text` is the fingerprint of this key or the whole key. A shorter beginning is not enough."""
    digits = re.sub(r"[\s:.-]", "", text).lower()
    return len(digits) >= DIGITS and bool(_HEX.fullmatch(digits)) and public_key.startswith(digits)
