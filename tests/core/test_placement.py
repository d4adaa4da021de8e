"""Where a replica goes, and why not elsewhere."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_loading import BUILD, INSTALLED, MODEL, POINTER, node

from enginehouse.core.backend import Resolved
from enginehouse.core.capacity import Capacity, GraphicsCard
from enginehouse.core.demand import Demand, configured_memory, demand_of, disk_needed, missing_bytes
from enginehouse.core.ids import NodeId
from enginehouse.core.model import HeldModel, Model, ModelFile, ModelOptions
from enginehouse.core.node import Node
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.placement import (
    LOADS_PER_NODE,
    IdleReplica,
    Needs,
    NoRoom,
    Placement,
    Reservation,
    Room,
    explanation,
    free_memory,
    place,
    selects,
)
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report

GIB = 1024**3
LARGE = msgspec.structs.replace(MODEL, files=(ModelFile("f", "builtin:f", "0" * 64, 4 * GIB),))


def needs(model: Model, *nodes: Node, **fields: object) -> Needs:
    plain = {"model": model, "demand": demand_of(model), "builds": {one.id: BUILD for one in nodes}}
    return Needs(**(plain | fields))  # type: ignore[arg-type]


def chosen(model: Model, *nodes: Node, **fields: object) -> str:
    found = place(needs(model, *nodes, **fields), [Room(node=one) for one in nodes])
    return found.node_id if isinstance(found, Placement) else explanation(needs(model, *nodes, **fields), found)


def reserved(model: str, memory: int, at: str = "a", slot: int = 0, settled_at: float = 0.0) -> Reservation:
    return Reservation(
        operation_id=f"{model}{slot}",
        node_id=NodeId(at),
        model=model,
        slot=slot,
        memory_bytes=memory,
        settled_at=settled_at,
    )


def ram(gib: float, **fields: object) -> Capacity:
    return Capacity(available_ram=int(gib * GIB), **fields)  # type: ignore[arg-type]


def test_a_warm_node_is_preferred_to_a_cold_one_and_an_idle_to_a_busy_one() -> None:
    other = RunningReplica(model_id="other", replica_index=0)
    warm = node("z", report=Report(backends=(INSTALLED, POINTER), replicas=(other,)))
    assert chosen(MODEL, node("a"), warm) == "z"
    busy = node("a", report=Report(replicas=(other,)))
    assert chosen(MODEL, busy, node("b")) == "b"


def test_a_node_without_room_for_the_model_is_refused_in_numbers() -> None:
    """F-074."""
    warm = Report(backends=(INSTALLED, POINTER))
    full = node("a", report=warm, capacity=ram(1))
    assert chosen(LARGE, full, node("b", capacity=ram(8))) == "b"
    assert chosen(MODEL, full, node("b", capacity=ram(8))) == "a"
    told = chosen(LARGE, full)
    assert "a needs 5.2 GiB of memory, 1.0 GiB free" in told


@pytest.mark.parametrize(
    "capacity",
    [Capacity(), Capacity(available_vram=GIB, total_vram=2 * GIB), ram(1, available_vram=8 * GIB, total_vram=8 * GIB)],
)
def test_unknown_memory_is_not_full_and_that_of_a_card_counts(capacity: Capacity) -> None:
    """F-074."""
    assert chosen(LARGE, node("a", capacity=capacity)) == "a"


def test_a_card_that_shares_the_machines_memory_counts_once() -> None:
    shared = Capacity(
        available_ram=6 * GIB, total_ram=16 * GIB, available_vram=6 * GIB, total_vram=16 * GIB, gpu_vendor="apple"
    )
    assert free_memory(shared) == 6 * GIB


def test_the_disk_must_have_room_for_what_is_fetched() -> None:
    """F-074."""
    told = chosen(LARGE, node("a", capacity=Capacity(available_disk=4 * GIB)))
    assert "a needs 5.0 GiB of disk, 4.0 GiB free" in told
    held = Report(models=(HeldModel("m", ("0" * 64,)),))
    assert chosen(LARGE, node("a", report=held, capacity=Capacity(available_disk=GIB))) == "a"
    assert missing_bytes(msgspec.structs.replace(LARGE, files=(ModelFile("f", "file:/x/f", "1", 9),)), ()) == 0
    assert disk_needed(0) == 0


def test_memory_that_another_load_has_reserved_is_not_promised_again() -> None:
    one = node("a", capacity=ram(8))
    wanted = needs(LARGE, one)
    room = Room(node=one, reserved=(reserved("qwen", 4 * GIB),))
    found = place(wanted, [room])
    assert isinstance(found, NoRoom)
    assert found.is_temporary
    assert "8.0 GiB free, 4.0 GiB reserved for qwen" in explanation(wanted, found)
    # What a heartbeat has shown is not named: it is no longer free.
    heard = msgspec.structs.replace(one, last_heartbeat=9.0)
    both = Room(node=heard, reserved=(reserved("llama", GIB, settled_at=8.0), reserved("qwen", 4 * GIB)))
    found = place(wanted, [both])
    assert isinstance(found, NoRoom)
    assert "reserved for qwen" in explanation(wanted, found)
    # Its replica is ready, and a heartbeat since then shows its memory as used.
    settled = Room(
        node=msgspec.structs.replace(one, last_heartbeat=9.0), reserved=(reserved("qwen", 4 * GIB, settled_at=8.0),)
    )
    assert isinstance(place(wanted, [settled]), Placement)
    # A heartbeat that was long on its way is from before the replica, whenever it arrived.
    for report, fits in (
        (Report(boot_id="b", mark=7.0), False),
        (Report(boot_id="b", mark=8.5), True),
        (Report(boot_id="b", mark=7.0, replicas=(RunningReplica(model_id="qwen", replica_index=0),)), True),
    ):
        late = msgspec.structs.replace(settled, node=msgspec.structs.replace(settled.node, report=report))
        assert isinstance(place(wanted, [late]), Placement) == fits


def test_few_loads_at_once_on_one_node() -> None:
    one = node("a")
    many = tuple(reserved(f"m{number}", 0) for number in range(LOADS_PER_NODE))
    found = place(needs(MODEL, one), [Room(node=one, reserved=many)])
    assert isinstance(found, NoRoom)
    assert found.is_temporary
    ready = tuple(msgspec.structs.replace(each, settled_at=1.0) for each in many)
    assert isinstance(place(needs(MODEL, one), [Room(node=one, reserved=ready)]), Placement)


def test_each_replica_has_a_slot_of_its_own() -> None:
    one = node("a", max_replicas_per_model=3)
    wanted = needs(MODEL, one, may_replace=False)
    room = Room(node=one, slots=(0,), reserved=(reserved("m", 0, slot=1), reserved("other", 0, slot=2)))
    assert place(wanted, [msgspec.structs.replace(room, reserved=room.reserved[:1])]) == Placement(
        node_id=one.id, slot=2
    )
    full = place(wanted, [Room(node=one, slots=(0, 1, 2))])
    assert isinstance(full, NoRoom)
    assert "already runs 3 replicas of it, and --max-replicas-per-model" in explanation(wanted, full)


def test_a_replica_beyond_the_number_of_slots_takes_one_of_them() -> None:
    """A replacement is started beside the old replica, in a slot that there is only for that."""
    one = node("a")
    replaced = Room(node=one, slots=(1,))
    assert isinstance(place(needs(MODEL, one, may_replace=False), [replaced]), NoRoom)
    assert place(needs(MODEL, one), [replaced]) == Placement(node_id=one.id, slot=1)
    again = ReplacedReplica(node_id=one.id, slot=1, nonce="x")
    assert place(needs(MODEL, one, may_replace=False, replaces=again), [replaced]) == Placement(node_id=one.id, slot=0)


def test_a_replica_that_cannot_be_reached_may_be_replaced_where_there_is_no_better_node() -> None:
    running = Report(replicas=(RunningReplica(model_id="m", replica_index=0),))
    assert chosen(MODEL, node("a", report=running), node("b")) == "b"
    one = node("a", report=running)
    assert place(needs(MODEL, one), [Room(node=one, slots=(0,))]) == Placement(node_id=one.id, slot=0)


def test_the_least_recently_used_idle_replicas_make_room_and_no_more_of_them_than_needed() -> None:
    one = node("a", capacity=ram(1))
    idle = tuple(IdleReplica(model=f"m{n}", slot=0, memory_bytes=3 * GIB, used_at=float(n)) for n in range(3))
    found = place(needs(LARGE, one), [Room(node=one, idle=idle)])
    assert isinstance(found, Placement)
    assert [stop.model for stop in found.stops] == ["m0", "m1"]
    assert isinstance(place(needs(LARGE, one), [Room(node=one, idle=idle[:1])]), NoRoom)


def test_no_replica_is_stopped_while_another_node_has_room() -> None:
    full, roomy = node("a", capacity=ram(1)), node("b", capacity=ram(9))
    idle = (IdleReplica(model="x", slot=0, memory_bytes=9 * GIB, used_at=0.0),)
    found = place(needs(LARGE, full, roomy), [Room(node=full, idle=idle), Room(node=roomy)])
    assert found == Placement(node_id=roomy.id, slot=0)


def test_a_selector_wants_every_label_and_knows_what_a_node_is() -> None:
    one = node("a", labels={"zone": "attic"}, platform="linux/arm64", capacity=Capacity(gpu_vendor="nvidia"))
    assert selects({"zone": "attic", "node.arch": "arm64", "gpu.vendor": "nvidia", "node.name": "a"}, one)
    assert not selects({"zone": "cellar"}, one)
    assert not selects({"rack": ""}, one)
    assert "a does not have the labels zone=cellar" in chosen(MODEL, one, selector={"zone": "cellar"})


def test_models_of_one_concurrency_group_are_kept_apart_where_that_is_possible() -> None:
    one, other = node("a"), node("b")
    rooms = [Room(node=one, neighbours=("x",)), Room(node=other)]
    assert place(needs(MODEL, one, other), rooms) == Placement(node_id=other.id, slot=0)
    assert place(needs(MODEL, one), rooms[:1]) == Placement(node_id=one.id, slot=0)


def test_no_node_to_choose_names_the_reason_of_each() -> None:
    nodes = [
        node("new", approved=False),
        node("gone", health="offline"),
        node("out", drained=True),
        node("old"),
        node("bad"),
    ]
    able = {one.id: BUILD for one in nodes if one.name != "old"}
    told = chosen(MODEL, *nodes, builds=able, avoid={NodeId("bad")})
    for reason in (
        "new waits for approval",
        "gone is offline",
        "out is drained",
        "old cannot run llama-cpp",
        "bad failed to start it",
    ):
        assert reason in told


def test_no_node_to_choose_counts_a_crowd_that_waits_for_approval() -> None:
    nodes = [*(node(f"junk{number}", approved=False) for number in range(30)), node("gone", health="offline")]
    told = chosen(MODEL, *nodes)
    assert told.count("waits for approval") == 10
    assert told.endswith("gone is offline; 20 more wait for approval")
    assert "`enginehouse nodes add`" in chosen(MODEL)


def test_a_demand_is_configured_measured_or_estimated_in_this_order() -> None:
    assert demand_of(LARGE).origin == "estimated"
    assert demand_of(LARGE, 7) == Demand(memory_bytes=7, origin="measured")
    said = msgspec.structs.replace(LARGE, config={"memory": "6 GiB"})
    assert demand_of(said, 7) == Demand(memory_bytes=6 * GIB, origin="configured")
    assert demand_of(MODEL) == Demand()
    long = msgspec.structs.replace(LARGE, cache_bytes_per_token=1024, options=ModelOptions(context_size=1024**2))
    assert demand_of(long).memory_bytes >= 5 * GIB


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (5, 5),
        (-1, 0),
        (True, 0),
        ("2G", 2 * GIB),
        ("1.5 GiB", int(1.5 * GIB)),
        ("7", 7),
        ("much", 0),
        (None, 0),
        ("9" * 40, 0),
    ],
)
def test_a_configured_amount_is_read_or_ignored(said: object, expected: int) -> None:
    assert configured_memory(msgspec.structs.replace(MODEL, config={"memory": said})) == expected


_ROOMS = st.lists(
    st.tuples(
        st.integers(0, 12),  # GiB free, 0 is unknown
        st.integers(0, 6),  # GiB reserved
        st.lists(st.integers(0, 6), max_size=3),  # GiB of idle replicas
        st.integers(1, 3),
        st.sets(st.integers(0, 2), max_size=3),
    ),
    max_size=6,
)


@given(_ROOMS, st.integers(0, 9), st.booleans())
@settings(deadline=None, max_examples=300)
def test_a_placement_never_exceeds_what_is_free(
    rooms: list[tuple[int, int, list[int], int, set[int]]], wanted: int, may_replace: bool
) -> None:
    made = [
        Room(
            node=node(f"n{number}", capacity=ram(free), max_replicas_per_model=slots),
            slots=tuple(taken),
            reserved=(reserved("other", held * GIB, at=f"n{number}"),),
            idle=tuple(
                IdleReplica(model="idle", slot=n, memory_bytes=one * GIB, used_at=n) for n, one in enumerate(idle)
            ),
        )
        for number, (free, held, idle, slots, taken) in enumerate(rooms)
    ]
    demand = Demand(memory_bytes=wanted * GIB, origin="configured")
    found = place(needs(MODEL, *(room.node for room in made), demand=demand, may_replace=may_replace), made)
    if isinstance(found, NoRoom):
        assert len(found.rejections) == len(made)
        return
    room = next(one for one in made if one.node.id == found.node_id)
    assert found.slot in room.slots or len(room.slots) < room.node.max_replicas_per_model
    assert may_replace or found.slot not in room.slots
    if room.node.capacity.available_ram and wanted:
        gained = sum(stop.memory_bytes for stop in found.stops)
        free = room.node.capacity.available_ram - room.reserved_bytes()
        assert wanted * GIB <= free + gained
        if found.stops:
            assert wanted * GIB > free + gained - found.stops[-1].memory_bytes  # one stop less would not do


ON_CARD = Resolved(directory="cuda12-vllm", uri="registry.example/vllm:1", digest="sha256:v")
SPLITTING = Resolved(directory="cuda12-llama-cpp", uri="registry.example/llama:1", digest="sha256:l")


def with_cards(*free_gib: float | None, total_gib: float = 24) -> Node:
    """A machine with much memory of its own; None is a card whose free memory is unknown."""
    cards = tuple(
        GraphicsCard(
            index=index, total_vram=int(total_gib * GIB), available_vram=None if free is None else int(free * GIB)
        )
        for index, free in enumerate(free_gib)
    )
    total, free = len(cards) * int(total_gib * GIB), sum(card.available_vram or 0 for card in cards)
    capacity = ram(64, total_vram=total, available_vram=free, gpu_vendor="nvidia", gpu_cards=cards)
    return node("a", capacity=capacity)


def placed_on(one: Node, build: Resolved, model: Model = LARGE, **room: object) -> str:
    wanted = needs(model, one, builds={one.id: build})
    found = place(wanted, [Room(node=one, **room)])  # type: ignore[arg-type]
    return found.node_id if isinstance(found, Placement) else explanation(wanted, found)


def test_a_replica_on_one_card_needs_one_card_with_room_and_the_reason_has_numbers() -> None:
    assert placed_on(with_cards(3, 6), ON_CARD) == "a"
    told = placed_on(with_cards(3.9, 3), ON_CARD)
    assert "a needs 5.2 GiB of VRAM on one card, 3.9 GiB free on the best of 2" in told


@pytest.mark.parametrize(
    ("one", "build"),
    [
        (with_cards(3.9, 3), SPLITTING),
        (with_cards(3.9), ON_CARD),
        (with_cards(3.9, None), ON_CARD),
        (with_cards(3.9, 3), BUILD),
    ],
)
def test_engines_that_split_and_machines_with_one_card_or_unknown_ones_are_judged_by_the_sum(
    one: Node, build: Resolved
) -> None:
    assert placed_on(one, build) == "a"


def test_a_model_that_spreads_itself_needs_no_single_card() -> None:
    spread = msgspec.structs.replace(LARGE, config={"tensor_parallel_size": 2})
    assert placed_on(with_cards(3.9, 3), ON_CARD, spread) == "a"


def test_loads_under_way_take_the_best_cards_first() -> None:
    two = with_cards(8, 7)
    assert placed_on(two, ON_CARD, reserved=(reserved("other", 5 * GIB),)) == "a", "the second card is left"
    both = (reserved("other", 5 * GIB), reserved("third", 5 * GIB))
    wanted = needs(LARGE, two, builds={two.id: ON_CARD})
    found = place(wanted, [Room(node=two, reserved=both[:1]), Room(node=with_cards(8, 7), reserved=both)])
    assert isinstance(found, Placement)
    full = place(wanted, [Room(node=two, reserved=both)])
    assert isinstance(full, NoRoom)
    assert full.is_temporary
    assert "3.0 GiB free on the best of 2" in explanation(wanted, full)


def test_idle_replicas_make_room_on_a_card_unless_no_card_is_large_enough() -> None:
    idle = (IdleReplica(model="old", slot=0, memory_bytes=2 * GIB, used_at=1.0),)
    one = with_cards(3.9, 3)
    found = place(needs(LARGE, one, builds={one.id: ON_CARD}), [Room(node=one, idle=idle)])
    assert isinstance(found, Placement)
    assert found.stops == idle
    small = with_cards(3.9, 3, total_gib=4)
    assert "on one card" in placed_on(small, ON_CARD, idle=idle)


def test_what_was_measured_counts_on_a_card_at_least_as_much_as_the_weights() -> None:
    one = with_cards(3.9, 3)
    wanted = needs(LARGE, one, builds={one.id: ON_CARD}, demand=Demand(memory_bytes=GIB, origin="measured"))
    assert isinstance(place(wanted, [Room(node=one)]), NoRoom)
    said = needs(LARGE, one, builds={one.id: ON_CARD}, demand=Demand(memory_bytes=GIB, origin="configured"))
    assert isinstance(place(said, [Room(node=one)]), Placement)
