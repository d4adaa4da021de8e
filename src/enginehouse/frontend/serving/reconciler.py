"""Keeps the wanted replicas of every model: begins loads, stops what is too much, learns what replicas take.

One frontend at a time does it, under a lease that lasts for one pass. `core.reconcile` decides, from rows: after a
restart of every frontend, and with every replica gone, one pass begins what is wanted without any request. In-flight
counts come from the memory of this frontend and from what the others tell on the bus; without them a replica counts as
idle only if its row says that nobody used it for long.

A pass that had nothing to do says until when there is nothing to do. Until then, passes compare checksums of
the rows, look for requests that are a reason to grow, and read nothing else. The same is known of each model: a pass
after a change reads the rows that differ (`fleet_rows`), and plans the models that depend on them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec import Struct

from enginehouse.core.action import StopReplica
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.model import Model, read_model
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.core.placement import NoRoom, explanation, place
from enginehouse.core.reconcile import (
    RECONCILER,
    ModelFacts,
    ModelPlan,
    ServingReplica,
    can_grow,
    must_move,
    plan_model,
    quiet_until,
)
from enginehouse.core.schedule import LoadInfo
from enginehouse.frontend.acceptance import OperationDetails, insert_operation, new_operation
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.serving import fleet_rows
from enginehouse.frontend.serving.drains import steer_drains
from enginehouse.frontend.serving.fleet_rows import FleetRows, KnownNode
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.matches import Matches
from enginehouse.frontend.serving.preparing import forgive_after_changes, learn, take_back
from enginehouse.frontend.serving.rooms import Fleet, needs_of, read_fleet, rooms_for, why_outdated
from enginehouse.frontend.watching.board import Board
from enginehouse.store import (
    checksums,
    db,
    leases,
    load_infos,
    models,
    nodes,
    operations,
    replicas,
)
from enginehouse.store.checksums import ServingChecksums
from enginehouse.store.db import Connection, Store
from enginehouse.store.replicas import UsedReplica

log = logging.getLogger(__name__)

LEASE = "reconcile"
STEP_SECONDS = 5.0  # without a reason to look earlier
USES_SECONDS = 5.0  # between writes of when replicas were used
# At the latest then everything is read again: heartbeats change how much memory a node has in all, in no checksum.
LONGEST_QUIET_SECONDS = 60.0


class Traffic(Protocol):
    """The part of the router that reconciling uses."""

    def used_since(self) -> Collection[str]:
        """The processes, by their nonces, that got a request since the last call or have one now."""

    def in_flight_of(self, nonce: str) -> int:
        """Requests that a process has at the moment, of every frontend."""

    def queued(self, model: str) -> int:
        """Requests of every frontend that wait because all replicas of the model are full."""

    def disturbed_ago(self, model: str) -> float | None:
        """Seconds since a request could not go to the replica that has its prefix; None if it was long ago."""

    def pressing(self) -> Collection[str]:
        """The models of which one of the last two can be said."""


class ReconcilerParts(Struct, frozen=True, kw_only=True):
    store: Store
    board: Board
    galleries: Galleries
    loader: Loader
    traffic: Traffic
    wake: Callable[[], None]
    owner: str
    lease_seconds: float
    has_carrier: bool = False  # this frontend can load models on LocalAI's workers
    pace: ServingPace = USUAL


class _Quiet(Struct, frozen=True, kw_only=True):
    """A pass had nothing to do, and the next ones have not while all of this is the same."""

    checksums: ServingChecksums
    until: float
    edition: object  # of the galleries
    growing: Mapping[str, Sequence[str]]  # the processes of models that requests may give another replica


class _Rest(Struct, frozen=True):
    """There was nothing to do for a model, and there is not while its rows are the same."""

    until: float
    growing: Sequence[str] | None = None  # its processes, if requests may give it another replica


class _Known(Struct, frozen=True, kw_only=True):
    """What a pass leaves to the next one."""

    rows: FleetRows
    matches: Matches
    edition: object
    rests: Mapping[str, _Rest]  # by model


class _Passed(Struct, frozen=True, kw_only=True):
    """What a pass began, and why the next one may be short."""

    begun: list[OperationId] = []
    quiet: _Quiet | None = None
    known: _Known | None


class _Given(Struct, frozen=True, kw_only=True):
    """What one pass decides by."""

    now: float
    rows: FleetRows
    matches: Matches
    loading: Mapping[str, list[NodeId]]  # by model
    steered: Collection[OperationId]  # the loads that this pass knows of
    planned: Sequence[str]  # the models that do not rest
    used: Mapping[str, Sequence[UsedReplica]]  # the replicas of these

    def info_of(self, model: str) -> LoadInfo:
        return self.rows.infos.rows.get(model, LoadInfo(model=model))


class Reconciler:
    def __init__(self, parts: ReconcilerParts) -> None:
        self._parts = parts
        self._quiet: _Quiet | None = None
        self._known: _Known | None = None

    async def uses_step(self) -> None:
        """Store when replicas were last used: off the path of requests, in one batch."""
        if self._parts.store.is_away:
            return  # other loops look whether it is back; each look is a connection that a frozen server has to answer
        used = self._parts.traffic.used_since()
        if used:
            await self._parts.store.transaction(
                lambda connection: replicas.note_uses(connection, dict.fromkeys(used, db.now(connection)))
            )

    async def finish(self) -> None:
        """Store the last uses when the frontend stops."""
        try:
            await self.uses_step()
        except EnginehouseError as error:
            log.warning("replicas.uses_lost error=%s", error)

    async def step(self) -> None:
        """One pass over the models that somebody wants, or that have more than one replica."""
        if self._parts.store.is_away:
            return  # woken when it is back
        if await self._parts.store.look(self._may_rest):
            return
        passed = await self._parts.store.transaction(self._pass)
        self._quiet, self._known = passed.quiet, passed.known
        if passed.begun:
            self._parts.wake()
            await self._parts.board.operations_changed(passed.begun)

    def _pass(self, connection: Connection) -> _Passed:
        parts, now = self._parts, db.now(connection)
        if not leases.acquire(connection, LEASE, parts.owner, now, now + parts.lease_seconds):
            return _Passed(known=self._known)
        # Released with the pass: whichever frontend learns of a change first acts on it.
        leases.release(connection, LEASE, parts.owner)
        # Before the replicas: a load that ends in between is then counted twice instead of not at all.
        loading: dict[str, list[NodeId]] = {}
        steered = operations.steered(connection)
        for operation in steered:
            loading.setdefault(operation.name, []).append(operation.targets[0] if operation.targets else NodeId(""))
        edition, before = parts.galleries.edition, self._still_known(now)
        known_rows = before.rows if before is not None else None
        rows, seen = fleet_rows.read(connection, known_rows, now)
        if seen.replicas.leaving:
            take_back(connection)
        if known_rows is None or rows.nodes is not known_rows.nodes:
            rows = forgive_after_changes(connection, rows)
        changed = fleet_rows.changes(connection, known_rows, rows)
        for name, node_ids in rows.restarting().items():
            # What a worker is about to start again by itself is on its way, too.
            loading.setdefault(name, []).extend(node_ids)
        drained = rows.drained()
        emptied = replicas.models_on(connection, drained) if drained else set()
        names, resting = rows.names(), self._resting(before, {*changed.models, *loading, *emptied}, now)
        rests = {name: resting[name] for name in names & resting.keys()}
        planned = sorted(names - rests.keys())
        if before is not None and not changed.moved:
            matches = before.matches
        else:
            matches = Matches(rows.in_order(), parts.galleries, has_carrier=parts.has_carrier)
        used = replicas.of_models_with_use(connection, planned)
        learn(connection, rows, {*changed.nodes, *(one.replica.node_id for some in used.values() for one in some)})
        given = _Given(
            now=now,
            rows=rows,
            matches=matches,
            loading=loading,
            steered={one.id for one in steered},
            planned=planned,
            used=used,
        )
        begun, facts = self._plan_all(connection, given, rests)
        if emptied or (seen.steered and operations.steered(connection, kind="drain")):
            begun += self._steer_drains(connection, given, facts)
        known = _Known(rows=rows, matches=matches, edition=edition, rests=rests)
        is_idle = not (begun or loading or seen.steered or seen.replicas.leaving) and names == rests.keys()
        return _Passed(begun=begun, quiet=_quiet_after(known, seen, now) if is_idle else None, known=known)

    def _still_known(self, now: float) -> _Known | None:
        known = self._known
        is_old = known is None or now >= known.rows.read_at + LONGEST_QUIET_SECONDS
        return None if known is None or is_old or known.edition is not self._parts.galleries.edition else known

    def _resting(self, before: _Known | None, disturbed: Collection[str], now: float) -> dict[str, _Rest]:
        """The models for which there is nothing to do still."""
        if before is None:
            return {}
        due = {name for name, rest in before.rests.items() if now >= rest.until}
        awake = {*disturbed, *due, *self._may_grow(_growing(before.rests))}
        return {name: rest for name, rest in before.rests.items() if name not in awake}

    def _may_grow(self, growing: Mapping[str, Sequence[str]]) -> set[str]:
        """Those of these models, with their processes, for which requests are a reason for another replica."""
        traffic, pressing = self._parts.traffic, self._parts.traffic.pressing()
        return {
            model
            for model, nonces in growing.items()
            if model in pressing or all(traffic.in_flight_of(nonce) for nonce in nonces)
        }

    def _plan_all(
        self, connection: Connection, given: _Given, rests: dict[str, _Rest]
    ) -> tuple[list[OperationId], dict[str, ModelFacts]]:
        """Plan the models that do not rest, and note which of them do from now on."""
        begun: list[OperationId] = []
        facts: dict[str, ModelFacts] = {}
        for name in given.planned:
            definition = given.rows.definitions.rows.get(name)
            model = read_model(definition) if definition is not None else None
            if model is None or not model.runs_here:
                rests[name] = _Rest(math.inf)
                continue
            facts[name] = self._facts(given, model)
            plan = plan_model(facts[name])
            rest = _rest_after(facts[name]) if plan.is_empty else None
            if rest is not None:
                rests[name] = rest
            begun += self._carry_out(connection, given, model, plan)
        return begun, facts

    def _steer_drains(
        self, connection: Connection, given: _Given, facts: Mapping[str, ModelFacts]
    ) -> list[OperationId]:
        # What is to be moved is placed by free memory and reservations as they are now. A node that was drained since
        # is for the next pass: nothing was planned for it.
        every = [given.rows.as_seen(node) for node in nodes.every(connection)]
        fleet = read_fleet(connection, every, given.now)
        stays = partial(self._stays, connection, fleet, given, facts)
        return steer_drains(connection, fleet, stays, self._parts.pace)

    def _may_rest(self, connection: Connection) -> bool:
        seen = checksums.of_serving(connection)
        if seen.steered and not _has_rows(seen):
            return not operations.steered(connection, kind="drain")
        return self.rests_at(seen, db.now(connection))

    def rests_at(self, seen: ServingChecksums, now: float) -> bool:
        """Whether a pass over rows with these checksums has nothing to do then."""
        if not _has_rows(seen):
            return not seen.steered
        return self._is_quiet(seen, now)

    def _is_quiet(self, seen: ServingChecksums, now: float) -> bool:
        quiet = self._quiet
        if quiet is None or quiet.checksums != seen or now >= quiet.until:
            return False
        if quiet.edition is not self._parts.galleries.edition:
            return False
        return not self._may_grow(quiet.growing)

    def _stays(
        self,
        connection: Connection,
        fleet: Fleet,
        given: _Given,
        facts: Mapping[str, ModelFacts],
        used: UsedReplica,
    ) -> bool:
        """Whether a replica on a drained node waits for another one to take its place."""
        replica = used.replica
        if all(one.replica != replica for one in given.used.get(replica.model, ())):
            return True  # it came since this pass read the rows
        known = facts.get(replica.model)
        own = next((one for one in known.replicas if one.nonce == replica.nonce), None) if known is not None else None
        if known is None or own is None or not must_move(known, own):
            return False
        if known.loading or known.leaving:
            return True
        if known.now < known.info.retry_at:
            reason = load_infos.get(connection, replica.model).reason
            log.warning("replica.not_moved model=%s node=%s reason=%r", replica.model, own.node_id, reason)
            return False
        model = models.get(connection, replica.model)
        if model is None:
            return False
        builds = given.matches.builds(model.backend)
        needs = needs_of(fleet, model, builds, may_replace=False, replaces=_replaced(own))
        found = place(needs, rooms_for(connection, fleet, model, pace=self._parts.pace))
        if isinstance(found, NoRoom) and not found.is_temporary:
            log.warning(
                "replica.not_moved model=%s node=%s reason=%r", model.name, own.node_id, explanation(needs, found)
            )
            return False
        return True

    def _facts(self, given: _Given, model: Model) -> ModelFacts:
        rows, name, traffic = given.rows, model.name, self._parts.traffic
        schedule = rows.schedules.rows.get(name)
        selector = schedule.node_selector if schedule is not None else {}
        here = given.used.get(name, ())
        return ModelFacts(
            now=given.now,
            info=given.info_of(name),
            schedule=schedule,
            replicas=[
                _serving(used, rows.nodes.rows[used.replica.node_id], model, traffic.in_flight_of(used.replica.nonce))
                for used in here
                if not used.leaving and rows.serves(used.replica.node_id)
            ],
            leaving=sum(used.leaving for used in here),
            loading=given.loading.get(name, []),
            matching=given.matches.matching(selector, model.backend),
            selected=given.matches.selected(selector),
            queued=traffic.queued(name),
            disturbed_ago=traffic.disturbed_ago(name),
            pace=self._parts.pace,
        )

    def _carry_out(self, connection: Connection, given: _Given, model: Model, plan: ModelPlan) -> list[OperationId]:
        info = given.info_of(model.name)
        if plan.is_empty:
            return []
        if plan.loads or plan.replaced is not None:
            # The row stays locked until the load is stored.
            kept = load_infos.lock(connection, model.name).kept
            if kept != info.kept or any(
                one.id not in given.steered for one in operations.steered(connection, model.name)
            ):
                return []  # unloaded, deleted or loaded by somebody since this pass read the rows
        loader = self._parts.loader
        begun = [loader.begin_another(connection, model, node_id or None) for node_id in plan.loads]
        if plan.replaced is not None:
            begun.append(loader.begin_replacement(connection, model, _replaced(plan.replaced)))
        if plan.stops:
            seconds = self._parts.pace.drain_seconds
            stops = [
                (one.node_id, StopReplica(model=model.name, slot=one.slot, drain_seconds=seconds)) for one in plan.stops
            ]
            for one in plan.stops:
                replicas.set_leaving(connection, one.node_id, model.name, one.slot, True)
            targets = tuple(dict.fromkeys(node_id for node_id, _ in stops))
            operation = new_operation(connection, "unload", model.name, RECONCILER, OperationDetails(targets=targets))
            begun.append(insert_operation(connection, operation, stops))
        if plan.is_scaled:
            load_infos.change(connection, model.name, lambda known: msgspec.structs.replace(known, scaled_at=given.now))
        log.info(
            "replicas.reconciled model=%s loads=%d stops=%d replaced=%d reason=%r",
            model.name,
            len(plan.loads),
            len(plan.stops),
            plan.replaced is not None,
            plan.reason or "wanted",
        )
        return begun


def _replaced(one: ServingReplica) -> ReplacedReplica:
    return ReplacedReplica(node_id=one.node_id, slot=one.slot, nonce=one.nonce)


def _serving(used: UsedReplica, known: KnownNode, model: Model, in_flight: int) -> ServingReplica:
    replica, node = used.replica, known.node
    return ServingReplica(
        node_id=node.id,
        slot=replica.slot,
        created_at=used.created_at,
        last_used=used.last_used,
        in_flight=in_flight,
        nonce=replica.nonce,
        outdated=why_outdated(
            replica, model.revision, is_drained=node.drained, is_replaced=replica.nonce in known.outdated
        ),
        leaves_node=node.drained,
    )


def _rest_after(facts: ModelFacts) -> _Rest | None:
    """After an empty plan; None if the next one may not be empty although the rows are the same."""
    until = quiet_until(facts)
    if until <= facts.now or facts.loading or facts.leaving:
        return None
    return _Rest(until, [one.nonce for one in facts.replicas] if can_grow(facts) else None)


def _quiet_after(known: _Known, seen: ServingChecksums, now: float) -> _Quiet | None:
    """After a pass that had nothing to do; None if the next one may have."""
    until = min((one.until for one in known.rests.values()), default=math.inf)
    until = min(until, known.rows.read_at + LONGEST_QUIET_SECONDS)
    if until <= now:
        return None
    return _Quiet(checksums=seen, until=until, edition=known.edition, growing=_growing(known.rests))


def _growing(rests: Mapping[str, _Rest]) -> dict[str, Sequence[str]]:
    return {name: one.growing for name, one in rests.items() if one.growing is not None}


def _has_rows(seen: ServingChecksums) -> bool:
    """Whether there is anything to reconcile besides drains: something that runs, is wanted or was wanted."""
    return bool(seen.replicas.count or seen.schedules[0] or seen.infos)
