"""Deliberate faults of what serves: in loads, placement, reconciling and routes. Each must be noticed by its guarantee.

In the form of the other mutants. The weather and the script of a mutant make the moment likely in which it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from random import Random
from typing import Any

import msgspec
from msgspec import Struct
from tests.sim.mutation import Patch, in_place
from tests.sim.options import Fault
from tests.sim.run import Result
from tests.sim.serving.options import (
    MIB,
    Asking,
    ServingOptions,
    Wanted,
    Wish,
    WishKind,
    expand_serving,
)
from tests.sim.serving.run import run_serving

from enginehouse.core import loading, placement, reconcile
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.model import Model
from enginehouse.core.placement import Room
from enginehouse.core.reconcile import ModelFacts
from enginehouse.core.routing import Route
from enginehouse.frontend.delivery import reports
from enginehouse.frontend.fleet import nodes as fleet_nodes
from enginehouse.frontend.operations import request as requests
from enginehouse.frontend.serving import fleet_rows, loader, matches, reconciler, rooms, route_rows
from enginehouse.frontend.serving.fleet_rows import FleetRows, RowChanges
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.reconciler import Reconciler
from enginehouse.frontend.serving.router import Router
from enginehouse.store import replicas, reservations
from enginehouse.store.db import Connection

SEEDS = 12  # within which every mutant must be caught
Script = Callable[[Random], dict[str, Any]]


class ServingMutant(Struct, frozen=True, kw_only=True):
    name: str
    guarantees: tuple[str, ...]
    make: Callable[[], list[Patch]]
    script: Script | None = None  # fields of the options that replace those of the seed
    weather: dict[str, Any] = {}

    def options(self, seed: int) -> ServingOptions:
        options = expand_serving(seed)
        if self.script is None:
            return options
        calm = {"nodes": 2, "frontends": 2, "safety_seconds": 12.0, "faults": (), **CALM, **self.weather}
        weather = msgspec.structs.replace(options.weather, **calm)
        nodes = weather.nodes
        plain = {"memories": (1660 * MIB,) * nodes, "slots": (1,) * nodes, "wishes": (), "askings": ()}
        changed = {**plain, "calm_seconds": 25.0, "weather": weather, **self.script(Random(seed))}
        return msgspec.structs.replace(options, **changed)


CALM: dict[str, Any] = {
    **{"drop_rate": 0.0, "duplicate_rate": 0.0, "late_rate": 0.0, "reorder_rate": 0.0, "late_link_rate": 0.0},
    **{"collision_rate": 0.0, "unknown_rate": 0.0, "failing_rate": 0.0, "install_seconds": 0.5},
}


class CaughtServing(Struct, frozen=True):
    """The first run on which a mutant was noticed, and what the same run is without it."""

    with_it: Result
    without_it: Result


def catch_serving_mutant(name: str) -> CaughtServing | None:
    """In a child."""
    mutant = next(one for one in SERVING_MUTANTS if one.name == name)
    for seed in range(SEEDS):
        options = mutant.options(seed)
        with in_place(mutant.make):
            result = run_serving(options)
        if result.violation:
            return CaughtServing(result, run_serving(options))
    return None


def wish(number: int, at: float, kind: WishKind, model: str, node: int = -1, **wanted: Any) -> Wish:
    return Wish(
        number=number, at=at, kind=kind, model=model, frontend=number, node=node, wanted=Wanted(**wanted), about=0
    )


def asking(number: int, at: float, model: str, seconds: float = 0.1) -> Asking:
    return Asking(number=number, at=at, model=model, frontend=number, seconds=seconds)


# Loads ---------------------------------------------------------------------------------------------


def _every_request_loads() -> list[Patch]:
    def _open_or_new(self: Loader, connection: Connection, model: Model, only: NodeId | None, author: str) -> Any:
        return self._new(connection, model, only, author)

    async def ensure(self: Loader, model: str, dead: Collection[str], waiting_for: str = "") -> OperationId:
        found = await self.request(model, None, "loader")
        return found if isinstance(found, str) else OperationId("")

    return [(Loader, "_open_or_new", _open_or_new), (Loader, "ensure", ensure)]


def _many_at_once(chance: Random) -> dict[str, Any]:
    return {"askings": tuple(asking(number, 3.0 + chance.random(), "small") for number in range(6))}


def _loads_are_not_counted() -> list[Patch]:
    real = reconcile._missing

    def _missing(facts: ModelFacts) -> list[NodeId]:
        return real(msgspec.structs.replace(facts, loading=()))

    return [(reconcile, "_missing", _missing)]


def _least_of_two(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, chance.uniform(2.0, 4.0), "schedule", "small", least=2, most=2),)}


def _nobody_leaves_a_node() -> list[Patch]:
    return [(loading, "left_steps", lambda intents, nodes: []), (loading, "_is_out", lambda node: False)]


def _drained_while_loading(chance: Random) -> dict[str, Any]:
    at = chance.uniform(2.5, 3.5)
    return {
        "memories": (820 * MIB, 1660 * MIB),
        "wishes": (wish(0, 2.0, "load", "small"), *(wish(1 + one, at, "drain", "small", one) for one in (0, 1))),
    }


def _drained_nodes_are_not_emptied() -> list[Patch]:
    return [(reconciler, "steer_drains", lambda *_: []), (requests, "_staying", _everything_stays)]


def _everything_stays(connection: Connection, node_id: NodeId) -> set[str]:
    return {one.nonce for one, _ in replicas.on_node(connection, node_id)}


def _loaded_and_drained(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, 2.0, "load", "small"), wish(1, 12.0, "drain", "small", 0))}


def _answers_come_without_end() -> list[Patch]:
    real = Router.__init__

    def __init__(self: Router, *arguments: Any, **named: Any) -> None:
        real(self, *arguments, **{**named, "wait_seconds": None})

    return [(Router, "__init__", __init__)]


def _asked_of_nobody(chance: Random) -> dict[str, Any]:
    """The only node is cut off while it installs, so that the load goes on for longer than anybody waits."""
    return {"memories": (820 * MIB,), "slots": (1,), "askings": (asking(0, 2.0, "small"), asking(1, 2.2, "small"))}


# Memory --------------------------------------------------------------------------------------------


def _memory_is_not_compared() -> list[Patch]:
    return [(placement, "memory_short", lambda needs, room: "")]


def _reservations_are_not_counted() -> list[Patch]:
    return [(Room, "reserved_bytes", lambda self: 0)]


def _settled_at_once() -> list[Patch]:
    def settle(connection: Connection, operation_id: str, now: float, until: float) -> None:
        reservations.remove(connection, operation_id)

    return [(reservations, "settle", settle), (rooms, "_unseen", lambda connection, fleet: [])]


def _restarts_take_nothing() -> list[Patch]:
    return [(rooms, "_restarting", lambda *_: []), (rooms, "_unseen", lambda *_: [])]


def _late_heartbeats_count() -> list[Patch]:
    return [(fleet_nodes, "is_older", lambda report, known: False)]


def _too_many(chance: Random) -> dict[str, Any]:
    at = chance.uniform(2.0, 4.0)
    names = ("small", "middle", "large")
    loads = tuple(wish(number, at + chance.random() / 10, "load", name) for number, name in enumerate(names))
    return {"memories": (1000 * MIB,), "slots": (1,), "wishes": loads}


def _one_after_the_other(chance: Random) -> dict[str, Any]:
    """The second load is placed right when the first has ended, and before the next heartbeat."""
    loads = (wish(0, 2.0, "load", "large"), *(wish(1 + n, 2.3 + n / 4, "load", "small") for n in range(10)))
    return {"memories": (820 * MIB,), "slots": (1,), "wishes": loads}


def _while_it_restarts(chance: Random) -> dict[str, Any]:
    asked = tuple(asking(number, 14.2 + number / 2, "small") for number in range(4))
    return {
        **{"memories": (820 * MIB,), "slots": (1,), "restarts": True},
        **{"wishes": (wish(0, 2.0, "load", "large"),), "askings": asked},
    }


# Each pause before a restart is twice as long as the one before.
CRASHES = tuple(Fault(at=at, seconds=0.1, kind="crash_engine", target=0) for at in (6.0, 8.0, 10.5, 14.0))


# Minimum, busy -------------------------------------------------------------------------------------


def _room_from_anybody() -> list[Patch]:
    return [(rooms, "least_wanted", lambda fleet, model: 0)]


def _room_from_the_wanted(chance: Random) -> dict[str, Any]:
    first = wish(0, 2.0, "schedule", "small", least=1)
    return {
        "memories": (820 * MIB,),
        "slots": (1,),
        "wishes": (first, wish(1, chance.uniform(10.0, 12.0), "load", "large")),
    }


def _uses_are_not_stored() -> list[Patch]:
    return [(replicas, "note_uses", lambda connection, used: None)]


def _room_from_one_that_answers(chance: Random) -> dict[str, Any]:
    asked = tuple(asking(number, 4.0 + number, "small", 12.0) for number in range(4))
    return {
        "memories": (820 * MIB,),
        "slots": (1,),
        "askings": (asking(9, 2.0, "small"), *asked),
        "wishes": (wish(0, 13.0, "load", "large"),),
    }


def _nobody_is_busy() -> list[Patch]:
    return [(Router, "in_flight_of", lambda self, nonce: 0)]


def _fewer_are_wanted(chance: Random) -> dict[str, Any]:
    asked = tuple(asking(number, 7.0 + number / 10, "small", 12.0) for number in range(4))
    more = wish(0, 2.0, "schedule", "small", least=2)
    return {"askings": asked, "wishes": (more, wish(1, 14.0, "schedule", "small", least=1, most=1))}


# Wanted --------------------------------------------------------------------------------------------


def _nothing_is_missing() -> list[Patch]:
    return [(reconcile, "_missing", lambda facts: [])]


def _nothing_is_too_much() -> list[Patch]:
    return [(reconcile, "_surplus", lambda facts: None)]


def _no_longer_labelled(chance: Random) -> dict[str, Any]:
    labelled = _labelled(chance)["wishes"]
    return {"wishes": (*labelled, wish(2, chance.uniform(7.0, 9.0), "unlabel", "small", 0))}


def _nothing_is_ever_to_do_again() -> list[Patch]:
    """A pass that had nothing to do is the last one that looks."""
    return [(Reconciler, "_is_quiet", lambda self, seen, now: self._quiet is not None)]


def _rows_are_kept_for_ever() -> list[Patch]:
    kept = (fleet_rows, "_same_or_read", lambda known, seen, read: read() if known is None else known)
    return [kept, *_never_all_again()]


def _never_all_again() -> list[Patch]:
    """Everything is read again from time to time, which would make good for it before the calm ends."""
    return [(Reconciler, "_still_known", lambda self, now: self._known)]


def _changes_wake_nobody() -> list[Patch]:
    """Rows are read again, and the models that depend on them rest."""
    real = fleet_rows.changes

    def changes(connection: Connection, before: FleetRows | None, after: FleetRows) -> RowChanges:
        found = real(connection, before, after)
        return found if before is None else msgspec.structs.replace(found, models=set())

    return [(fleet_rows, "changes", changes), *_never_all_again()]


def _loads_are_not_kept() -> list[Patch]:
    return [(loader, "_keep", lambda connection, model, only, author: None)]


def _load(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, 2.0, "load", "small"),)}


def _labels_do_not_matter() -> list[Patch]:
    return [(module, "selects", lambda selector, node: True) for module in (placement, matches)]


def _labelled(chance: Random) -> dict[str, Any]:
    return {
        "wishes": (
            wish(0, 1.5, "label", "small", 0),
            wish(1, 2.5, "schedule", "small", spread=True, is_labelled=True),
        )
    }


def _silent_nodes_do_not_match() -> list[Patch]:
    real = reconcile._strangers

    def _strangers(facts: ModelFacts) -> list[reconcile.ServingReplica]:
        return real(msgspec.structs.replace(facts, selected=()))

    return [(reconcile, "_strangers", _strangers)]


def _everywhere(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, 2.0, "schedule", "small", spread=True),)}


def _no_pause_after_a_failure() -> list[Patch]:
    return [(module, "retry_seconds", lambda failures, pace: 0.0) for module in (reconcile, loader)]


def _more_than_fit(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, 2.0, "schedule", "large", least=3),), "memories": (820 * MIB, 370 * MIB)}


def _idle_is_stopped_though_wanted() -> list[Patch]:
    real = reconcile._idle

    def _idle(facts: ModelFacts) -> reconcile.ModelPlan | None:
        unwanted = msgspec.structs.replace(facts.info, kept=())
        return real(msgspec.structs.replace(facts, info=unwanted, schedule=None))

    return [(reconcile, "_idle", _idle)]


def _beyond_the_most() -> list[Patch]:
    """What was loaded by hand is loaded again, whatever the maximum."""
    real = reconcile._missing

    def _missing(facts: ModelFacts) -> list[NodeId]:
        here = {one.node_id for one in facts.replicas} | {one for one in facts.loading if one}
        return [one for one in facts.info.kept if one and one not in here and one in facts.matching] or real(facts)

    return [(reconcile, "_missing", _missing)]


def _by_hand_beyond_the_most(chance: Random) -> dict[str, Any]:
    loads = tuple(wish(1 + node, 3.0 + node, "load", "small", node) for node in (0, 1))
    return {"wishes": (wish(0, 2.0, "schedule", "small", least=1, most=1), *loads)}


# Routes --------------------------------------------------------------------------------------------


def _dead_rows_stay() -> list[Patch]:
    return [(reports, "forget_gone_replicas", lambda connection, node_id, report: False)]


def _restarted_are_unknown() -> list[Patch]:
    return [(reports, "adopt_restarted", lambda *_: False)]


def _routes_are_read_once() -> list[Patch]:
    real = Router.step

    async def step(self: Router) -> None:
        if not self.routes():
            await real(self)

    return [(Router, "step", step)]


def _routes_are_only_added() -> list[Patch]:
    return [(route_rows, "_kept", lambda rows, there: rows), (route_rows, "_is_other", lambda rows, one: False)]


def _one_is_too_many(chance: Random) -> dict[str, Any]:
    """One of two is stopped, and somebody asks long after."""
    asked = tuple(asking(number, 16.0 + number / 10, "small") for number in range(8))
    fewer = wish(1, 9.0, "schedule", "small", least=1, most=1)
    return {"wishes": (wish(0, 2.0, "schedule", "small", least=2), fewer), "askings": asked}


def _two_of_a_kind(chance: Random) -> dict[str, Any]:
    """One of two ends by itself, and somebody asks long after."""
    asked = tuple(asking(number, 16.0 + number / 10, "small") for number in range(8))
    return {"wishes": (wish(0, 2.0, "schedule", "small", spread=True),), "askings": asked, "restarts": False}


def _every_model_is_one() -> list[Patch]:
    """A route of any model serves a request."""

    def _take(self: Router, model: str, body: bytes) -> Route | None:
        return next((route for one in (model, *self._routes) if (route := real(self, one, body))), None)

    real = Router._take
    return [(Router, "_take", _take)]


def _another_is_there(chance: Random) -> dict[str, Any]:
    return {"wishes": (wish(0, 2.0, "load", "small"),), "askings": (asking(0, 9.0, "middle"), asking(1, 9.5, "middle"))}


ALONE = {"nodes": 1}
SERVING_MUTANTS = (
    ServingMutant(
        name="every request for a cold model loads it",
        guarantees=("G16",),
        make=_every_request_loads,
        script=_many_at_once,
    ),
    ServingMutant(
        name="loads under way are not counted", guarantees=("G20",), make=_loads_are_not_counted, script=_least_of_two
    ),
    ServingMutant(
        name="a load stays on a drained node",
        guarantees=("G20", "end"),
        make=_nobody_leaves_a_node,
        script=_drained_while_loading,
        weather={"install_seconds": 2.0},
    ),
    ServingMutant(
        name="a drained node is not emptied",
        guarantees=("drained", "end"),
        make=_drained_nodes_are_not_emptied,
        script=_loaded_and_drained,
        weather=ALONE,
    ),
    ServingMutant(
        name="a request waits without end",
        guarantees=("answers",),
        make=_answers_come_without_end,
        script=_asked_of_nobody,
        weather={**ALONE, "safety_seconds": 40.0, "install_seconds": 60.0},
    ),
    ServingMutant(
        name="memory is not compared",
        guarantees=("capacity",),
        make=_memory_is_not_compared,
        script=_too_many,
        weather=ALONE,
    ),
    ServingMutant(
        name="reservations do not count",
        guarantees=("capacity",),
        make=_reservations_are_not_counted,
        script=_too_many,
        weather=ALONE,
    ),
    ServingMutant(
        name="a reservation ends with its load",
        guarantees=("capacity",),
        make=_settled_at_once,
        script=_one_after_the_other,
        weather={**ALONE, "install_seconds": 0.05, "late_link_rate": 0.6},
    ),
    ServingMutant(
        name="an engine that restarts takes nothing",
        guarantees=("capacity",),
        make=_restarts_take_nothing,
        script=_while_it_restarts,
        weather={**ALONE, "install_seconds": 0.05, "safety_seconds": 17.0, "faults": CRASHES},
    ),
    ServingMutant(
        name="room is made by what is wanted",
        guarantees=("G20",),
        make=_room_from_anybody,
        script=_room_from_the_wanted,
        weather={**ALONE, "safety_seconds": 14.0},
    ),
    ServingMutant(
        name="room is made by what answers",
        guarantees=("G14",),
        make=_uses_are_not_stored,
        script=_room_from_one_that_answers,
        weather={**ALONE, "safety_seconds": 16.0},
    ),
    ServingMutant(
        name="nobody is busy",
        guarantees=("G14",),
        make=_nobody_is_busy,
        script=_fewer_are_wanted,
        weather={"safety_seconds": 16.0},
    ),
    ServingMutant(name="nothing is missing", guarantees=("wanted",), make=_nothing_is_missing, script=_least_of_two),
    ServingMutant(
        name="nothing is too much", guarantees=("wanted",), make=_nothing_is_too_much, script=_no_longer_labelled
    ),
    ServingMutant(
        name="after a pass with nothing to do nobody looks",
        guarantees=("wanted", "G20"),
        make=_nothing_is_ever_to_do_again,
        script=_no_longer_labelled,
    ),
    ServingMutant(
        name="rows that were read are kept for ever",
        guarantees=("wanted", "G20"),
        make=_rows_are_kept_for_ever,
        script=_no_longer_labelled,
    ),
    ServingMutant(
        name="a model rests whatever changes",
        guarantees=("wanted", "G20"),
        make=_changes_wake_nobody,
        script=_no_longer_labelled,
    ),
    ServingMutant(name="a load is not kept", guarantees=("wanted",), make=_loads_are_not_kept, script=_load),
    ServingMutant(
        name="labels do not matter", guarantees=("wanted", "G20"), make=_labels_do_not_matter, script=_labelled
    ),
    ServingMutant(
        name="a silent node does not match",
        guarantees=("G20",),
        make=_silent_nodes_do_not_match,
        script=_everywhere,
        weather={"safety_seconds": 20.0, "faults": (Fault(at=7.0, seconds=11.0, kind="pause_worker", target=0),)},
    ),
    ServingMutant(
        name="a failed load is tried at once",
        guarantees=("flapping",),
        make=_no_pause_after_a_failure,
        script=_more_than_fit,
    ),
    ServingMutant(
        name="idle ones are stopped though they are wanted",
        guarantees=("G20", "flapping"),
        make=_idle_is_stopped_though_wanted,
        script=_least_of_two,
        weather={"safety_seconds": 40.0},
    ),
    ServingMutant(
        name="what was loaded by hand ignores the maximum",
        guarantees=("G20", "flapping"),
        make=_beyond_the_most,
        script=_by_hand_beyond_the_most,
    ),
    ServingMutant(
        name="a row outlives its process",
        guarantees=("G13",),
        make=_dead_rows_stay,
        script=_two_of_a_kind,
        weather={"safety_seconds": 18.0, "faults": (Fault(at=6.0, seconds=0.1, kind="crash_engine", target=0),)},
    ),
    ServingMutant(
        name="routes are only added",
        guarantees=("G13",),
        make=_routes_are_only_added,
        script=_one_is_too_many,
        weather={"safety_seconds": 18.0},
    ),
    ServingMutant(
        name="what a worker restarted is not known",
        guarantees=("G16",),
        make=_restarted_are_unknown,
        script=lambda chance: {**_load(chance), "restarts": True},
        weather={**ALONE, "faults": (Fault(at=6.0, seconds=0.1, kind="crash_engine", target=0),)},
    ),
    ServingMutant(
        name="a route of any model will do", guarantees=("G12",), make=_every_model_is_one, script=_another_is_there
    ),
    ServingMutant(
        name="routes are read once",
        guarantees=("G13",),
        make=_routes_are_read_once,
        script=_two_of_a_kind,
        weather={"safety_seconds": 18.0, "faults": (Fault(at=6.0, seconds=0.1, kind="crash_engine", target=0),)},
    ),
)
