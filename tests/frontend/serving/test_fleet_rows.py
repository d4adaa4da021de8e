"""Rows that are read by their changes are those that a new frontend reads, and no change of what a plan depends on is
missed.
"""

from __future__ import annotations

import random
from functools import partial

import msgspec
from tests.frontend.serving_rows import a_model, a_node, a_replica

from enginehouse.core.ids import NodeId
from enginehouse.core.placement import selects
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.core.schedule import LoadInfo, Schedule
from enginehouse.frontend.serving import fleet_rows
from enginehouse.frontend.serving.fleet_rows import FleetRows
from enginehouse.store import load_infos, models, nodes, replicas, schedules
from enginehouse.store.db import Connection, Store
from enginehouse.store.replicas import UsedReplica

MODELS = [a_model(number) for number in range(4)]
NODES = [NodeId(f"{number:036d}") for number in range(4)]
STEPS = 250


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
        # A transaction that began earlier may be committed later, far beyond the overlap. No two have the same time.
        at = self._now - chance.choice([0.0, 0.0, 3.0, 60.0]) - chance.random() / 1000
        self._now += chance.choice([0.01, 1.0, 20.0])
        if chance.random() < 0.5:
            self._of_nodes(connection, at)
        else:
            self._of_models(connection, at)

    def _of_nodes(self, connection: Connection, at: float) -> None:
        chance, number = self._chance, self._chance.randrange(len(NODES))
        node_id, there = NODES[number], replicas.every(connection)
        match chance.randrange(7):
            case 0:
                nodes.set_health(connection, node_id, chance.choice(["healthy", "unhealthy", "offline"]), at)
            case 1:
                nodes.set_drained(connection, node_id, chance.random() < 0.5, at)
            case 2:
                nodes.set_labels(connection, node_id, {"zone": chance.choice("ab")}, at)
            case 3:
                nodes.set_pending(connection, node_id, "why", at)
            case 4:
                nodes.set_approved(connection, node_id, at)
            case 5:
                nodes.remove(connection, node_id)
                nodes.insert(connection, a_node(number, [], at), f"{number}")
            case _:
                shown = [one for one in there if one.node_id == node_id]
                report = a_node(number, shown, at).report
                some = [msgspec.structs.replace(one, outdated=chance.random() < 0.5) for one in report.replicas]
                nodes.set_report(connection, node_id, msgspec.structs.replace(report, replicas=tuple(some)), at)

    def _of_models(self, connection: Connection, at: float) -> None:
        chance, model = self._chance, self._chance.choice(MODELS)
        there = replicas.every(connection)
        match chance.randrange(8):
            case 0 | 1:
                replicas.put(connection, self._replica(), at)
            case 2 if there:
                gone = chance.choice(there)
                replicas.remove(connection, gone.node_id, gone.model, gone.slot)
            case 3 if there:
                again = chance.choice(there)  # the same process
                replicas.put(connection, again, at)
            case 4 if len(there) > 1:
                # One stays that was about to stop, and another one is about to instead.
                for one, leaving in zip(chance.sample(there, 2), (True, False), strict=True):
                    replicas.set_leaving(connection, one.node_id, one.model, one.slot, leaving)
            case 5:
                selector = chance.choice([{}, {"zone": "a"}])
                wanted = Schedule(
                    model_name=model.name, node_selector=selector, min_replicas=1, spread_all=chance.random() < 0.3
                )
                schedules.put(connection, wanted, at)
            case 6 if chance.random() < 0.5:
                schedules.remove(connection, model.name)
            case 6:
                models.remove(connection, model.name)
            case _:
                changed = msgspec.structs.replace(model, config={"memory": chance.randrange(3) + 1})
                if not models.add(connection, changed, at):
                    models.replace(connection, changed)
                kept = tuple(chance.sample(NODES, chance.randrange(2)))
                retry_at = chance.choice([0.0, 5000.0])
                load_infos.change(connection, model.name, partial(_kept, kept=kept, retry_at=retry_at))

    def _replica(self) -> Replica:
        chance = self._chance
        made = a_replica(0, chance.choice(MODELS), f"{chance.getrandbits(40):x}")
        return msgspec.structs.replace(made, node_id=chance.choice(NODES), slot=chance.randrange(2))


def _kept(known: LoadInfo, *, kept: tuple[NodeId, ...], retry_at: float) -> LoadInfo:
    return msgspec.structs.replace(known, kept=kept, retry_at=retry_at)


def inputs(rows: FleetRows, used: list[UsedReplica], model: str) -> tuple[object, ...]:
    """All that the plan of a model depends on, but for time, loads and requests."""
    schedule, info = rows.schedules.rows.get(model), rows.infos.rows.get(model)
    selector = schedule.node_selector if schedule is not None else {}
    is_chosen_by_node = schedule is not None and (schedule.spread_all or schedule.node_selector)
    everywhere = rows.in_order()
    kept = info.kept if info is not None else ()
    return (
        *(schedule, info, rows.definitions.rows.get(model), model in rows.names()),
        [(one.replica, one.created_at, one.leaving) for one in used if one.replica.model == model],
        [
            (rows.serves(node.id), node.drained, rows.nodes.rows[node.id].outdated & {one.replica.nonce})
            for one in used
            if one.replica.model == model
            for node in everywhere
            if node.id == one.replica.node_id
        ],
        [
            (node.id, node.is_schedulable, selects(selector, node), node.capability, node.platform)
            for node in everywhere
            if is_chosen_by_node or node.id in kept
        ],
    )


def compared(rows: FleetRows) -> list[object]:
    """Without what is not promised to be as it is now."""
    of_nodes = {one: msgspec.structs.replace(known, node=_lasting(known)) for one, known in rows.nodes.rows.items()}
    kept = (rows.nodes.checksum, rows.schedules, rows.infos, rows.definitions)
    return [of_nodes, rows.replicas, *kept]


def _lasting(known: fleet_rows.KnownNode) -> object:
    return msgspec.structs.replace(known.node, last_heartbeat=0.0, report=Report())


async def test_rows_by_changes_are_those_of_a_new_frontend_and_no_change_is_missed(store: Store) -> None:
    changes = Changes(1)
    await store.transaction(changes.begin)
    whole, _ = await store.transaction(partial(fleet_rows.read, before=None, now=1.0))
    before, used = whole, await store.transaction(replicas.every_with_use)
    skipped = 0
    for _ in range(STEPS):
        await store.transaction(changes.one)
        rows, seen = await store.transaction(partial(fleet_rows.read, before=before, now=2.0))
        fresh, same = await store.transaction(partial(fleet_rows.read, before=None, now=2.0))
        assert seen == same
        assert compared(rows) == compared(fresh)
        found = await store.transaction(partial(fleet_rows.changes, before=before, after=rows))
        used_now = await store.transaction(replicas.every_with_use)
        for model in MODELS:
            if inputs(whole, used, model.name) != inputs(fresh, used_now, model.name):
                assert model.name in found.models
            skipped += model.name not in found.models
        before, whole, used = rows, fresh, used_now
    assert skipped > STEPS, "most changes are none of most models"


async def test_only_rows_that_differ_are_read_again(store: Store) -> None:
    changes = Changes(2)
    await store.transaction(changes.begin)
    before, _ = await store.transaction(partial(fleet_rows.read, before=None, now=1.0))
    same, _ = await store.transaction(partial(fleet_rows.read, before=before, now=2.0))
    assert (same.nodes, same.infos, same.definitions) == (before.nodes, before.infos, before.definitions)
    assert same.nodes is before.nodes
    await store.transaction(lambda c: nodes.set_health(c, NODES[1], "offline", 1000.5))
    after, _ = await store.transaction(partial(fleet_rows.read, before=same, now=3.0))
    again = [one for one in NODES if after.nodes.rows[one] is not before.nodes.rows[one]]
    assert again == [NODES[1]]
    assert after.definitions is before.definitions
    assert after.read_at == 1.0
