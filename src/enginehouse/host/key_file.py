"""The Ed25519 key of this machine in a file: what a node is known by. The seed never leaves the machine."""

from __future__ import annotations

import binascii
from pathlib import Path

from enginehouse.core.errors import Invalid
from enginehouse.host import disk, signing


def load_key_file(path: Path) -> signing.SigningKey:
    """Load the key in `path`; a missing one is created with mode 0600."""
    try:
        return signing.load_key(binascii.unhexlify(path.read_text().strip()))
    except FileNotFoundError:
        key = signing.make_key()
        disk.write_atomic(path, signing.seed_of(key).hex().encode() + b"\n", mode=0o600)
        return key
    except ValueError as error:
        raise Invalid(
            f"cannot read the node key {path}: it is damaged; restore a copy, or remove the file to join as a new node",
            code="invalid_name",
        ) from error
