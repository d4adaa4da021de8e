"""Routes that are read by their changes are those that a new frontend reads."""

from __future__ import annotations

import random
from functools import partial

import msgspec
from tests.frontend.serving_rows import a_model, a_node, a_replica

from enginehouse.core.ids import NodeId
from enginehouse.core.replica import Replica
from enginehouse.core.routing import Route
from enginehouse.core.schedule import Schedule
from enginehouse.frontend.serving.route_rows import KnownRows, RouteRows
from enginehouse.store import models, nodes, replicas, schedules
from enginehouse.store.db import Connection, Store

MODELS = [a_model(number) for number in range(3)]
NODES = [NodeId(f"{number:036d}") for number in range(4)]
STEPS = 150


class Changes:
    """Whatever may happen to rows, as a seed says."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._now = 1000.0

    def begin(self, connection: Connection) -> None:
        for number in range(len(NODES)):
            nodes.insert(connection, a_node(number, [], self._now), f"{number}")
        for model in MODELS:
            models.insert(connection, model, self._now)

    def one(self, connection: Connection) -> None:
        chance = self._chance
        # A transaction that began earlier may be committed later, far beyond the overlap.
        at = self._now - chance.choice([0.0, 0.0, 3.0, 60.0])
        self._now += chance.choice([0.001, 1.0, 20.0])
        node_id, model = chance.choice(NODES), chance.choice(MODELS)
        there = replicas.every(connection)
        match chance.randrange(8):
            case 0 | 1 | 2:
                replicas.put(connection, self._replica(node_id), at)
            case 3 if there:
                gone = chance.choice(there)
                replicas.remove(connection, gone.node_id, gone.model, gone.slot)
            case 4 if len(there) > 1:
                # One stays that was about to stop, and another one is about to instead.
                for replica, leaving in zip(chance.sample(there, 2), (True, False), strict=True):
                    replicas.set_leaving(connection, replica.node_id, replica.model, replica.slot, leaving)
            case 5:
                nodes.set_health(connection, node_id, chance.choice(["healthy", "offline"]), at)
            case 6:
                schedules.put(connection, Schedule(model_name=model.name, min_replicas=chance.randrange(3)), at)
            case 7:
                models.replace(connection, msgspec.structs.replace(model, config={"memory": chance.randrange(3) + 1}))

    def _replica(self, node_id: NodeId) -> Replica:
        made = a_replica(0, self._chance.choice(MODELS), f"{self._chance.getrandbits(40):x}")
        return msgspec.structs.replace(made, node_id=node_id, slot=self._chance.randrange(2))


def ids(known: KnownRows) -> dict[str, list[Route]]:
    return {model: some for model, some in known.routes.items() if some}


async def test_routes_by_changes_are_those_of_a_new_frontend(store: Store) -> None:
    changes, rows = Changes(1), RouteRows()
    await store.transaction(changes.begin)
    before: KnownRows | None = None
    told: dict[str, list[Route]] = {}
    partly = 0
    for _ in range(STEPS):
        await store.transaction(changes.one)
        found = await store.transaction(partial(rows.read, before=before, dropped={}))
        fresh = await store.transaction(partial(RouteRows().read, before=None, dropped={}))
        assert ids(found.known) == ids(fresh.known)
        assert found.known.schedules == fresh.known.schedules
        for model in {*told, *found.known.routes} if found.changed is None else found.changed:
            told[model] = found.known.routes.get(model, [])
        assert {model: some for model, some in told.items() if some} == ids(fresh.known), "what was told is all"
        partly += found.changed is not None
        before = found.known
    assert partly > STEPS // 2


async def test_nothing_is_told_where_nothing_changed(store: Store) -> None:
    changes, rows = Changes(2), RouteRows()
    await store.transaction(changes.begin)
    for number in range(4):
        await store.transaction(lambda c, n=number: replicas.put(c, a_replica(n * 10, MODELS[0]), 50.0))  # type: ignore[misc]
    first = await store.transaction(partial(rows.read, before=None, dropped={}))
    again = await store.transaction(partial(rows.read, before=first.known, dropped={}))
    assert (first.changed, again.changed) == (None, frozenset())
    assert again.known.routes == first.known.routes
    await store.transaction(lambda c: replicas.put(c, a_replica(0, MODELS[1]), 60.0))
    later = await store.transaction(partial(rows.read, before=again.known, dropped={}))
    assert later.changed == frozenset({MODELS[1].name})
