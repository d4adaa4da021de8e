"""Wanted replicas: loaded without any request, tried once per cooldown, given up when nobody wants them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial

import msgspec
import pytest
from tests.frontend.serving.test_loader import drive
from tests.frontend.world import MODEL, Time, World, installed, running

from enginehouse.core import node_api
from enginehouse.core.action import StartReplica, StopReplica
from enginehouse.core.errors import Conflict, Invalid, NotFound
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import HeldModel, Model
from enginehouse.core.operation import Operation, OperationKind
from enginehouse.core.pace import USUAL
from enginehouse.core.placement import Reservation
from enginehouse.core.replica import Replica, RunningReplica
from enginehouse.core.schedule import LoadInfo, ScheduleRequest, with_kept
from enginehouse.frontend.acceptance import OperationDetails, Requester, insert_operation, new_operation
from enginehouse.frontend.serving import fleet_rows
from enginehouse.frontend.serving.counts import InFlight
from enginehouse.frontend.serving.fleet_rows import FleetRows
from enginehouse.store import db, load_infos, models, nodes, operations, replicas, reservations
from enginehouse.store.checksums import ServingChecksums
from enginehouse.store.db import Connection
from enginehouse.store.replicas import UsedReplica

BY = Requester(author="someone")
GIB = 1024**3
ENGINE = installed("engine", "sha256:1")


async def loads(world: World) -> list[Operation]:
    return await world.store.transaction(operations.steered)


async def loaded(world: World, *answers: Outcome) -> list[tuple[str, int]]:
    """Carry out the loads under way; (node, slot) of the replicas afterwards."""
    for number in range(6):
        await drive(world, *(answers or (Outcome(address=f"h:{number + 10}", nonce=f"n{number}"),)))
    found = await world.store.transaction(replicas.every)
    return [(one.node_id, one.slot) for one in found]


async def schedule(world: World, **fields: object) -> None:
    await world.schedules.put(ScheduleRequest(model_name="tiny", **fields))  # type: ignore[arg-type]


async def info_of(world: World) -> LoadInfo:
    return await world.store.transaction(lambda c: load_infos.get(c, "tiny"))


async def ready(world: World, *names: str) -> list[NodeId]:
    """Nodes that have everything and need only to start."""
    found = []
    for name in names:
        node = await world.join(name)
        await world.report(node.id, backends=(ENGINE,), models=(HeldModel("tiny", ("ab",)),))
        found.append(node.id)
    return found


async def test_a_minimum_is_restored_without_any_request_even_by_a_new_frontend(world: World, time: Time) -> None:
    """F-047: every replica row is gone, and every frontend was restarted."""
    first, second = await ready(world, "first", "second")
    await schedule(world, min_replicas=2)
    await world.reconciler.step()
    assert sorted(await loaded(world)) == sorted([(first, 0), (second, 0)])
    await world.store.transaction(lambda c: replicas.remove_all_on(c, first))
    await world.store.transaction(lambda c: replicas.remove_all_on(c, second))
    time.passed += 120.0
    for node_id in (first, second):
        await world.reports.heartbeat(node_id, node_api.HeartbeatRequest())
    again = World(world.store, time, owner="new")
    await again.reconciler.step()
    assert len(await loads(again)) == 2


async def test_one_frontend_at_a_time_reconciles(world: World, time: Time) -> None:
    await ready(world, "first", "second")
    await schedule(world, min_replicas=2)
    other = World(world.store, time, owner="other")
    await world.reconciler.step()
    await other.reconciler.step()
    assert len(await loads(world)) == 2


async def test_a_load_that_somebody_begins_during_a_pass_is_not_begun_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL, a pass sees what is committed between two of its reads."""
    await ready(world, "first", "second")
    await schedule(world, min_replicas=1)
    read = operations.steered

    def steered(connection: Connection, name: str | None = None, *, kind: OperationKind = "load") -> list[Operation]:
        found = read(connection, name, kind=kind)
        if name is None and kind == "load" and not found:
            world.loader.begin(connection, MODEL, "someone")
        return found

    with monkeypatch.context() as during:
        during.setattr(operations, "steered", steered)
        await world.reconciler.step()
    assert [one.author for one in await loads(world)] == ["someone"]
    await world.reconciler.step()
    assert [one.author for one in await loads(world)] == ["someone"]


async def test_what_cannot_be_is_tried_once_per_cooldown_and_when_a_node_joins(world: World, time: Time) -> None:
    """F-048."""
    await ready(world, "first")
    await schedule(world, min_replicas=2)
    await world.reconciler.step()
    await loaded(world)
    assert not await loads(world)
    before = await info_of(world)
    assert before.failures == 1
    assert "already runs a replica of it" in before.reason
    for _ in range(5):
        await world.reconciler.step()
    assert not await loads(world), "the cooldown holds"
    time.passed += 16.0
    await world.reports.heartbeat((await world.nodes.get("first"))[0].id, node_api.HeartbeatRequest())
    await world.reconciler.step()
    await world.loader.step()
    assert (await info_of(world)).failures == 2
    (state,) = await world.schedules.every()
    assert state.info.retry_at > await world.now()
    await ready(world, "second")
    await world.reconciler.step()
    assert len(await loads(world)) == 1


async def test_what_was_loaded_by_hand_comes_back_until_it_is_unloaded(world: World) -> None:
    (first,) = await ready(world, "first")
    await world.loader.request("tiny", None, "someone")
    assert await loaded(world) == [(first, 0)]
    # The worker restarted: it has nothing, and says so.
    await world.report(first, backends=(ENGINE,), models=(HeldModel("tiny", ("ab",)),), sequence=2)
    assert not await world.store.transaction(replicas.every)
    await world.reconciler.step()
    assert [one.author for one in await loads(world)] == ["reconciler"]
    assert await loaded(world) == [(first, 0)]
    await world.operations.request_unload("tiny", None, BY)
    await loaded(world, Outcome())
    await world.reconciler.step()
    assert not await loads(world)


async def test_what_a_worker_starts_again_by_itself_is_not_loaded_beside_that(world: World) -> None:
    (first,) = await ready(world, "first")
    await world.loader.request("tiny", None, "someone")
    await loaded(world)
    await world.report(first, backends=(ENGINE,), restarting=("tiny#0",), sequence=2)
    await world.reconciler.step()
    assert not await loads(world)
    await world.report(first, backends=(ENGINE,), sequence=3)
    await world.reconciler.step()
    assert len(await loads(world)) == 1


async def test_a_load_on_a_certain_node_is_also_the_one_on_any_node(world: World) -> None:
    await ready(world, "first", "second")
    await world.loader.request("tiny", "first", "someone")
    await loaded(world)
    await world.loader.request("tiny", None, "someone")
    assert len((await info_of(world)).kept) == 2
    assert (await world.schedules.explain("tiny")).wanted == 1
    await world.reconciler.step()
    assert not await loads(world)


async def test_a_load_that_was_cancelled_is_not_wanted_any_more(world: World) -> None:
    await ready(world, "first")
    operation_id = await world.loader.request("tiny", None, "someone")
    assert isinstance(operation_id, str)
    await world.loader.step()
    await world.cancellation.cancel(operation_id, None, "someone")
    await world.loader.step()
    assert (await info_of(world)).kept == ()
    await world.reconciler.step()
    assert not await loads(world)


async def test_a_scheduled_model_is_not_unloaded_behind_its_schedule(world: World) -> None:
    await ready(world, "first")
    await schedule(world, min_replicas=1)
    await world.reconciler.step()
    await loaded(world)
    with pytest.raises(Conflict, match="--remove"):
        await world.operations.request_unload("tiny", None, BY)


async def test_a_replica_that_is_about_to_stop_gets_no_requests_and_serves_again_if_it_was_not_stopped(
    world: World,
) -> None:
    first, second = await ready(world, "first", "second")
    await schedule(world, spread_all=True)
    await world.reconciler.step()
    await loaded(world)
    await schedule(world, spread_all=True, node_selector={"node.name": "first"})
    await world.reconciler.step()
    await world.router.step()
    assert {route.node_id for route in world.router.routes()} == {first}
    (stop,) = await world.open_intents(second)
    assert isinstance(stop.action, StopReplica)
    await world.dispatcher.step()
    await world.reply(stop, Outcome(code="stop_failed", message="cannot stop: it does not end"))
    for _ in range(12):
        await world.reconciler.step()
    await world.router.step()
    assert {route.node_id for route in world.router.routes()} in ({first, second}, {first})


async def test_two_loads_never_get_the_same_slot_or_the_same_memory(world: World, time: Time) -> None:
    node = await world.join("first")
    report = {
        "backends": (ENGINE,),
        "models": (HeldModel("tiny", ("ab",)), HeldModel("big", ("cd",))),
    }
    await world.report(node.id, **report)
    amounts = node_api.HeartbeatRequest(available_ram=6 * GIB)
    await world.reports.heartbeat(node.id, amounts)
    config = {"memory": 4 * GIB}
    for name, digest in (("tiny", "ab"), ("big", "cd")):
        file = msgspec.structs.replace(MODEL.files[0], sha256=digest)
        model = msgspec.structs.replace(MODEL, name=name, files=(file,), config=config)
        await world.store.transaction(partial(models.insert, model=model, now=1.0))
        await world.loader.request(name, None, "someone")
    other = World(world.store, time, owner="other")
    await world.loader.step()
    await other.loader.step()
    starts = [one for one in await world.open_intents(node.id) if isinstance(one.action, StartReplica)]
    assert [one.action.model.name for one in starts if isinstance(one.action, StartReplica)] == ["tiny"]
    told = await world.schedules.explain("big")
    assert "4.0 GiB reserved for tiny" in told.nodes[0].reason
    held = await world.store.transaction(lambda c: reservations.every(c, db.now(c)))
    assert [(one.model, one.memory_bytes) for one in held] == [("tiny", 4 * GIB)]


async def test_memory_that_an_engine_takes_again_at_any_moment_is_not_given_to_another(world: World) -> None:
    node = await world.join("first")
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(available_ram=6 * GIB))
    for name in ("tiny", "big"):
        model = msgspec.structs.replace(MODEL, name=name, config={"memory": 4 * GIB})
        await world.store.transaction(partial(models.insert, model=model, now=1.0))
    await world.report(node.id, backends=(ENGINE,), restarting=("tiny#0", "a name of its own"), sequence=2)
    assert (await world.schedules.explain("big")).chosen == ""
    assert "4.0 GiB reserved for tiny" in (await world.schedules.explain("big")).nodes[0].reason
    assert (await world.schedules.explain("tiny")).chosen == "first"
    # Started again, and the heartbeat with the amount of free memory is not stored yet.
    again = Replica(
        node_id=node.id, model="tiny", slot=0, revision="r", address="h:1", nonce="again", backend="xllamacpp"
    )
    now = await world.now()
    await world.store.transaction(lambda connection: replicas.put(connection, again, now + 1))
    await world.report(node.id, backends=(ENGINE,), replicas=(running("again"),), sequence=3)
    assert "4.0 GiB reserved for tiny" in (await world.schedules.explain("big")).nodes[0].reason


async def test_a_reservation_ends_by_itself(world: World, time: Time) -> None:
    wanted = Reservation(operation_id="o", node_id=NodeId("n"), model="m", slot=0, memory_bytes=5)
    rival = msgspec.structs.replace(wanted, operation_id="p")
    now = await world.now()
    assert await world.store.transaction(lambda c: reservations.put(c, wanted, now, now + 10))
    assert not await world.store.transaction(lambda c: reservations.put(c, rival, now, now + 10))
    assert await world.store.transaction(lambda c: reservations.put(c, rival, now + 11, now + 20))


async def test_what_a_replica_took_is_learned(world: World) -> None:
    (first,) = await ready(world, "first")
    await world.loader.request("tiny", None, "someone")
    await loaded(world)
    took = msgspec.structs.replace(running("n0"), memory_bytes=7 * GIB, revision=MODEL.revision)
    await world.report(first, backends=(ENGINE,), replicas=(took,), sequence=2)
    await world.reconciler.step()
    told = await world.schedules.explain("tiny")
    assert (told.needs_bytes, told.needs_from) == (7 * GIB, "measured")


async def test_what_a_replica_takes_more_later_is_learned(world: World) -> None:
    await resting(world)
    one = await home_of(world)
    took = msgspec.structs.replace(running(one.nonce), memory_bytes=7 * GIB, revision=MODEL.revision)
    await world.report(one.node_id, backends=(ENGINE,), replicas=(took,), sequence=6)
    await world.reconciler.step()
    assert (await info_of(world)).memory_bytes == 7 * GIB


async def test_requests_that_wait_on_another_frontend_are_a_reason_for_a_replica(world: World, time: Time) -> None:
    await ready(world, "first", "second")
    await schedule(world, min_replicas=1, max_replicas=2)
    await world.reconciler.step()
    assert len(await loaded(world)) == 1
    time.passed += 20.0
    await world.reconciler.step()
    assert await loads(world) == []
    await world.counts.listen()
    told = msgspec.json.encode(InFlight("other", {}, {"tiny": 4}))
    await world.bus.publish("frontends.other.in_flight", told)
    await world.reconciler.step()
    assert len(await loads(world)) == 1


async def test_a_lost_prefix_is_a_reason_for_one_more_replica_and_only_once(world: World, time: Time) -> None:
    await ready(world, "first", "second", "third")
    await schedule(world, min_replicas=1, max_replicas=3)
    await world.reconciler.step()
    assert len(await loaded(world)) == 1
    time.passed += 20.0
    await world.counts.listen()
    told = msgspec.json.encode(InFlight("other", {}, {}, {"tiny": 5.0}))
    await world.bus.publish("frontends.other.in_flight", told)
    await world.reconciler.step()
    assert len(await loaded(world)) == 2
    time.passed += 12.0
    again = msgspec.json.encode(InFlight("other", {}, {}, {"tiny": 17.0}))
    await world.bus.publish("frontends.other.in_flight", again)
    await world.reconciler.step()
    assert await loads(world) == []


async def test_requests_of_other_frontends_are_counted_and_forgotten(world: World, time: Time) -> None:
    """F-050."""
    await world.counts.listen()
    told = msgspec.json.encode(InFlight("other", {"n": 3, "x": -5}))
    await world.bus.publish("frontends.other.in_flight", told)
    await world.bus.publish("frontends.me.in_flight", msgspec.json.encode(InFlight("me", {"n": 9})))
    await world.bus.publish("frontends.junk.in_flight", b"{")
    assert world.router.in_flight_of("n") == 3
    assert world.router.in_flight_of("x") == 0
    time.passed += 5.0
    await world.counts.step()
    assert world.router.in_flight_of("n") == 0


async def test_labels_are_set_and_survive_a_registration(world: World) -> None:
    node = await world.join("first")
    assert (await world.labels.merge("first", {"zone": "attic"}))["zone"] == "attic"
    await world.join("first", approve=False)
    assert (await world.labels.get("first"))["zone"] == "attic"
    await world.labels.remove(node.id, "zone")
    with pytest.raises(NotFound):
        await world.labels.remove("first", "zone")
    with pytest.raises(Invalid, match="cannot label first"):
        await world.labels.merge("first", {"a b": "c"})


async def test_a_schedule_names_a_model_that_is_there(world: World) -> None:
    with pytest.raises(NotFound):
        await world.schedules.put(ScheduleRequest(model_name="nothing", min_replicas=1))
    await schedule(world, min_replicas=1)
    await world.schedules.remove("tiny")
    with pytest.raises(NotFound):
        await world.schedules.remove("tiny")
    with pytest.raises(NotFound):
        await world.schedules.get("tiny")


async def test_a_pass_with_nothing_to_do_reads_no_rows_until_there_is_a_reason(
    world: World, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    real = fleet_rows.read

    def counted(connection: Connection, before: FleetRows | None, now: float) -> tuple[FleetRows, ServingChecksums]:
        nonlocal reads
        reads += 1
        return real(connection, before, now)

    async def looks() -> bool:
        """Whether a pass reads rows."""
        nonlocal reads
        reads = 0
        await world.reconciler.step()
        return reads > 0

    async def settle() -> None:
        await loaded(world)
        for _ in range(4):
            await world.reconciler.step()

    first, second = await ready(world, "first", "second")
    await schedule(world, min_replicas=1, max_replicas=2)
    await world.reconciler.step()
    monkeypatch.setattr(fleet_rows, "read", counted)
    await settle()
    assert not await looks()
    await world.labels.merge(first, {"zone": "a"})
    assert await looks(), "somebody changed a node"
    await settle()
    assert not await looks()
    await world.router.step()
    route = await world.router.acquire("tiny")
    assert await looks(), "all replicas are busy"
    assert len(await loads(world)) == 1
    world.router.release(route)
    await settle()
    assert not await looks()
    time.passed += USUAL.scale_down_seconds
    for node_id in (first, second):
        await world.reports.heartbeat(node_id, node_api.HeartbeatRequest())
    assert await looks(), "one has not been used for long"
    assert len(await world.store.transaction(replicas.leaving)) == 1


# After one change ---------------------------------------------------------------------------------


OTHERS = 6  # models that rest while the one changes


async def resting(world: World) -> list[NodeId]:
    """Three nodes with a replica of `tiny` on two of them, other models with one each, and nothing to do."""
    ids = await ready(world, "first", "second", "third")
    await schedule(world, min_replicas=2, max_replicas=3)
    await world.reconciler.step()
    await loaded(world)

    def fill(connection: Connection) -> None:
        now = db.now(connection)
        for number in range(OTHERS):
            model = msgspec.structs.replace(MODEL, name=f"other-{number}")
            models.insert(connection, model, now)
            some = replica_of(model, ids[number % 3], f"o{number}")
            replicas.put(connection, some, now)
            load_infos.change(connection, model.name, partial(with_kept, node_id=NodeId("")))

    await world.store.transaction(fill)
    for node_id in ids:
        await world.report(node_id, **await shown_on(world, node_id), sequence=5)
    for _ in range(4):
        await world.reconciler.step()
    assert await nothing_is_read(world)
    return ids


def replica_of(model: Model, node_id: NodeId, nonce: str, slot: int = 0) -> Replica:
    return Replica(
        node_id=node_id,
        model=model.name,
        slot=slot,
        revision=model.revision,
        address=f"h:{nonce}",
        nonce=nonce,
        backend="engine",
    )


async def shown_on(world: World, node_id: NodeId) -> dict[str, object]:
    """A report with every process that there is to be."""
    here = await world.store.transaction(lambda c: replicas.on_node(c, node_id))
    shown = tuple(
        RunningReplica(
            model_id=one.model, replica_index=one.slot, address=one.address, nonce=one.nonce, revision=one.revision
        )
        for one, _ in here
    )
    return {"backends": (ENGINE,), "models": (HeldModel("tiny", ("ab",)),), "replicas": shown}


async def nothing_is_read(world: World) -> bool:
    quiet = world.reconciler._quiet
    await world.reconciler.step()
    return quiet is not None and world.reconciler._quiet is quiet


async def home_of(world: World) -> Replica:
    return (await world.store.transaction(lambda c: replicas.of_model(c, "tiny")))[0]


async def node_goes(world: World) -> None:
    gone = await home_of(world)

    def work(connection: Connection) -> None:
        replicas.remove_all_on(connection, gone.node_id)
        nodes.remove(connection, gone.node_id)

    await world.store.transaction(work)


async def node_is_offline(world: World) -> None:
    await world.set_health((await home_of(world)).node_id, "offline")


async def node_waits_for_approval_again(world: World) -> None:
    node_id = (await home_of(world)).node_id
    await world.store.transaction(lambda c: nodes.set_pending(c, node_id, "its key is another", db.now(c)))


async def node_is_drained(world: World) -> None:
    name = (await world.nodes.get((await home_of(world)).node_id))[0].name
    await world.operations.request_drain(name, BY)


async def replica_is_gone(world: World) -> None:
    gone = await home_of(world)
    await world.store.transaction(lambda c: replicas.remove(c, gone.node_id, gone.model, gone.slot))


async def replica_is_of_another_revision(world: World) -> None:
    old = msgspec.structs.replace(await home_of(world), revision="older", nonce="another")
    await world.store.transaction(lambda c: replicas.put(c, old, db.now(c)))


async def more_are_wanted(world: World) -> None:
    await schedule(world, min_replicas=3, max_replicas=3)


async def it_is_spread(world: World) -> None:
    await schedule(world, spread_all=True)


async def one_is_kept_on_the_third(world: World) -> None:
    here = {one.node_id for one in await world.store.transaction(lambda c: replicas.of_model(c, "tiny"))}
    (free,) = {node.id for node in (await world.nodes.every())[0]} - here
    await world.store.transaction(lambda c: load_infos.change(c, "tiny", partial(with_kept, node_id=free)))


async def model_is_edited(world: World) -> None:
    edited = msgspec.structs.replace(MODEL, config={"memory": 5})
    await world.store.transaction(lambda c: models.replace(c, edited))


async def engine_is_upgraded(world: World) -> None:
    one = await home_of(world)
    report = await shown_on(world, one.node_id)
    old = [msgspec.structs.replace(each, outdated=each.nonce == one.nonce) for each in report["replicas"]]  # type: ignore[attr-defined]
    await world.report(one.node_id, **{**report, "replicas": tuple(old)}, sequence=6)


LOADS: dict[str, Callable[[World], Awaitable[None]]] = {
    "its node is gone": node_goes,
    "its node is offline": node_is_offline,
    "its node waits for approval": node_waits_for_approval_again,
    "its node is drained": node_is_drained,
    "a replica is gone": replica_is_gone,
    "a replica is of another revision": replica_is_of_another_revision,
    "more are wanted": more_are_wanted,
    "it is spread": it_is_spread,
    "one is kept on a node": one_is_kept_on_the_third,
    "the model is edited": model_is_edited,
    "its engine is upgraded": engine_is_upgraded,
}


@pytest.mark.parametrize("change", LOADS.values(), ids=LOADS)
async def test_one_change_begins_a_load_and_the_models_that_it_does_not_touch_are_not_planned(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Callable[[World], Awaitable[None]]
) -> None:
    await resting(world)
    await change(world)
    read: list[str] = []
    real = replicas.of_models_with_use

    def noted(connection: Connection, names: Iterable[str]) -> dict[str, list[UsedReplica]]:
        read.extend(names := list(names))
        return real(connection, names)

    monkeypatch.setattr(replicas, "of_models_with_use", noted)
    await world.reconciler.step()
    begun = [one for one in await loads(world) if one.name == "tiny"]
    assert len(begun) == 1
    assert "tiny" in read
    # What ran on the same node is looked at, too.
    assert len(read) <= 1 + OTHERS // 3


async def test_a_replica_that_was_put_again_is_not_believed_to_be_the_one_before(world: World) -> None:
    """Removed and put again between two passes, by another frontend, and later gone."""
    await resting(world)
    one = await home_of(world)
    for _ in range(2):
        await replica_is_gone(world)
        await world.store.transaction(lambda c: replicas.put(c, one, db.now(c)))
    await world.reconciler.step()
    assert await loads(world) == []
    await world.store.transaction(lambda c: replicas.remove(c, one.node_id, one.model, one.slot))
    await world.reconciler.step()
    assert len(await loads(world)) == 1


async def test_a_node_that_leaves_and_joins_again_is_another_one(world: World) -> None:
    first, second = await ready(world, "first", "second")
    await schedule(world, min_replicas=2)
    await world.reconciler.step()
    assert len(await loaded(world)) == 2
    for _ in range(4):
        await world.reconciler.step()
    assert await nothing_is_read(world)

    def leave(connection: Connection) -> None:
        replicas.remove_all_on(connection, second)
        nodes.remove(connection, second)

    await world.store.transaction(leave)
    await world.reconciler.step()
    assert await loaded(world) == [(first, 0)]
    assert (await info_of(world)).failures == 1, "there is no place for it"
    (again,) = await ready(world, "second")
    await world.reconciler.step()
    assert sorted(await loaded(world)) == sorted([(first, 0), (again, 0)]), "tried again at once"


async def test_a_replica_that_is_about_to_stop_does_not_count(world: World) -> None:
    await resting(world)
    one = await home_of(world)
    stop = StopReplica(model="tiny", slot=one.slot)

    def work(connection: Connection) -> None:
        replicas.set_leaving(connection, one.node_id, "tiny", one.slot, True)
        operation = new_operation(connection, "unload", "tiny", "someone", OperationDetails(targets=(one.node_id,)))
        insert_operation(connection, operation, [(one.node_id, stop)])

    await world.store.transaction(work)
    await world.reconciler.step()
    assert len([each for each in await loads(world) if each.name == "tiny"]) == 1


async def test_a_stop_that_is_not_under_way_is_taken_back(world: World) -> None:
    await resting(world)
    one = await home_of(world)
    await world.store.transaction(lambda c: replicas.set_leaving(c, one.node_id, "tiny", one.slot, True))
    await world.reconciler.step()
    assert await world.store.transaction(replicas.leaving) == []
    assert await loads(world) == []


async def test_labels_decide_again_after_a_pass_with_nothing_to_do(world: World) -> None:
    first, second, third = await ready(world, "first", "second", "third")
    await world.labels.merge("first", {"zone": "attic"})
    await schedule(world, spread_all=True, node_selector={"zone": "attic"})
    await world.reconciler.step()
    assert await loaded(world) == [(first, 0)]
    for _ in range(4):
        await world.reconciler.step()
    assert await nothing_is_read(world)
    await world.labels.merge("third", {"zone": "attic"})
    await world.reconciler.step()
    assert [one.targets for one in await loads(world)] == [(third,)]
    await loaded(world)
    for _ in range(4):
        await world.reconciler.step()
    assert await nothing_is_read(world)
    await world.labels.remove("first", "zone")
    await world.reconciler.step()
    assert [one.node_id for one in await world.store.transaction(replicas.leaving)] == [first]
    assert second not in {one.node_id for one in await world.store.transaction(replicas.every)}


async def test_fewer_are_wanted_after_a_pass_with_nothing_to_do(world: World) -> None:
    await resting(world)
    await schedule(world, min_replicas=1, max_replicas=1)
    await world.reconciler.step()
    assert len(await world.store.transaction(replicas.leaving)) == 1


async def test_time_alone_wakes_a_model_that_rests(world: World, time: Time) -> None:
    """Idle to zero, though other models and another frontend keep passes going all the time."""
    ids = await ready(world, "first", "second")
    await world.schedules.put(ScheduleRequest(model_name="tiny", min_replicas=1))
    await world.reconciler.step()
    await loaded(world)
    await schedule(world, max_replicas=1, idle_seconds=20.0)
    for number in range(5):
        await world.labels.merge(ids[1], {"round": str(number)})
        await world.reconciler.step()
        assert await world.store.transaction(replicas.leaving) == []
        time.passed += 4.5
        for node_id in ids:
            await world.reports.heartbeat(node_id, node_api.HeartbeatRequest())
    await world.labels.merge(ids[1], {"round": "last"})
    await world.reconciler.step()
    assert len(await world.store.transaction(replicas.leaving)) == 1


async def test_the_end_of_a_pause_wakes_a_model_that_rests(world: World, time: Time) -> None:
    """The memory that was missing was reserved by another load, whose reservation has ended by itself."""
    (first,) = await ready(world, "first")
    await world.reports.heartbeat(first, node_api.HeartbeatRequest(available_ram=6 * GIB))
    model = msgspec.structs.replace(MODEL, config={"memory": 4 * GIB})
    await world.store.transaction(lambda c: models.add(c, model, 1.0))
    held = Reservation(operation_id="o", node_id=first, model="big", slot=0, memory_bytes=4 * GIB)
    await world.store.transaction(lambda c: reservations.put(c, held, db.now(c), db.now(c) + 10.0))
    await schedule(world, min_replicas=1)
    await world.reconciler.step()
    for _ in range(3):
        await world.loader.step()
        await world.reconciler.step()
    assert "4.0 GiB reserved for big" in (await world.schedules.explain("tiny")).nodes[0].reason
    for load in await loads(world):
        await world.store.transaction(partial(operations.end_steering, operation_id=load.id))
    retry_at = await world.now() + 15.0
    await world.store.transaction(
        lambda c: load_infos.change(c, "tiny", lambda known: msgspec.structs.replace(known, retry_at=retry_at))
    )
    for number in range(4):
        # Other models change all the time.
        other = msgspec.structs.replace(MODEL, name=f"other-{number}")
        await world.store.transaction(partial(models.insert, model=other, now=1.0))
        await world.reconciler.step()
        assert await loads(world) == []
    time.passed += 16.0
    await world.reports.heartbeat(first, node_api.HeartbeatRequest())
    other = msgspec.structs.replace(MODEL, name="other")
    await world.store.transaction(partial(models.insert, model=other, now=1.0))
    await world.reconciler.step()
    assert len(await loads(world)) == 1
    assert await loaded(world) == [(first, 0)]


async def test_what_heartbeats_say_of_a_machine_counts_after_a_minute(world: World, time: Time) -> None:
    """Its graphics card is in no checksum."""
    ids = await ready(world, "first", "second")
    await schedule(world, spread_all=True, node_selector={"gpu.vendor": "nvidia"})
    for _ in range(3):
        await world.reconciler.step()
    assert await loads(world) == []
    await world.reports.heartbeat(ids[0], node_api.HeartbeatRequest(gpu_vendor="nvidia"))
    for _ in range(13):
        time.passed += 5.0
        for node_id in ids:
            await world.reports.heartbeat(node_id, node_api.HeartbeatRequest())
        await world.labels.merge(ids[1], {"at": str(time.passed)})
        await world.reconciler.step()
    assert [one.targets for one in await loads(world)] == [(ids[0],)]


async def test_two_frontends_take_turns_and_believe_nothing_that_the_other_has_changed(
    world: World, time: Time
) -> None:
    await resting(world)
    other = World(world.store, time, owner="other")
    await other.start()
    for number in range(4):
        here, there = (world, other) if number % 2 else (other, world)
        await here.reconciler.step()
        await replica_is_gone(there)
        await there.reconciler.step()
        await here.reconciler.step()
        assert len(await loads(world)) == 1
        assert len(await loaded(there, Outcome(address="h:1", nonce=f"again-{number}"))) == 2 + OTHERS
        for _ in range(2):
            await there.reconciler.step()
        assert await loads(world) == []
