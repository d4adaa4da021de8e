"""Registration, approval and health."""

from __future__ import annotations

import msgspec
import pytest
from nacl.signing import SigningKey
from tests.frontend.world import STALE_SECONDS, Time, World, registration, signed

from enginehouse.core import wire
from enginehouse.core.errors import Conflict, Denied, Invalid, NotFound, Unavailable
from enginehouse.core.replica import Replica
from enginehouse.store import replicas

KEY = SigningKey(b"1" * 32)
OTHER_KEY = SigningKey(b"2" * 32)
HEARTBEAT = wire.HeartbeatRequest()


@pytest.mark.parametrize("name", ["", "a b", "*", "a.>", "a/b", "x" * 129, "ends.", "\u0430bc", "a\n"])
async def test_a_name_that_cannot_be_a_nodes_is_refused(world: World, name: str) -> None:
    with pytest.raises(Invalid):
        await world.nodes.register(registration(name))
    assert (await world.nodes.every())[0] == []


async def test_no_node_can_take_the_id_of_another_for_its_name(world: World) -> None:
    first = await world.join("first")
    for name in (first.id, first.id.upper()):
        with pytest.raises(Invalid):
            await world.nodes.register(registration(name))


@pytest.mark.parametrize(
    "fields",
    [
        {"address": "h" * 256},
        {"address": "h\0"},
        {"address": "nonsense"},
        {"address": "http://host:1"},
        {"http_address": "h\n"},
        {"platform": "p" * 65},
        {"capability": "c" * 65},
        {"gpu_vendor": "v" * 65},
        {"total_ram": -1},
        {"available_disk": 2**80},
        {"max_replicas_per_model": 2**40},
        {"labels": {str(number): "" for number in range(65)}},
        {"labels": {"bad key": ""}},
        {"labels": {"k" * 318: ""}},
        {"labels": {"key": "v" * 257}},
        {"public_key": "not hexadecimal"},
        {"public_key": "AB" * 32},
        {"node_type": "toaster"},
    ],
)
async def test_what_does_not_fit_its_column_is_refused_with_its_name(world: World, fields: dict[str, object]) -> None:
    with pytest.raises(Invalid) as caught:
        await world.nodes.register(registration("first", **fields))
    assert caught.value.param == next(iter(fields)) or caught.value.param == "name"
    assert (await world.nodes.every())[0] == []


async def test_what_localai_s_workers_may_say_is_taken(world: World) -> None:
    labels = {"node.replica-slots": "1", "topology.kubernetes.io/zone": "eu-1", "gpu:0": "a b"}
    request = registration("first", labels=labels, max_replicas_per_model=-1, address="gpu_1.lan:50051")
    node = (await world.nodes.register(request)).node
    assert (node.labels, node.max_replicas_per_model) == (labels, 1)


async def test_labels_do_not_grow_without_end_by_registering_again(world: World) -> None:
    await world.nodes.register(registration("first", labels={f"a{number}": "" for number in range(60)}))
    with pytest.raises(Invalid):
        await world.nodes.register(registration("first", labels={f"b{number}": "" for number in range(60)}))


async def test_a_signature_of_another_key_is_denied(world: World) -> None:
    public = KEY.verify_key.encode().hex()
    for request in (
        signed("first", OTHER_KEY, public_key=public),
        signed("first", KEY, signature=""),
        msgspec.structs.replace(signed("first", KEY), name="second"),
    ):
        with pytest.raises(Denied):
            await world.nodes.register(request)


async def test_a_known_name_with_another_key_is_a_node_of_its_own_that_waits(world: World) -> None:
    first = await world.register("first", KEY)
    await world.nodes.approve("first")
    again = await world.register("first", KEY)
    assert (again.node.id, again.node.approved) == (first.node.id, True)
    assert again.token != first.token
    stranger = await world.register("first", OTHER_KEY)
    assert stranger.node.id != first.node.id
    assert stranger.node.status == "pending"
    with pytest.raises(Conflict) as caught:
        await world.nodes.approve("first")
    assert first.node.id in caught.value.message
    assert (await world.nodes.approve(stranger.node.id)).approved
    with pytest.raises(Conflict):
        await world.nodes.approve(stranger.node.id)


async def test_a_key_that_up_vouches_for_is_approved_by_itself(world: World, time: Time) -> None:
    pending = await world.register("first", KEY)
    assert not pending.node.approved
    house = World(world.store, time, approve_keys=[KEY.verify_key.encode().hex()])
    assert (await house.register("first", KEY)).node.approved
    assert (await world.nodes.get(pending.node.id))[0].approved
    assert not (await house.register("second", OTHER_KEY)).node.approved


async def test_those_who_wait_for_approval_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse.frontend.nodes.MAX_PENDING", 2)
    await world.join("first", approve=False)
    await world.join("second", approve=False)
    with pytest.raises(Unavailable) as caught:
        await world.join("third", approve=False)
    assert caught.value.code == "resource_exhausted"
    await world.join("first", approve=False)


async def test_a_heartbeat_of_an_unknown_node_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.nodes.heartbeat("nobody", HEARTBEAT)


async def test_a_heartbeat_keeps_what_it_does_not_say_and_bounds_what_it_does(world: World) -> None:
    node = await world.join("first")
    await world.nodes.heartbeat(node.id, wire.HeartbeatRequest(available_ram=5, total_disk=2**90, gpu_vendor="v" * 99))
    await world.nodes.heartbeat(node.id, wire.HeartbeatRequest(available_ram=0, available_disk=-3))
    capacity = (await world.nodes.get(node.id))[0].capacity
    assert (capacity.cores, capacity.available_ram, capacity.available_disk) == (2, 0, 0)
    assert (capacity.total_disk, len(capacity.gpu_vendor)) == (2**63 - 1, 64)


# Health ------------------------------------------------------------------------------------------


async def pass_time(world: World, seconds: float, *, heartbeats_of: tuple[str, ...] = ()) -> None:
    """Let time pass as a frontend lives it: looking every few seconds."""
    for _ in range(int(seconds / 3)):
        world.time.passed += 3
        for node_id in heartbeats_of:
            await world.nodes.heartbeat(node_id, HEARTBEAT)
        await world.nodes.step()


async def test_silence_makes_a_node_unhealthy_then_offline_and_a_heartbeat_heals_it(world: World) -> None:
    silent, alive = await world.join_many("silent", "alive")
    await world.nodes.step()
    await pass_time(world, STALE_SECONDS - 3, heartbeats_of=(alive.id,))
    assert await world.health(silent.id) == "healthy"
    await pass_time(world, 6, heartbeats_of=(alive.id,))
    assert (await world.health(silent.id), await world.health(alive.id)) == ("unhealthy", "healthy")
    await pass_time(world, STALE_SECONDS, heartbeats_of=(alive.id,))
    assert await world.health(silent.id) == "offline"
    await world.nodes.heartbeat(silent.id, HEARTBEAT)
    assert await world.health(silent.id) == "healthy"


async def test_a_frontend_that_just_started_waits_before_it_judges(world: World, time: Time) -> None:
    node = await world.join("first")
    time.passed += 10 * STALE_SECONDS
    await world.nodes.step()
    assert await world.health(node.id) == "healthy"
    await pass_time(world, STALE_SECONDS + 3)
    assert await world.health(node.id) == "unhealthy"


async def test_a_pause_of_the_observer_proves_nothing_against_the_observed(world: World, time: Time) -> None:
    node = await world.join("first")
    await world.nodes.step()
    time.passed += 10 * STALE_SECONDS
    await world.nodes.step()
    await pass_time(world, STALE_SECONDS - 3)
    assert await world.health(node.id) == "healthy"


async def test_most_of_a_fleet_lost_at_once_is_believed_only_after_a_second_look(world: World) -> None:
    fleet = await world.join_many("a", "b", "c", "d")
    await world.nodes.step()
    await pass_time(world, 2 * STALE_SECONDS + 6)
    assert {await world.health(node.id) for node in fleet} == {"unhealthy"}
    await pass_time(world, STALE_SECONDS)
    assert {await world.health(node.id) for node in fleet} == {"offline"}


async def test_a_node_that_says_goodbye_is_offline_and_its_replicas_are_gone(world: World) -> None:
    node = await world.join("first")
    replica = Replica(node_id=node.id, model="tiny", slot=0, revision="r", address="h:1", nonce="n", backend="engine")
    await world.store.transaction(lambda c: replicas.put(c, replica, 1.0))
    await world.nodes.set_health(node.id, "offline")
    assert await world.health(node.id) == "offline"
    assert await world.store.transaction(replicas.every) == []


async def test_registering_again_does_not_touch_the_health(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "offline")
    await world.nodes.register(registration("first"))
    assert await world.health(node.id) == "offline"


async def test_a_node_without_its_bus_gets_no_commands_and_is_never_offline_while_it_is_heard(
    world: World, time: Time
) -> None:
    node = await world.join("first")
    away = wire.HeartbeatRequest(bus="away")
    await world.nodes.step()
    for _ in range(8):
        time.passed += STALE_SECONDS / 2.5
        await world.nodes.heartbeat(node.id, away)
        await world.nodes.step()
    found, _ = await world.nodes.get(node.id)
    assert (found.health, found.is_degraded, found.is_schedulable) == ("unhealthy", True, False)
    wished = await world.install("first")
    await world.dispatcher.step()
    assert world.bus.take() == []
    rows = (await world.board.view(wished.jobID)).nodes
    assert not isinstance(rows, msgspec.UnsetType)
    (row,) = rows
    assert (row.status, row.reason) == ("queued", "node_away")
    assert "bus" in str(row.error)
    await world.nodes.heartbeat(node.id, HEARTBEAT)
    found, _ = await world.nodes.get(node.id)
    assert (found.health, found.is_degraded) == ("healthy", False)
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1


async def test_the_bus_is_away_when_every_node_that_is_heard_says_so(world: World, time: Time) -> None:
    first, second = await world.join_many("first", "second")
    await world.join("foreign", is_foreign=True)
    away = wire.HeartbeatRequest(bus="away")
    await world.nodes.step()
    assert not world.nodes.is_bus_away
    await world.nodes.heartbeat(first.id, away)
    await world.nodes.step()
    assert not world.nodes.is_bus_away, "one has it"
    await world.nodes.heartbeat(second.id, away)
    await world.nodes.step()
    assert world.nodes.is_bus_away
    time.passed += 2 * STALE_SECONDS
    await world.nodes.step()
    assert not world.nodes.is_bus_away, "nobody is heard"


async def test_a_node_that_comes_back_without_its_bus_keeps_its_routes(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "offline")
    await world.nodes.heartbeat(node.id, wire.HeartbeatRequest(bus="away"))
    assert (await world.nodes.get(node.id))[0].health == "unhealthy"
