"""Signs of life: what a migration keeps, what silence is, and what is never overwritten by something older."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import text
from tests.store.test_store import add_node, node

import enginehouse.store
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.report import Report
from enginehouse.store import liveness, nodes
from enginehouse.store.db import Connection, Store
from enginehouse.store.limits import StoreLimits
from enginehouse.store.liveness import LivenessChange


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(enginehouse.store.__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    return config


async def test_the_migration_carries_over_when_nodes_were_heard_and_back(database_url: str) -> None:
    store = await Store.open(database_url, StoreLimits(answer_seconds=60.0))
    one = node("first", last_heartbeat=5.0)
    await add_node(store, one)
    later = LivenessChange(node_id=one.id, capacity=Capacity(cores=9))
    await store.transaction(lambda connection: liveness.write(connection, [later], 7.0))
    await store.transaction(lambda connection: command.downgrade(_config(connection), "0017"))

    def old(connection: Connection) -> tuple[float, str]:
        row = connection.execute(text("select last_heartbeat, capacity from nodes")).one()
        return row[0], row[1]

    assert await store.transaction(old) == (7.0, '{"cores":9}')
    await store.transaction(lambda connection: command.upgrade(_config(connection), "head"))
    found = await store.transaction(lambda connection: nodes.get(connection, one.id))
    assert found is not None
    assert (found.last_heartbeat, found.capacity.cores) == (7.0, 9)
    await store.transaction(lambda connection: nodes.remove(connection, one.id))
    left = await store.transaction(lambda connection: liveness.some(connection, [one.id]))
    assert left == {}
    store.close()


async def test_a_confirmation_never_replaces_a_newer_one_or_that_of_another_report(store: Store) -> None:
    one = node("first", report=Report(boot_id="b", sequence=5, mark=5.0), report_digest="d")
    await add_node(store, one)

    async def confirmed(digest: str, sequence: int) -> tuple[int, float]:
        change = LivenessChange(
            node_id=one.id, capacity=Capacity(), report_digest=digest, sequence=sequence, mark=float(sequence)
        )
        await store.transaction(lambda connection: liveness.write(connection, [change], 9.0))
        found = await store.transaction(lambda connection: nodes.get(connection, one.id))
        assert found is not None
        return found.report.sequence, found.report.mark

    assert await confirmed("d", 7) == (7, 7.0)
    assert await confirmed("d", 6) == (7, 7.0)
    assert await confirmed("other", 8) == (7, 7.0)
    assert await confirmed("d", 7) == (7, 7.0)


async def test_only_nodes_that_may_be_worse_than_stored_are_found(store: Store) -> None:
    fleet: dict[str, dict[str, object]] = {
        "alive": {"last_heartbeat": 90.0},
        "late": {"last_heartbeat": 60.0},
        "later": {"last_heartbeat": 60.0, "health": "unhealthy"},
        "lost": {"last_heartbeat": 30.0, "health": "unhealthy"},
        "known": {"last_heartbeat": 30.0, "health": "offline"},
        "pending": {"last_heartbeat": 30.0, "approved": False},
    }
    for name, fields in fleet.items():
        await add_node(store, node(name, **fields))
    found = await store.transaction(lambda connection: liveness.silent(connection, 70.0, 40.0))
    assert {(one.id, one.heard_at) for one in found} == {("id-of-late", 60.0), ("id-of-lost", 30.0)}
    assert await store.transaction(liveness.count_approved) == 5


async def test_the_bus_is_away_if_all_that_were_heard_say_so(store: Store) -> None:
    async def is_away() -> bool:
        return await store.transaction(lambda connection: liveness.every_bus_is_away(connection, 50.0))

    assert not await is_away(), "nobody was heard"
    await add_node(store, node("silent", last_heartbeat=10.0))
    await add_node(store, node("foreign", last_heartbeat=90.0, public_key=""))
    await add_node(store, node("away", last_heartbeat=90.0, bus_away=True))
    assert await is_away()
    await add_node(store, node("here", last_heartbeat=90.0))
    assert not await is_away()


async def test_what_is_heard_of_many_is_stored_at_once(store: Store) -> None:
    ids = [f"n{number}" for number in range(30)]
    for name in ids:
        await add_node(store, node(name))
    changes = [LivenessChange(node_id=NodeId(f"id-of-{name}"), capacity=Capacity(cores=3)) for name in ids]
    await store.transaction(lambda connection: liveness.write(connection, changes, 8.0))
    found = await store.transaction(nodes.every)
    assert {(one.last_heartbeat, one.capacity.cores) for one in found} == {(8.0, 3)}


async def test_the_last_signs_of_all_approved_nodes_are_read_at_once_and_one_without_any_is_unknown(
    store: Store,
) -> None:
    heard, unheard = node("heard", last_heartbeat=5.0), node("unheard")
    for one in (heard, unheard, node("pending", approved=False)):
        await add_node(store, one)
    change = LivenessChange(node_id=heard.id, capacity=Capacity(cores=4, used_cores=1.5))
    await store.transaction(lambda connection: liveness.write(connection, [change], 7.0))
    await store.transaction(
        lambda connection: connection.execute(
            text("delete from node_liveness where node_id = :id"), {"id": str(unheard.id)}
        )
    )
    found = {row.id: row for row in await store.read(liveness.heard)}
    assert found.keys() == {heard.id, unheard.id}
    assert (found[heard.id].heard_at, found[heard.id].capacity.used_cores) == (7.0, 1.5)
    assert (found[unheard.id].heard_at, found[unheard.id].capacity) == (0.0, Capacity())
