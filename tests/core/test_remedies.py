"""What would have to change so that a model fits: said per node, the easiest first, and never what does not help."""

from __future__ import annotations

import msgspec
from tests.core.test_loading import BUILD, MODEL, node

from enginehouse.core.capacity import Capacity
from enginehouse.core.demand import Demand
from enginehouse.core.ids import NodeId
from enginehouse.core.model import ModelFile
from enginehouse.core.placement import Needs, Reservation, Room
from enginehouse.core.remedies import remedies
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import Report

GIB = 1024**3
ROOMY = Capacity(available_ram=16 * GIB, total_ram=16 * GIB, available_disk=100 * GIB)
TIGHT = Capacity(available_ram=3 * GIB, total_ram=16 * GIB, available_disk=100 * GIB)


def needs(gib: int = 5, **fields: object) -> Needs:
    demand = Demand(memory_bytes=gib * GIB, origin="configured")
    builds = {NodeId(name): BUILD for name in "abcdef"}
    return msgspec.structs.replace(Needs(model=MODEL, demand=demand, builds=builds), **fields)


def room(name: str, capacity: Capacity = ROOMY, **fields: object) -> Room:
    return Room(node=node(name, capacity=capacity, **fields))


def test_each_obstacle_has_a_remedy_that_is_enough() -> None:
    assert remedies(needs(), [room("a", drained=True)]) == ("a: resume it (enginehouse nodes resume a)",)
    assert remedies(needs(), [room("a", health="offline")]) == ("a: it has to come back",)
    assert remedies(needs(), [room("a", approved=False)]) == ("a: approve it (enginehouse nodes approve a)",)
    labelled = needs(selector={"zone": "x y"})
    assert remedies(labelled, [room("a")]) == ("a: label it (enginehouse nodes label a 'zone=x y')",)
    full = msgspec.structs.replace(room("a"), slots=(0,))
    assert remedies(needs(may_replace=False), [full]) == ("a: start its worker with --max-replicas-per-model 2",)
    assert remedies(needs(), [room("a", TIGHT)]) == ("a: free 2.0 GiB of its memory",)


def test_several_obstacles_of_one_node_are_named_together_and_the_easiest_node_first() -> None:
    found = remedies(needs(), [room("a", TIGHT, drained=True, health="offline"), room("b", TIGHT)])
    assert found == (
        "b: free 2.0 GiB of its memory",
        "a: resume it (enginehouse nodes resume a), then it has to come back, then free 2.0 GiB of its memory",
    )


def test_the_model_that_holds_enough_is_named() -> None:
    held = Report(
        replicas=tuple(
            RunningReplica(model_id=name, replica_index=0, address="h:1", nonce=name, generation=1, memory_bytes=size)
            for name, size in (("small", GIB), ("right", 2 * GIB), ("large", 8 * GIB))
        )
    )
    (found,) = remedies(needs(), [room("a", TIGHT, report=held)])
    assert found == "a: free 2.0 GiB of its memory (enginehouse models unload right would)"


def test_what_is_reserved_for_loads_becomes_free_by_itself() -> None:
    other = Reservation(operation_id="o", node_id=NodeId("a"), model="other", slot=0, memory_bytes=13 * GIB)
    (found,) = remedies(needs(), [msgspec.structs.replace(room("a"), reserved=(other,))])
    assert found == "a: its loads have to end"


def test_a_machine_that_can_never_take_the_model_is_not_named() -> None:
    small = room("a", Capacity(available_ram=2 * GIB, total_ram=4 * GIB))
    unable = room("z")
    want = "add a node with 5.0 GiB of free memory that can run llama-cpp (enginehouse nodes add)"
    assert remedies(needs(), [small, unable]) == (want,)
    assert remedies(needs(), []) == (want,)
    files = (ModelFile("m.gguf", "https://x/m.gguf", "ab", 200 * GIB),)
    bulky = needs(model=msgspec.structs.replace(MODEL, files=files))
    disk = msgspec.structs.replace(ROOMY, total_disk=100 * GIB)
    assert remedies(bulky, [room("a", disk)]) == (want,)
    assert remedies(bulky, [room("a")]) == ("a: free 110.0 GiB of its disk",)
    implied = needs(selector={"gpu.vendor": "nvidia"})
    assert remedies(implied, [room("a")]) == (want,)
