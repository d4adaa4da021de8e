"""Who this worker is: an Ed25519 key made at the first start and kept in the data directory.

The seed never leaves the machine. The public key is the node's identity; it is proven by signing the registration,
so that whoever knows only the join token cannot pass for it.
"""

from __future__ import annotations

import binascii
from pathlib import Path

import msgspec
from nacl.signing import SigningKey

from enginehouse.core.errors import Invalid
from enginehouse.core.node import registration_message
from enginehouse.core.node_api import RegisterRequest
from enginehouse.host import disk


class Identity:
    def __init__(self, key: SigningKey) -> None:
        self._key = key
        self.public_key = key.verify_key.encode().hex()

    def signed(self, request: RegisterRequest) -> RegisterRequest:
        """With this key, and its signature over what the registration claims."""
        addresses = (request.address, request.http_address)
        message = registration_message(request.name, self.public_key, addresses, request.challenge)
        signature = self._key.sign(message).signature.hex()
        return msgspec.structs.replace(request, public_key=self.public_key, signature=signature)


def load_identity(path: Path) -> Identity:
    """The key in `path`, made there (mode 0600) when there is none."""
    try:
        seed = binascii.unhexlify(path.read_text().strip())
        return Identity(SigningKey(seed))
    except FileNotFoundError:
        key = SigningKey.generate()
        disk.write_atomic(path, key.encode().hex().encode() + b"\n", mode=0o600)
        return Identity(key)
    except ValueError as error:
        raise Invalid(
            f"cannot read the node key {path}: it is damaged; put back a copy, or remove it to join as a new node",
            code="invalid_name",
        ) from error
