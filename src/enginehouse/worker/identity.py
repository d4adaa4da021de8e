"""The identity of this worker: an Ed25519 key, created at the first start and kept in the data directory.

The seed never leaves the machine. The public key is the node's identity. Every registration is signed with the key, so
that the join token alone is not enough to impersonate a node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from enginehouse.core.node import registration_message
from enginehouse.core.node_api import RegisterReply, RegisterRequest
from enginehouse.host import disk, signing
from enginehouse.host.key_file import load_key_file


class IdentityFiles:
    """The node's key, the record of its ID, name and servers, and why it is not joined, in the data directory."""

    def __init__(self, key: Path, node: Path, waiting: Path, frontends: Sequence[str] = ()) -> None:
        self._key = key
        self._node = node
        self._waiting = waiting
        self._frontends = list(frontends)

    def load_identity(self) -> Identity:
        return load_identity(self._key)

    def write_node(self, node: RegisterReply) -> None:
        record = {"id": node.id, "name": node.name, "frontends": self._frontends, "nats_url": node.nats_url}
        disk.write_atomic(self._node, msgspec.json.encode(record))
        self._waiting.unlink(missing_ok=True)

    def was_accepted(self) -> bool:
        return self._node.exists()

    def write_waiting(self, reason: str) -> None:
        if reason:
            about = {"reason": reason, "since": round(time.time(), 3)}
            disk.write_atomic(self._waiting, msgspec.json.encode(about))
        else:
            self._waiting.unlink(missing_ok=True)


class Identity:
    def __init__(self, key: signing.SigningKey) -> None:
        self._key = key
        self.public_key = signing.public_key_of(key)

    def signed(self, request: RegisterRequest) -> RegisterRequest:
        """Add the public key and a signature over the claims of the registration."""
        addresses = (request.address, request.http_address)
        message = registration_message(request.name, self.public_key, addresses, request.challenge)
        signature = signing.sign(self._key, message)
        return msgspec.structs.replace(request, public_key=self.public_key, signature=signature)


def load_identity(path: Path) -> Identity:
    return Identity(load_key_file(path))
