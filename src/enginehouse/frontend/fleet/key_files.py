"""Compares the keys in the data directory with those that the database belongs to, and records them there.

A frontend over PostgreSQL may have a data directory of its own without any keys, so only one whose database is on this
machine, or that `up` started, is held to them. It must not start without them: what it would make in their place locks
out operators and workers.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from msgspec import Struct

from enginehouse.core.key_record import (
    KEY_FILES,
    NEW_KEYS,
    RECORD,
    TOKENS,
    missing,
    others,
    read_record,
    record_text,
    refusal,
)
from enginehouse.host import data_files
from enginehouse.host.blocking import in_thread
from enginehouse.store import cluster_values, copying
from enginehouse.store.db import Connection, Store


class HeldKeys(Struct, frozen=True, kw_only=True):
    """Which keys a frontend is held to."""

    names: Collection[str] = ()
    may_replace: bool = False  # the operator has said that the keys are new
    way_on: str = ""


def held_keys(given: str, *, is_local: bool, given_tokens: Collection[str]) -> HeldKeys:
    """`given` is what `up` says of its keys, "" without it; `given_tokens` are files that settings stand in for."""
    if given:
        return HeldKeys(names=KEY_FILES, may_replace=given == "new", way_on=NEW_KEYS)
    return HeldKeys(names=tuple(name for name in TOKENS if is_local and name not in given_tokens))


async def check_keys(store: Store, data: Path, held: HeldKeys) -> None:
    """Raise `Hopeless` if the database belongs to keys that are not here."""
    if not held.names or held.may_replace:
        return
    text, hashes = await store.transaction(
        lambda connection: (cluster_values.get(connection, RECORD), copying.valid_token_hashes(connection))
    )
    recorded, files = read_record(text), await in_thread(data_files.read_keys, data)
    gone, wrong = (
        missing(recorded, files, hashes, held.names),
        others(recorded, files) if held.way_on == NEW_KEYS else [],
    )
    if gone or wrong:
        raise refusal(str(data), gone, wrong, held.way_on)


async def record_keys(store: Store, data: Path, held: HeldKeys) -> None:
    if not held.names:
        return
    files = await in_thread(data_files.read_keys, data)
    kept = {name: content for name, content in files.items() if name in held.names}

    def work(connection: Connection) -> None:
        before = cluster_values.get(connection, RECORD)
        now = record_text(read_record(before), kept)
        if now != before and kept:
            cluster_values.put(connection, RECORD, now)

    await store.transaction(work)
