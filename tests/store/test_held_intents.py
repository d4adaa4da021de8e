"""Held intents and canary phases, on both databases: nobody sends what is held, and one release is enough."""

from __future__ import annotations

import msgspec
from tests.store.test_store import node, operation

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import Resolved
from enginehouse.core.canary import Canary, CanaryNode, ServedCount
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import CANARY
from enginehouse.store import claims, intents, nodes, operations, usage
from enginehouse.store.db import Connection, Store
from enginehouse.store.supersession import Wanted, add_intents

NODE = NodeId("id-of-first")
NEW = Resolved(directory="x", uri="registry.example/x:1", digest="sha256:2")
UPGRADE = InstallBackend(backend="x", resolved=NEW, upgrade=True)
FIRST = CanaryNode(node_id=NodeId("other"), name="other", before=NEW, own=ServedCount(3, 1))
WATCHED = Canary(hardware={NODE: "gpu", NodeId("other"): "gpu"}, nodes=(FIRST,))
A_CENTURY = 3.2e9


def hold(connection: Connection) -> None:
    nodes.insert(connection, node(), "hash")
    operations.insert(connection, operation(1, kind="upgrade", canary=WATCHED))
    add_intents(connection, OperationId("op-1"), [Wanted(NODE, UPGRADE, IntentId("i"), "waits for other")], 10.0, 1)


def claimed(connection: Connection, now: float) -> list[str]:
    return [one.id for one in claims.claim_due(connection, "me", now, now + 30.0, 10)]


async def test_what_is_held_is_sent_by_nobody_until_it_is_released(store: Store) -> None:
    def work(connection: Connection) -> None:
        hold(connection)
        held = operations.intent(connection, IntentId("i"))
        assert held is not None
        assert held.is_held
        assert (held.state, held.reason, held.message) == ("waiting", CANARY, "waits for other")
        assert claimed(connection, A_CENTURY) == []

    await store.transaction(work)

    def join(connection: Connection) -> None:
        operations.insert(connection, operation(2, kind="upgrade"))
        operations.insert(connection, operation(3, kind="upgrade", canary=WATCHED))
        # A request that is held itself leaves it alone; one that is not needs it now.
        again = Wanted(NODE, UPGRADE, IntentId("unused"), "waits too")
        assert add_intents(connection, OperationId("op-3"), [again], 11.0)[0].is_held
        (joined,) = add_intents(connection, OperationId("op-2"), [msgspec.structs.replace(again, hold="")], 12.0)
        assert (joined.id, joined.is_held, joined.reason, joined.message, joined.due_at) == ("i", False, "", "", 12.0)
        assert claimed(connection, 13.0) == ["i"]

    await store.transaction(join)


async def test_a_canary_phase_is_found_while_it_is_watched_and_kept_as_it_was_written(store: Store) -> None:
    def work(connection: Connection) -> None:
        hold(connection)
        operations.insert(connection, operation(2))
        (found,) = operations.watching(connection)
        assert (found.id, found.canary) == ("op-1", WATCHED)
        over = msgspec.structs.replace(WATCHED, phase="failed", message="no")
        failed = msgspec.structs.replace(found, canary=over, error_code="canary_failed", error_message="it failed")
        operations.set_canary(connection, failed)
        assert operations.watching(connection) == []
        assert operations.lock(connection, OperationId("op-1")) == failed
        assert operations.lock(connection, OperationId("nobody")) is None

    await store.transaction(work)


async def test_starts_of_a_node_are_found_since_a_moment_and_requests_are_summed_per_node(store: Store) -> None:
    def work(connection: Connection) -> None:
        hold(connection)
        assert intents.starts_since(connection, NODE, 0.0) == [], "an install is no start"
        places = [("t", "t", "m", "first"), ("u", "u", "m", "first"), ("t", "t", "m", "second")]
        places.append(("t", "t", "n", "first"))
        for hour in (3600, 7200):
            usage.add(connection, hour, dict.fromkeys(places, (10, 3, 0, 0, 2)))
        assert usage.served(connection, 7200, ["m"]) == {"first": ServedCount(20, 4), "second": ServedCount(10, 2)}
        assert usage.served(connection, 0, ["m", "n"]) == {"first": ServedCount(60, 12), "second": ServedCount(20, 4)}
        assert usage.served(connection, 0, []) == {}

    await store.transaction(work)
