"""Checksums differ after every change that matters for serving, and are the same otherwise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
from tests.frontend.serving_rows import a_model, a_node, a_replica

from enginehouse.core.ids import NodeId
from enginehouse.core.operation import Operation
from enginehouse.core.schedule import LoadInfo, Schedule, with_kept
from enginehouse.store import checksums, load_infos, models, nodes, operations, replicas, schedules
from enginehouse.store.db import Connection, Store

MODEL, OTHER = a_model(0), a_model(1)
FIRST, SECOND = NodeId(f"{0:036d}"), NodeId(f"{1:036d}")


def fill(connection: Connection) -> None:
    for number in (0, 1):
        nodes.insert(connection, a_node(number, [], 100.0), f"{number}")
        replicas.put(connection, a_replica(number * 10, MODEL), 100.0)
    models.insert(connection, MODEL, 100.0)
    schedules.put(connection, Schedule(model_name=MODEL.name, min_replicas=2), 100.0)
    load_infos.change(connection, MODEL.name, partial(with_kept, node_id=FIRST))


def keep_elsewhere(info: LoadInfo) -> LoadInfo:
    return msgspec.structs.replace(info, kept=(SECOND,))


def a_load() -> Operation:
    return Operation(
        id="o",  # type: ignore[arg-type]
        kind="load",
        name=MODEL.name,
        author="someone",
        created_at=1.0,
        targets=(),
        is_steered=True,
    )


CHANGES: dict[str, Callable[[Connection], object]] = {
    "another process": lambda c: replicas.put(c, a_replica(0, MODEL, "other"), 100.000001),
    "a replica more": lambda c: replicas.put(c, a_replica(1, OTHER), 100.0),
    "a replica less": lambda c: replicas.remove(c, FIRST, MODEL.name, 0),
    "a replica that leaves": lambda c: replicas.set_leaving(c, FIRST, MODEL.name, 0, True),
    "health": lambda c: nodes.set_health(c, FIRST, "offline", 101.0),
    "drained": lambda c: nodes.set_drained(c, FIRST, True, 101.0),
    "labels": lambda c: nodes.set_labels(c, FIRST, {"zone": "b"}, 101.0),
    "a node less": lambda c: nodes.remove(c, FIRST),
    "a report with news": lambda c: nodes.set_report(c, FIRST, a_node(0, [], 1.0).report, 101.0),
    "a changed model": lambda c: models.replace(c, msgspec.structs.replace(MODEL, config={"memory": 5})),
    "another model": lambda c: models.insert(c, OTHER, 1.0),
    "a changed schedule": lambda c: schedules.put(c, Schedule(model_name=MODEL.name, min_replicas=3), 101.0),
    "no schedule": lambda c: schedules.remove(c, MODEL.name),
    "kept elsewhere": lambda c: load_infos.change(c, MODEL.name, keep_elsewhere),
    "forgiven": lambda c: load_infos.change(c, MODEL.name, lambda known: msgspec.structs.replace(known, retry_at=9.0)),
    "a load": lambda c: operations.insert(c, a_load()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_every_change_is_noticed(store: Store, change: Callable[[Connection], object]) -> None:
    await store.transaction(fill)
    before = await store.transaction(checksums.of_serving)
    assert await store.transaction(checksums.of_serving) == before
    await store.transaction(change)
    assert await store.transaction(checksums.of_serving) != before


async def test_uses_and_signs_of_life_are_no_change(store: Store) -> None:
    await store.transaction(fill)
    before = await store.transaction(checksums.of_serving)
    await store.transaction(lambda c: replicas.note_uses(c, {a_replica(0, MODEL).nonce: 200.0}))
    await store.transaction(lambda c: nodes.set_heartbeat(c, FIRST, a_node(0, [], 1.0).capacity, 200.0))
    await store.transaction(lambda c: nodes.set_report(c, FIRST, a_node(0, [], 1.0).report, None))
    assert await store.transaction(checksums.of_serving) == before


async def test_an_earlier_time_that_is_committed_later_is_noticed(store: Store) -> None:
    await store.transaction(fill)
    await store.transaction(lambda c: nodes.set_health(c, FIRST, "unhealthy", 300.0))
    before = await store.transaction(checksums.of_serving)
    await store.transaction(lambda c: nodes.set_health(c, SECOND, "unhealthy", 299.0))
    assert await store.transaction(checksums.of_serving) != before
