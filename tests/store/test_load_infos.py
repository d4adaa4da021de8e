"""What is known of a model: frontends that change it at the same moment do not undo each other."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from enginehouse.core.ids import NodeId
from enginehouse.core.schedule import LoadInfo, with_kept
from enginehouse.store import load_infos
from enginehouse.store.db import Connection, Store


def _kept_and_counted(known: LoadInfo, *, number: int) -> LoadInfo:
    return with_kept(msgspec.structs.replace(known, failures=known.failures + 1), NodeId(f"n{number}"))


def _change(connection: Connection, *, number: int) -> None:
    load_infos.change(connection, "m", partial(_kept_and_counted, number=number))


async def test_changes_of_many_writers_are_all_kept(store: Store) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(12):
            group.create_task(store.transaction(partial(_change, number=number)))
    found = await store.transaction(lambda c: load_infos.get(c, "m"))
    assert (found.failures, len(found.kept)) == (12, 12)
