"""Secrets that are stored sealed: text that only the holder of another secret can read.

The key is derived from a secret of at least 32 random characters, which cannot be guessed, so one hash is enough.
`unseal` answers None for text that was sealed with another secret or changed, and never raises.
"""

from __future__ import annotations

from hashlib import sha256

from nacl.encoding import URLSafeBase64Encoder
from nacl.exceptions import CryptoError
from nacl.secret import SecretBox


def seal(secret: str, purpose: str, text: str) -> str:
    return _box(secret, purpose).encrypt(text.encode(), encoder=URLSafeBase64Encoder).decode()


def unseal(secret: str, purpose: str, sealed: str) -> str | None:
    try:
        return _box(secret, purpose).decrypt(sealed.encode(), encoder=URLSafeBase64Encoder).decode()
    except (CryptoError, ValueError, TypeError):
        return None


def _box(secret: str, purpose: str) -> SecretBox:
    return SecretBox(sha256(f"{purpose}\n{secret}".encode()).digest())
