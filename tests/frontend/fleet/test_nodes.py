"""Registration, approval and health."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
from nacl.signing import SigningKey
from tests.frontend.world import STALE_SECONDS, Time, World, registration, signed

from enginehouse.core import node_api
from enginehouse.core.address import Endpoint
from enginehouse.core.capacity import GraphicsCard
from enginehouse.core.errors import Conflict, Denied, Invalid, NotFound, Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.node_identity import JoinOrigin
from enginehouse.core.replica import Replica
from enginehouse.core.report import Report
from enginehouse.frontend.fleet import nodes as fleet_nodes
from enginehouse.frontend.fleet.nodes import REGISTRATIONS_AT_ONCE, AddressRules
from enginehouse.store import replicas
from enginehouse.store.db import Connection

T = TypeVar("T")

KEY = SigningKey(b"1" * 32)
OTHER_KEY = SigningKey(b"2" * 32)
HEARTBEAT = node_api.HeartbeatRequest()


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
        {"gpu_cards": (GraphicsCard(name="c" * 65),)},
        {"gpu_cards": (GraphicsCard(total_vram=-1),)},
        {"gpu_cards": (GraphicsCard(),) * 65},
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
    good = await world.signed("first", KEY)
    for request in (
        await world.signed("first", OTHER_KEY, public_key=public),
        msgspec.structs.replace(good, signature=""),
        msgspec.structs.replace(good, name="second"),
        msgspec.structs.replace(good, address="10.0.0.66:50051"),
        msgspec.structs.replace(good, http_address="10.0.0.66:50050"),
        msgspec.structs.replace(good, challenge=await world.nodes.challenge()),
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
    # A stranger does not make the node's name ambiguous: it means the one that is approved.
    assert (await world.nodes.get("first"))[0].id == first.node.id
    assert (await world.nodes.approve("first"))[0].id == stranger.node.id
    with pytest.raises(Conflict):
        await world.nodes.approve(stranger.node.id)
    with pytest.raises(Conflict) as caught:
        await world.nodes.get("first")
    assert first.node.id in caught.value.message


async def test_a_key_that_up_vouches_for_is_approved_by_itself(world: World, time: Time) -> None:
    pending = await world.register("first", KEY)
    assert not pending.node.approved
    cluster = World(world.store, time, approve_keys=[KEY.verify_key.encode().hex()])
    assert (await cluster.register("first", KEY)).node.approved
    assert (await world.nodes.get(pending.node.id))[0].approved
    assert not (await cluster.register("second", OTHER_KEY)).node.approved


async def test_those_who_wait_for_approval_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("enginehouse.frontend.fleet.nodes.MAX_PENDING", 2)
    await world.join("first", approve=False)
    await world.join("second", approve=False)
    await world.join("first", approve=False)  # it asks again, as a machine does that is there
    await world.join("third", approve=False)
    assert {node.name for node in (await world.nodes.every())[0]} == {"first", "third"}
    await world.nodes.approve("third")
    await world.join("fourth", approve=False)
    assert {node.name for node in (await world.nodes.every())[0]} == {"first", "third", "fourth"}


async def test_a_flood_of_requests_to_join_does_not_keep_a_new_machine_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginehouse.frontend.fleet.nodes.MAX_PENDING", 20)
    real = await world.register("real", KEY)
    for number in range(50):
        await world.nodes.register(registration(f"junk{number}"))
        if number % 10 == 0:
            real = await world.register("real", KEY)
    assert len((await world.nodes.every())[0]) == 20
    assert (await world.nodes.approve("real"))[0].id == real.node.id


async def test_labels_of_a_stranger_are_small(world: World) -> None:
    with pytest.raises(Invalid):
        await world.nodes.register(registration("first", labels={f"a{number}": "x" * 256 for number in range(64)}))


async def test_a_recorded_registration_cannot_be_sent_again(world: World, time: Time) -> None:
    recorded = await world.signed("first", KEY)
    first = await world.nodes.register(recorded)
    for passed in (0.0, 30.0, 3600.0):
        time.passed += passed
        with pytest.raises(Conflict) as caught:
            await world.nodes.register(recorded)
        assert caught.value.code == "challenge_refused"
    assert (await world.nodes.get("first"))[0].registered_at == first.node.registered_at


@pytest.mark.parametrize("challenge", ["", "x", "1/2/3", "nan/x/y", "9999999999.0/nonce/" + "0" * 64])
async def test_a_challenge_that_nobody_gave_out_is_refused(world: World, challenge: str) -> None:
    await world.nodes.challenge()
    with pytest.raises(Conflict) as caught:
        await world.nodes.register(signed("first", KEY, challenge=challenge))
    assert caught.value.code == "challenge_refused"


async def test_an_old_challenge_is_refused(world: World, time: Time) -> None:
    request = await world.signed("first", KEY)
    time.passed += 61.0
    with pytest.raises(Conflict):
        await world.nodes.register(request)


async def test_a_registration_that_comes_late_does_not_replace_the_token_of_a_later_one(world: World) -> None:
    """As of a frontend that was frozen with it in its buffer."""
    kept = await world.signed("first", KEY)
    later = await world.register("first", KEY)
    with pytest.raises(Conflict) as caught:
        await world.nodes.register(kept)
    assert caught.value.code == "challenge_refused"
    await world.keys.step()
    assert world.keys.identify(later.token) is not None


async def test_a_crowd_that_registers_leaves_room_for_other_transactions(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{number}" for number in range(12)]
    keys = [SigningKey(bytes([number + 1]) * 32) for number in range(12)]
    asked = [await world.signed(name, key) for name, key in zip(names, keys, strict=True)]
    under_way, most = 0, 0
    really = world.store.transaction

    async def counted(work: Callable[[Connection], T]) -> T:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        try:
            return await really(work)
        finally:
            under_way -= 1

    monkeypatch.setattr(world.store, "transaction", counted)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(world.nodes.register(one)) for one in asked]
    assert sorted(task.result().node.name for task in tasks) == sorted(names)
    assert most == REGISTRATIONS_AT_ONCE


async def test_a_registration_that_would_wait_too_long_is_told_to_come_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_nodes, "REGISTRATION_WAIT_SECONDS", 0.05)
    held = asyncio.Event()
    really = world.store.transaction

    async def waiting(work: Callable[[Connection], T]) -> T:
        await held.wait()
        return await really(work)

    key = SigningKey(b"1" * 32)
    asked = [await world.signed(f"n{number}", key) for number in range(REGISTRATIONS_AT_ONCE + 1)]
    monkeypatch.setattr(world.store, "transaction", waiting)
    async with asyncio.TaskGroup() as group:
        first = [group.create_task(world.nodes.register(one)) for one in asked[:-1]]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="too many machines register") as caught:
            await world.nodes.register(asked[-1])
        held.set()
    assert caught.value.retry_after_seconds
    assert all(task.result().token for task in first)
    assert (await world.nodes.register(await world.signed("n2", key))).token, "the next one has its turn again"


async def test_an_approval_is_for_an_address(world: World) -> None:
    await world.nodes.register(await world.signed("first", KEY, address="10.0.0.5:50051"))
    await world.nodes.approve("first")
    moved = await world.nodes.register(await world.signed("first", KEY, address="10.0.0.66:50051"))
    assert (moved.node.status, moved.node.address) == ("pending", "10.0.0.66:50051")
    assert "10.0.0.5:50051" in moved.node.waits_for
    again = await world.nodes.register(await world.signed("first", KEY, address="10.0.0.66:50051"))
    assert (again.node.status, again.node.waits_for) == ("pending", moved.node.waits_for)
    assert (await world.nodes.approve("first"))[0].waits_for == ""
    other_port = await world.nodes.register(await world.signed("first", KEY, address="10.0.0.66:60000"))
    assert other_port.node.approved


async def test_a_rule_of_the_operator_lets_nodes_move_within_a_network(world: World, time: Time) -> None:
    cluster = World(world.store, time, addresses=AddressRules(("10.0.0.0/24", "fd00::/8")))
    await cluster.nodes.register(await cluster.signed("first", KEY, address="10.0.0.5:50051"))
    await cluster.nodes.approve("first")
    for address, approved in (("10.0.0.66:50051", True), ("[fd00::1]:50051", True), ("10.0.1.1:50051", False)):
        moved = await cluster.nodes.register(await cluster.signed("first", KEY, address=address))
        assert moved.node.approved == approved, address


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:50051",
        "localhost:50051",
        "[::1]:50051",
        "[::ffff:127.0.0.1]:50051",
        "169.254.169.254:80",
        "0.0.0.0:1",
        "[fe80::1]:1",
        "224.0.0.1:1",
        "resolves-to-loopback:50051",
    ],
)
async def test_addresses_that_are_no_machines_own_are_refused(world: World, time: Time, address: str) -> None:
    async def resolve(host: str) -> tuple[str, ...]:
        return ("127.0.0.2",) if host == "resolves-to-loopback" else ()

    cluster = World(world.store, time, addresses=AddressRules(resolve=resolve))
    elsewhere = JoinOrigin(host="10.0.0.9")
    for field in ("address", "http_address"):
        with pytest.raises(Invalid) as caught:
            await cluster.nodes.register(registration("first", **{field: address}), elsewhere)
        assert caught.value.code == "invalid_address"


@pytest.mark.parametrize("address", ["10.0.0.1:4222", "bus.lan:4222"])
async def test_an_address_at_which_the_bus_listens_is_no_nodes(world: World, time: Time, address: str) -> None:
    async def resolve(host: str) -> tuple[str, ...]:
        return ("10.0.0.1",) if host == "bus.lan" else ()

    rules = AddressRules(taken=frozenset({Endpoint("10.0.0.1", 4222)}), resolve=resolve)
    cluster = World(world.store, time, addresses=rules)
    with pytest.raises(Invalid) as caught:
        await cluster.nodes.register(registration("first", address=address), JoinOrigin(host="10.0.0.9"))
    assert caught.value.code == "invalid_address"
    await cluster.nodes.register(registration("first", address="10.0.0.1:50051"), JoinOrigin(host="10.0.0.1"))


async def test_loopback_is_an_address_where_the_frontend_was_reached_so(world: World) -> None:
    near = JoinOrigin(host="127.0.0.1")
    assert (await world.nodes.register(registration("first", address="127.0.0.1:50051"), near)).node.address


async def test_a_node_without_a_key_is_not_taken_over_by_its_name(world: World) -> None:
    shared = JoinOrigin(token_id="shared", host="10.0.0.5")
    first = await world.nodes.register(registration("go", address="10.0.0.5:50051"), shared)
    await world.nodes.approve("go")
    again = await world.nodes.register(registration("go", address="10.0.0.5:50051"), shared)
    assert (again.node.id, again.node.approved) == (first.node.id, True)
    for address, host in (("10.0.0.66:50051", "10.0.0.5"), ("10.0.0.5:50051", "10.0.0.66")):
        stranger = await world.nodes.register(
            registration("go", address=address), JoinOrigin(token_id="shared", host=host)
        )
        assert stranger.node.id != first.node.id
        assert not stranger.node.approved
    assert (await world.nodes.get("go"))[0].id == first.node.id
    await world.keys.step()
    assert world.keys.identify(again.token) is not None  # what it had goes on counting


async def test_a_join_token_for_one_node_is_that_node(world: World) -> None:
    own, shared = (
        JoinOrigin(token_id="own", only_node="go", host="10.0.0.5"),
        JoinOrigin(token_id="shared", host="10.0.0.5"),
    )
    before = await world.nodes.register(registration("go", address="10.0.0.5:50051"), shared)
    await world.nodes.approve("go")
    mine = await world.nodes.register(registration("go", address="10.0.0.5:50051"), own)
    assert (mine.node.id, mine.node.approved) == (before.node.id, True)
    with pytest.raises(Conflict) as caught:
        await world.nodes.register(registration("go", address="10.0.0.5:50051"), shared)
    assert caught.value.code == "identity_conflict"
    with pytest.raises(Denied):
        await world.nodes.register(registration("other", address="10.0.0.5:50051"), own)
    moved = await world.nodes.register(registration("go", address="10.0.0.7:50051"), own)
    assert (moved.node.id, moved.node.approved) == (before.node.id, False)


async def test_a_heartbeat_of_an_unknown_node_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.reports.heartbeat(NodeId("nobody"), HEARTBEAT)


async def test_a_heartbeat_keeps_what_it_does_not_say_and_bounds_what_it_does(world: World) -> None:
    node = await world.join("first")
    await world.reports.heartbeat(
        node.id, node_api.HeartbeatRequest(available_ram=5, total_disk=2**90, gpu_vendor="v" * 99)
    )
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(available_ram=0, available_disk=-3))
    capacity = (await world.nodes.get(node.id))[0].capacity
    assert (capacity.cores, capacity.available_ram, capacity.available_disk) == (2, 0, 0)
    assert (capacity.total_disk, len(capacity.gpu_vendor)) == (2**63 - 1, 64)


async def test_the_cores_in_use_are_those_of_the_last_heartbeat_or_unknown(world: World) -> None:
    node = await world.join("first")
    told = [1.25, -1.0, 1e12, None]
    shown = []
    for used in told:
        await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(used_cores=used))
        shown.append((await world.nodes.get(node.id))[0].capacity.used_cores)
    assert shown == [1.25, 0.0, 1_000_000.0, None]


async def test_a_heartbeat_that_tells_other_cores_in_use_changes_no_row_that_watchers_see(world: World) -> None:
    node = await world.join("first")
    before = (await world.nodes.get(node.id))[0].updated_at
    with world.events.watch() as watcher:
        await world.board.catch_up_step()  # that the node joined
        await world.board.step()
        watcher.skip()
        await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(used_cores=1.5))
        await world.board.step()
        await world.board.catch_up_step()
        assert [event for event in watcher.take() if event.kind == "node"] == []
    assert (await world.nodes.get(node.id))[0].updated_at == before


async def test_the_cards_of_a_registration_and_of_a_heartbeat_are_kept_with_what_is_unknown(world: World) -> None:
    first = GraphicsCard(name="A", total_vram=8, available_vram=5)
    second = GraphicsCard(index=1, total_vram=8)
    node = await world.nodes.register(registration("cards", gpu_cards=(first, second)))
    node_id = node.node.id
    assert (await world.nodes.get(node_id))[0].capacity.gpu_cards == (first, second)
    await world.reports.heartbeat(node_id, HEARTBEAT)
    assert (await world.nodes.get(node_id))[0].capacity.gpu_cards == (first, second), "an absent key keeps them"
    odd = GraphicsCard(index=-1, name="B\n" * 70, total_vram=2**90, available_vram=-4)
    await world.reports.heartbeat(node_id, node_api.HeartbeatRequest(gpu_cards=(odd,) * 70))
    kept = (await world.nodes.get(node_id))[0].capacity.gpu_cards
    assert len(kept) == 64
    assert kept[0] == GraphicsCard(index=0, name="B" * 64, total_vram=2**63 - 1, available_vram=0)
    await world.reports.heartbeat(node_id, node_api.HeartbeatRequest(gpu_cards=()))
    assert (await world.nodes.get(node_id))[0].capacity.gpu_cards == ()


# Health ------------------------------------------------------------------------------------------


async def pass_time(world: World, seconds: float, *, heartbeats_of: tuple[str, ...] = ()) -> None:
    """Let time pass as a frontend lives it: looking every few seconds."""
    for _ in range(int(seconds / 3)):
        world.time.passed += 3
        for node_id in heartbeats_of:
            await world.reports.heartbeat(NodeId(node_id), HEARTBEAT)
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
    await world.reports.heartbeat(silent.id, HEARTBEAT)
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
    away = node_api.HeartbeatRequest(bus="away")
    await world.nodes.step()
    for _ in range(8):
        time.passed += STALE_SECONDS / 2.5
        await world.reports.heartbeat(node.id, away)
        await world.nodes.step()
    found, _ = await world.nodes.get(node.id)
    assert (found.health, found.is_degraded, found.is_schedulable) == ("unhealthy", True, False)
    requested = await world.install("first")
    await world.dispatcher.step()
    assert world.bus.take() == []
    rows = (await world.board.view(requested.jobID)).nodes
    (row,) = rows
    assert (row.status, row.reason) == ("queued", "node_away")
    assert "NATS" in str(row.error)
    await world.reports.heartbeat(node.id, HEARTBEAT)
    found, _ = await world.nodes.get(node.id)
    assert (found.health, found.is_degraded) == ("healthy", False)
    await world.dispatcher.step()
    assert len(world.bus.take()) == 1


async def test_the_bus_is_away_when_every_node_that_is_heard_says_so(world: World, time: Time) -> None:
    first, second = await world.join_many("first", "second")
    await world.join("foreign", is_localai=True)
    away = node_api.HeartbeatRequest(bus="away")

    async def is_away() -> bool:
        await world.nodes.step()
        return world.nodes.is_bus_away

    assert not await is_away()
    await world.reports.heartbeat(first.id, away)
    assert not await is_away(), "one has it"
    await world.reports.heartbeat(second.id, away)
    assert await is_away()
    time.passed += 2 * STALE_SECONDS
    assert not await is_away(), "nobody is heard"


async def test_a_node_that_comes_back_without_its_bus_keeps_its_routes(world: World) -> None:
    node = await world.join("first")
    await world.set_health(node.id, "offline")
    await world.reports.heartbeat(node.id, node_api.HeartbeatRequest(bus="away"))
    assert (await world.nodes.get(node.id))[0].health == "unhealthy"


async def test_a_heartbeat_that_a_frozen_frontend_delivers_late_changes_nothing(world: World, time: Time) -> None:
    node = await world.join("first")
    early, later = (
        node_api.HeartbeatRequest(available_ram=free, report=Report(boot_id="b", sequence=number, mark=1.0))
        for number, free in ((1, 8_000), (2, 3_000))
    )
    await world.reports.heartbeat(node.id, later)
    heard, _ = await world.nodes.get(node.id)
    time.passed += 5
    await world.reports.heartbeat(node.id, early)
    after, _ = await world.nodes.get(node.id)
    assert after.capacity.available_ram == 3_000
    assert after.last_heartbeat == heard.last_heartbeat
