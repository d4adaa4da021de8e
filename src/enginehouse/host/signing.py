"""Ed25519 signatures: make a key, load one from its seed, sign, verify.

Public keys and signatures are hexadecimal text, as they are sent and stored; seeds
are bytes, and the caller keeps them secret. `verify` answers False for malformed input and never raises.
"""

from __future__ import annotations

from nacl.exceptions import CryptoError
from nacl.signing import SigningKey, VerifyKey

__all__ = ["SigningKey", "load_key", "make_key", "public_key_of", "seed_of", "sign", "verify"]


def make_key() -> SigningKey:
    """Return a new random key."""
    return SigningKey.generate()


def load_key(seed: bytes) -> SigningKey:
    """Return the key of a 32-byte seed. Raises `ValueError` for a seed of another length."""
    return SigningKey(seed)


def seed_of(key: SigningKey) -> bytes:
    return key.encode()


def public_key_of(key: SigningKey) -> str:
    return key.verify_key.encode().hex()


def sign(key: SigningKey, message: bytes) -> str:
    """Return the detached signature of `message`."""
    return key.sign(message).signature.hex()


def verify(public_key: str, message: bytes, signature: str) -> bool:
    """Return whether `signature` is that of `message` by the owner of `public_key`."""
    try:
        VerifyKey(bytes.fromhex(public_key)).verify(message, bytes.fromhex(signature))
    except (CryptoError, ValueError, TypeError):
        return False
    return True
