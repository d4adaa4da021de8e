"""The key that marks the cluster's challenges, and the challenges that were taken: each counts once."""

from __future__ import annotations

from sqlalchemy import bindparam, delete

from enginehouse.store import cluster_values
from enginehouse.store.db import Connection
from enginehouse.store.rows import insert_unless_there
from enginehouse.store.schema import used_challenges

_PRUNE = delete(used_challenges).where(used_challenges.c.until < bindparam("at"))


def key(connection: Connection, new: bytes) -> bytes:
    """The cluster's key, which is `new` where there was none."""
    return bytes.fromhex(cluster_values.get_or_put(connection, "challenge-key", new.hex()))


def use(connection: Connection, challenge_hash: str, now: float, until: float) -> bool:
    """Whether this is the first time."""
    connection.execute(_PRUNE, {"at": now})
    return insert_unless_there(connection, used_challenges, {"hash": challenge_hash, "until": until})
