"""What lists read, on SQLite and on PostgreSQL: filtered, cut and counted by the database."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest
from tests.store.test_store import INSTALL, node, operation

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change
from enginehouse.core.node import Node, NodeQuery, Status
from enginehouse.core.operation import status_by_states, status_of
from enginehouse.core.report import Report
from enginehouse.store import history, intents, nodes, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.supersession import add_intent

REPORT = Report(
    boot_id="b",
    version="1.2",
    confinement="landlock",
    backends=(InstalledBackend(name="x", is_system=False, is_meta=False, digest="sha256:1"),),
    running=(IntentId("i"),),
)


def fleet() -> list[Node]:
    """Names in another order than ids and ages, three nodes of one name, and every status."""
    return [
        node("b", id="1", created_at=9.0, report=REPORT),
        node("a", id="9", created_at=3.0, approved=False, public_key="k9"),
        node("a", id="8", created_at=3.0, public_key="k8", health="offline"),
        node("a", id="7", created_at=1.0, public_key="k7", drained=True, health="unhealthy"),
        node("c", id="2", created_at=2.0, health="unhealthy"),
        node("d", id="3", created_at=2.0, approved=False, drained=True),
        node("e", id="4", created_at=2.0),
    ]


@pytest.fixture
async def filled(store: Store) -> Store:
    def fill(connection: Connection) -> None:
        for number, one in enumerate(fleet()):
            nodes.insert(connection, one, f"token-{number}")

    await store.transaction(fill)
    return store


async def listed(store: Store, asked: NodeQuery) -> list[Node]:
    found = await store.read(lambda connection: nodes.listed(connection, asked))
    assert found is not None
    return found


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100])
async def test_pages_are_the_whole_list_once_in_its_order(filled: Store, limit: int) -> None:
    whole = [one.id for one in await listed(filled, NodeQuery())]
    assert whole == ["7", "8", "9", "1", "2", "3", "4"]
    seen: list[NodeId] = []
    while True:
        page = await listed(filled, NodeQuery(limit=limit, after=seen[-1] if seen else NodeId("")))
        seen += [one.id for one in page]
        assert len(page) <= limit
        if len(page) < limit:
            break
    assert seen == whole
    assert await filled.read(lambda connection: nodes.listed(connection, NodeQuery(after=NodeId("none")))) is None


async def test_a_status_is_what_nodes_with_it_show(filled: Store) -> None:
    whole = await listed(filled, NodeQuery())
    for status in get_args(Status):
        found = await listed(filled, NodeQuery(status=status))
        assert [one.id for one in found] == [one.id for one in whole if one.status == status]
        assert found, "every status occurs"


async def test_filters_and_pages_go_together(filled: Store) -> None:
    named = await listed(filled, NodeQuery(name="a"))
    assert [one.id for one in named] == ["7", "8", "9"]
    assert [one.id for one in await listed(filled, NodeQuery(name="a", limit=1, after=NodeId("7")))] == ["8"]
    assert [one.id for one in await listed(filled, NodeQuery(name="a", status="pending"))] == ["9"]
    assert [one.id for one in await listed(filled, NodeQuery(status="healthy", after=NodeId("7")))] == ["1", "4"]
    assert await listed(filled, NodeQuery(name="nobody")) == []


async def test_of_a_report_lists_have_what_they_show(filled: Store) -> None:
    (first,) = await listed(filled, NodeQuery(name="b"))
    shown = Report(version=REPORT.version, confinement=REPORT.confinement, backends=REPORT.backends)
    assert first.report == shown
    (plain,) = await listed(filled, NodeQuery(name="e"))
    assert plain.report == Report()


async def test_states_are_counted_as_the_intents_of_each_operation_show_them(store: Store) -> None:
    node_ids = [NodeId(f"n{number}") for number in range(6)]

    def fill(connection: Connection) -> None:
        for one in node_ids:
            nodes.insert(connection, node(one, id=one), f"token-{one}")
        for number in (1, 2, 3):
            operations.insert(connection, operation(number, targets=tuple(node_ids)))
        for one in node_ids:
            for number in (1, 2):  # the second joins
                intent_id = IntentId(f"intent-{one}-{number}")
                add_intent(connection, OperationId(f"op-{number}"), one, INSTALL, intent_id, 10.0)
        ids = [intent.id for intent in operations.intents_of(connection, [OperationId("op-1")])[OperationId("op-1")]]
        found = operations.lock_intents(connection, ids)
        operations.apply(connection, found[ids[0]], Change(kind="claim", now=11.0, owner="me", lease_until=99.0))
        operations.apply(connection, found[ids[1]], Change(kind="cancel", now=12.0))
        operations.cancel_share(connection, OperationId("op-2"), found[ids[2]], Change(kind="cancel", now=12.0))

    await store.transaction(fill)
    ids = [OperationId(f"op-{number}") for number in (1, 2, 3)]
    counted = await store.read(lambda connection: history.counts_of(connection, ids))
    read = await store.read(lambda connection: operations.intents_of(connection, ids))
    for one in ids:
        assert counted[one].states == Counter(intent.state for intent in read[one])
        whole = (await store.read(lambda connection: operations.many(connection, ids)))[one]
        assert status_by_states(whole, counted[one].states.keys()) == status_of(whole, read[one])
    assert counted[OperationId("op-2")].states["cancelled"] == 2, "a share that was cancelled counts as such"
    assert counted[OperationId("op-3")].states == {}


async def test_what_loops_look_for_is_found_by_the_database(store: Store) -> None:
    def fill(connection: Connection) -> None:
        operations.insert(connection, operation(1))
        kinds: dict[str, dict[str, object]] = {
            "up": {},
            "away": {"health": "offline"},
            "pending": {"approved": False},
            "agent": {"node_type": "agent"},
        }
        for name, fields in kinds.items():
            nodes.insert(connection, node(name, id=name, **fields), f"token-{name}")
        for name in (*kinds, "removed"):
            add_intent(connection, OperationId("op-1"), NodeId(name), INSTALL, IntentId(f"on-{name}"), 1.0)
        done = operations.lock_intents(connection, [IntentId("on-away")])[IntentId("on-away")]
        operations.apply(connection, done, Change(kind="cancel", now=2.0))

    await store.transaction(fill)
    ids = [NodeId(name) for name in ("up", "away", "pending", "agent", "removed")]
    hopeless = await store.read(intents.open_without_node)
    assert {one.id: is_there for one, is_there in hopeless} == {"on-agent": True, "on-removed": False}
    assert await store.read(lambda connection: nodes.serving_among(connection, ids)) == {"up": "up", "agent": "agent"}
    assert await store.read(lambda connection: nodes.serving_among(connection, ids[1:2])) == {}
    opened = await store.read(lambda connection: operations.open_among(connection, ids))
    assert {one: [intent.id for intent in found] for one, found in opened.items()} == {
        one: [f"on-{one}"] for one in ids if one != "away"
    }
    tokens = await store.read(lambda connection: nodes.token_of(connection, NodeId("up")))
    assert tokens is not None
    assert tokens.hash == "token-up"
    assert await store.read(lambda connection: nodes.token_of(connection, NodeId("removed"))) is None
