"""The key that signs the cluster's challenges, and the challenges that were used.

Each challenge is valid once: the insert of its hash decides, in the transaction that accepts the registration. Expired
rows are deleted as often as they expire, so the table stays small.
"""

from __future__ import annotations

from sqlalchemy import bindparam, delete

from enginehouse.store import cluster_values
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there
from enginehouse.store.schema import used_challenges

_PRUNE = delete(used_challenges).where(used_challenges.c.until < bindparam("at"))


def key(connection: Connection, new: bytes) -> bytes:
    """Return the cluster's key; store `new` as the key if there is none."""
    return bytes.fromhex(cluster_values.get_or_put(connection, "challenge-key", new.hex()))


def use(connection: Connection, challenge_hash: str, until: float) -> bool:
    """Mark the challenge as used; False if it was used before."""
    return insert_unless_there(connection, used_challenges, {"hash": challenge_hash, "until": until})


def prune(connection: Connection, now: float) -> None:
    """Delete those that are refused for their age anyway."""
    connection.execute(_PRUNE, {"at": now})
