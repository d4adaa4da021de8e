"""NATS keys: an Ed25519 seed or public key as text, with its role in front and a checksum behind.

The format is small and fixed. The library for it, `nkeys`, is published as source only: every machine that joins would
have to build it, with tools that no hash in our lock covers.
"""

from __future__ import annotations

import base64
import binascii

from nacl.signing import SigningKey

OPERATOR, ACCOUNT, USER = 14 << 3, 0, 20 << 3  # "O", "A" and "U" in base32
_SEED = 18 << 3  # "S"
_SEED_BYTES = 32


def encode_seed(secret: bytes, role: int) -> str:
    """The role takes the five bits after those of the "S"; the last three of the second byte are unused."""
    return _text(bytes((_SEED | role >> 5, (role & 31) << 3)) + secret)


def decode_seed(seed: str) -> tuple[int, bytes]:
    """The role and the secret; raises ValueError if this is no seed, or a damaged one."""
    raw = base64.b32decode(seed + "=" * (-len(seed) % 8))
    content, checksum = raw[:-2], raw[-2:]
    if len(content) != 2 + _SEED_BYTES or content[0] & 248 != _SEED or _checksum(content) != checksum:
        raise ValueError("this is not the seed of a NATS key")
    return (content[0] & 7) << 5 | (content[1] & 248) >> 3, content[2:]


class KeyPair:
    """The keys of a seed."""

    def __init__(self, seed: str) -> None:
        role, secret = decode_seed(seed)
        self._key = SigningKey(secret)
        self.public = _text(bytes((role,)) + bytes(self._key.verify_key))

    def sign(self, content: bytes) -> bytes:
        return self._key.sign(content).signature


def _text(content: bytes) -> str:
    return base64.b32encode(content + _checksum(content)).rstrip(b"=").decode()


def _checksum(content: bytes) -> bytes:
    return binascii.crc_hqx(content, 0).to_bytes(2, "little")
