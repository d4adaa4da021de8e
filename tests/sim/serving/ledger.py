"""What the guarantees of serving are judged by, at every commit and at every start of an engine.

It sees new intents and new loads the moment they are stored, and holds them against the rows of that moment and
against what is true: which engines run, what they take, who uses them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
from tests.sim.disk import Engine
from tests.sim.rows import Changed, IntentRow, OperationRow, select_rows
from tests.sim.serving import promises
from tests.sim.serving.facts import read_model, read_nodes

from enginehouse.core.reconcile import RECONCILER
from enginehouse.core.replica import parse_process_key

if TYPE_CHECKING:
    from tests.sim.serving.machines import ServingMachine
    from tests.sim.serving.world import ServingWorld

# A request is told to the other frontends after a second, and to the store after another; both may be tried again.
KNOWN_BUSY_SECONDS = 4.0
UNDISTURBED_SECONDS = 2.0  # since when nobody was struck: before, a route may have been dropped
SEEN_SECONDS = 20.0  # a load that was placed before is over by then


class ServingLedger:
    def __init__(self, world: ServingWorld) -> None:
        self._world = world
        self._connection = world.database.connection
        self._unknown: set[str] = set()
        self.loads_begun = 0
        self.evictions = 0
        self.scale_stops = 0
        self.last_change = 0.0  # of intents, or loads that did something

    def committed(self, changes: list[Changed]) -> None:
        for changed in changes:
            row = changed.after
            if isinstance(row, OperationRow) and changed.before is None and row.kind == "load":
                self.loads_begun += 1
                self._load_began(row)
            if isinstance(row, IntentRow):
                if changed.before is None or changed.before.state != row.state:  # type: ignore[union-attr]
                    self.last_change = self._world.loop.time()
                if changed.before is None:
                    self._added(row)

    # Loads ----------------------------------------------------------------------------------------

    def _load_began(self, load: OperationRow) -> None:
        open_ones = [one for one in self._open_loads(load.name) if one.id != load.id]
        if load.author != RECONCILER:
            same = [one for one in open_ones if one.targets == load.targets]
            self._world.judge("G16", promises.one_load_serves_all(load, same))
            return
        fact = read_model(self._connection, load.name)
        if replaced := json.loads(load.replaces):
            self._world.judge("G20", promises.replaces_one_at_a_time(load, replaced, fact, open_ones))
            return
        number = len(fact.belonging) + len(open_ones) + 1
        nonces = [one.nonce for one in fact.serving]
        is_busy = bool(nonces) and self._world.may_all_be_used(load.name, nonces)
        self._world.judge("G20", promises.no_more_than_wanted(fact, number, json.loads(load.targets), is_busy=is_busy))

    def _open_loads(self, model: str) -> list[OperationRow]:
        checks = self._world.checks
        found = [checks.operations[one] for one in sorted(checks.steered)]
        return [one for one in found if one.kind == "load" and one.name == model]

    # Intents --------------------------------------------------------------------------------------

    def _added(self, intent: IntentRow) -> None:
        action = json.loads(intent.action)
        operation = self._operation_of(intent)
        if operation is None:
            return
        if action["type"] == "start_replica":
            self._start_added(intent, operation, action)
        elif action["type"] == "stop_replica":
            is_eviction = operation.kind == "load"
            if operation.replaces != "null":
                return  # judged when it began; what it replaces may be the last one, and busy
            if is_eviction or (operation.kind == "unload" and operation.author == RECONCILER):
                self.evictions += is_eviction
                self.scale_stops += not is_eviction
                self._stop_added(intent, action["model"], int(action["slot"]), is_eviction=is_eviction)

    def _operation_of(self, intent: IntentRow) -> OperationRow | None:
        query = "select operation_id from operation_intents where intent_id = ?"
        rows = select_rows(self._connection, query, (intent.id,))
        return self._world.checks.operations.get(str(rows[0][0])) if rows else None

    def _start_added(self, intent: IntentRow, load: OperationRow, action: dict[str, object]) -> None:
        node = next((one for one in read_nodes(self._connection) if one.id == intent.node_id), None)
        self._world.judge("G20", promises.starts_where_it_may(intent, node))
        rivals = [
            one.id
            for one in self._world.checks.intents.values()
            if (one.node_id, one.subject) == (intent.node_id, intent.subject)
            and one.generation == intent.generation - 1
            and one.state == "superseded"
            and json.loads(one.action)["type"] == "start_replica"
            and one.reason == "superseded"
        ]
        # A model that was edited meanwhile is another start.
        same = [one for one in rivals if json.loads(self._world.checks.intents[one].action)["model"] == action["model"]]
        self._world.judge("G16", f"intent {intent.id} of {load.id} replaced the start {same}" if same else "")
        self._judge_replacing(intent, action)

    def _judge_replacing(self, intent: IntentRow, action: dict[str, object]) -> None:
        """G16: no start is for a slot whose process is reported to run, unless something keeps requests from it."""
        world = self._world
        machine = next((one for one in world.serving_machines if one.node_id == intent.node_id), None)
        engine = machine.disk.engines.get(intent.subject.partition(":")[2]) if machine is not None else None
        if machine is None or engine is None:
            return
        if json.loads(msgspec.json.encode(engine.request.model)) != action["model"]:
            return  # it was edited
        if engine.request.model.name in world.maybe_deleted:
            return  # and is wanted again, before its worker has stopped it
        rows = select_rows(self._connection, "select report from nodes where id = ?", (intent.node_id,))
        names = [machine.name, "store", *(one.name for one in world.frontends)]
        if select_rows(self._connection, "select 1 from replicas where nonce = ? and leaving", (engine.nonce,)):
            return  # somebody asked for its end, and somebody else for an answer
        if engine.nonce in str(rows[0][0]) and world.calm_seconds(*names) > UNDISTURBED_SECONDS:
            world.judge("G16", f"intent {intent.id} is to start what {engine.nonce} is")

    def _stop_added(self, intent: IntentRow, model: str, slot: int, *, is_eviction: bool) -> None:
        world, fact = self._world, read_model(self._connection, model)
        stopped = next((one for one in fact.replicas if (one.node_id, one.slot) == (intent.node_id, slot)), None)
        if stopped is None:
            return  # a start on a lost node, in case it was done
        world.judge("G20", promises.stays_above_the_least(fact, intent.node_id, is_eviction=is_eviction))
        now = world.loop.time()
        busy = [use for use in world.uses_of(stopped.nonce) if world.told_seconds(use, now) > KNOWN_BUSY_SECONDS]
        world.judge("G14", f"{stopped.nonce} is stopped, and has {len(busy)} requests" if busy else "")

    # Engines --------------------------------------------------------------------------------------

    def began(self, machine: ServingMachine, engine: Engine) -> None:
        """An engine of unknown demand may take what another was promised, until it is seen what it takes."""
        world = self._world
        if not world.is_known(engine.request.model.name):
            self._unknown.add(engine.nonce)
        soon = world.loop.time() - SEEN_SECONDS
        here = [one.nonce for one in machine.disk.engines.values()]
        # One that is being started takes its memory already.
        is_coming = any(not world.is_known(parse_process_key(key)[0]) for key in machine.coming)
        if not is_coming and not any(one in self._unknown and world.began_at[one] > soon for one in here):
            world.judge("capacity", promises.fits_the_machine(machine, engine))
