"""Keeps the wanted replicas of every model: begins loads, stops what is too much, learns what replicas take.

One frontend at a time does it, under a lease that lasts for one pass. `core.reconcile` decides, from rows: after a
restart of every frontend, and with every replica gone, one pass begins what is wanted without any request. In-flight
counts come from the memory of this frontend and from what the others tell on the bus; without them a replica counts as
idle only if its row says that nobody used it for long.

A pass that had nothing to do says until when there is nothing to do. Until then, passes compare checksums of
the rows, look for requests that are a reason to grow, and read nothing else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec
from msgspec import Struct

from enginehouse.core import action as actions
from enginehouse.core.action import StopReplica
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.model import Model
from enginehouse.core.node import Node
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.placement import NoRoom, explanation, labels_of, place
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
from enginehouse.frontend.serving.drains import steer_drains
from enginehouse.frontend.serving.loader import Loader
from enginehouse.frontend.serving.matches import Matches
from enginehouse.frontend.serving.rooms import Fleet, needs_of, read_fleet, rooms_for
from enginehouse.frontend.watching.board import Board
from enginehouse.store import (
    checksums,
    cluster_values,
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
_FINGERPRINT = "fleet-fingerprint"


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


class _Quiet(Struct, frozen=True, kw_only=True):
    """A pass had nothing to do, and the next ones have not while all of this is the same."""

    checksums: ServingChecksums
    until: float
    edition: object  # of the galleries
    growing: Mapping[str, Sequence[str]]  # the processes of models that requests may give another replica


class _Passed(Struct, frozen=True, kw_only=True):
    """What a pass began, or why the next one may be short."""

    begun: list[OperationId] = []
    quiet: _Quiet | None = None


class Reconciler:
    def __init__(self, parts: ReconcilerParts) -> None:
        self._parts = parts
        self._quiet: _Quiet | None = None

    async def uses_step(self) -> None:
        """Store when replicas were last used: off the path of requests, in one batch."""
        if self._parts.store.is_away:
            return  # other loops look whether it is back; each look is a connection that a frozen server has to answer
        used = self._parts.traffic.used_since()
        if used:
            await self._parts.store.transaction(
                lambda connection: replicas.note_uses(connection, dict.fromkeys(used, db.now(connection)))
            )

    async def step(self) -> None:
        """One pass over the models that somebody wants, or that have more than one replica."""
        if self._parts.store.is_away:
            return  # woken when it is back
        if await self._parts.store.look(self._may_rest):
            return  # a pass reads every node
        passed = await self._parts.store.transaction(self._pass)
        self._quiet = passed.quiet
        if passed.begun:
            self._parts.wake()
            await self._parts.board.operations_changed(passed.begun)

    def _pass(self, connection: Connection) -> _Passed:
        parts, now = self._parts, db.now(connection)
        # Before the rows: what is committed in between is noticed by the next pass.
        seen = checksums.of_serving(connection)
        if not leases.acquire(connection, LEASE, parts.owner, now, now + parts.lease_seconds):
            return _Passed()
        # Released with the pass: whichever frontend learns of a change first acts on it.
        leases.release(connection, LEASE, parts.owner)
        # Before the replicas: a load that ends in between is then counted twice instead of not at all.
        loading: dict[str, list[NodeId]] = {}
        steered = operations.steered(connection)
        for operation in steered:
            loading.setdefault(operation.name, []).append(operation.targets[0] if operation.targets else NodeId(""))
        edition = parts.galleries.edition
        every = nodes.every(connection)
        _take_back(connection)
        _forgive_after_changes(connection, every)
        fleet = read_fleet(connection, every, now)
        _learn(connection, fleet)
        matches = Matches(fleet, parts.galleries, has_carrier=parts.has_carrier)
        serving = nodes.serving(connection)
        for name, node_ids in _restarting(fleet, serving).items():
            # What a worker is about to start again by itself is on its way, too.
            loading.setdefault(name, []).extend(node_ids)
        begun: list[OperationId] = []
        facts: dict[str, ModelFacts] = {}
        is_idle = not seen.steered and not seen.replicas.leaving and not loading
        names = sorted(_names(fleet))
        known = models.named(connection, names)
        for name in names:
            model = known.get(name)
            if model is None or not model.runs_here:
                continue
            facts[name] = self._facts(fleet, model, serving, loading.get(name, []), matches)
            plan = plan_model(facts[name])
            is_idle = is_idle and plan.is_empty
            begun += self._carry_out(connection, fleet, model, plan, {operation.id for operation in steered})
        begun += steer_drains(connection, fleet, lambda used: self._stays(connection, fleet, facts, used, matches))
        quiet = _quiet_after(facts.values(), seen, now, edition) if is_idle and not begun else None
        return _Passed(begun=begun, quiet=quiet)

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
        quiet, traffic = self._quiet, self._parts.traffic
        if quiet is None or quiet.checksums != seen or now >= quiet.until:
            return False
        if quiet.edition is not self._parts.galleries.edition:
            return False
        return not any(
            traffic.queued(model)
            or traffic.disturbed_ago(model) is not None
            or all(traffic.in_flight_of(nonce) for nonce in nonces)
            for model, nonces in quiet.growing.items()
        )

    def _stays(
        self,
        connection: Connection,
        fleet: Fleet,
        facts: Mapping[str, ModelFacts],
        used: UsedReplica,
        matches: Matches,
    ) -> bool:
        """Whether a replica on a drained node waits for another one to take its place."""
        known, replica = facts.get(used.replica.model), used.replica
        own = next((one for one in known.replicas if one.nonce == replica.nonce), None) if known is not None else None
        if known is None or own is None or not must_move(known, own):
            return False
        if known.loading or known.leaving:
            return True
        if known.now < known.info.retry_at:
            log.warning("replica.not_moved model=%s node=%s reason=%r", replica.model, own.node_id, known.info.reason)
            return False
        model = models.get(connection, replica.model)
        if model is None:
            return False
        needs = needs_of(fleet, model, matches.builds(model.backend), may_replace=False, replaces=_replaced(own))
        found = place(needs, rooms_for(connection, fleet, model))
        if isinstance(found, NoRoom) and not found.is_temporary:
            log.warning(
                "replica.not_moved model=%s node=%s reason=%r", model.name, own.node_id, explanation(needs, found)
            )
            return False
        return True

    def _facts(
        self, fleet: Fleet, model: Model, serving: Mapping[NodeId, str], loading: list[NodeId], matches: Matches
    ) -> ModelFacts:
        schedule = fleet.schedules.get(model.name)
        selector = schedule.node_selector if schedule is not None else {}
        revision = model.revision
        return ModelFacts(
            now=fleet.now,
            info=fleet.infos.get(model.name, LoadInfo(model=model.name)),
            schedule=schedule,
            replicas=[
                ServingReplica(
                    node_id=used.replica.node_id,
                    slot=used.replica.slot,
                    created_at=used.created_at,
                    last_used=used.last_used,
                    in_flight=self._parts.traffic.in_flight_of(used.replica.nonce),
                    nonce=used.replica.nonce,
                    outdated=fleet.why_outdated(used.replica, revision),
                    leaves_node=used.replica.node_id in fleet.drained,
                )
                for used in fleet.of_model(model.name)
                if not used.leaving and used.replica.node_id in serving
            ],
            leaving=sum(used.leaving for used in fleet.of_model(model.name)),
            loading=loading,
            matching=matches.matching(selector, model.backend),
            selected=matches.selected(selector),
            queued=self._parts.traffic.queued(model.name),
            disturbed_ago=self._parts.traffic.disturbed_ago(model.name),
        )

    def _carry_out(
        self, connection: Connection, fleet: Fleet, model: Model, plan: ModelPlan, steered: Collection[OperationId]
    ) -> list[OperationId]:
        """Store what the plan wants. `steered` are the loads that this pass knows of."""
        info = fleet.infos.get(model.name, LoadInfo(model=model.name))
        if plan.is_empty:
            return []
        if plan.loads or plan.replaced is not None:
            # The row stays locked until the load is stored.
            kept = load_infos.lock(connection, model.name).kept
            if kept != info.kept or any(one.id not in steered for one in operations.steered(connection, model.name)):
                return []  # unloaded, deleted or loaded by somebody since this pass read the rows
        loader = self._parts.loader
        begun = [loader.begin_another(connection, model, node_id or None) for node_id in plan.loads]
        if plan.replaced is not None:
            begun.append(loader.begin_replacement(connection, model, _replaced(plan.replaced)))
        if plan.stops:
            stops = [
                (one.node_id, StopReplica(model=model.name, slot=one.slot, drain_seconds=actions.DRAIN_SECONDS))
                for one in plan.stops
            ]
            for one in plan.stops:
                replicas.set_leaving(connection, one.node_id, model.name, one.slot, True)
            targets = tuple(dict.fromkeys(node_id for node_id, _ in stops))
            operation = new_operation(connection, "unload", model.name, RECONCILER, OperationDetails(targets=targets))
            begun.append(insert_operation(connection, operation, stops))
        if plan.is_scaled:
            load_infos.change(connection, model.name, lambda known: msgspec.structs.replace(known, scaled_at=fleet.now))
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


def _quiet_after(facts: Collection[ModelFacts], seen: ServingChecksums, now: float, edition: object) -> _Quiet | None:
    """After a pass that had nothing to do; None if the next one may have."""
    until = min((quiet_until(one) for one in facts), default=now + LONGEST_QUIET_SECONDS)
    if until <= now:
        return None
    growing = {one.info.model: [replica.nonce for replica in one.replicas] for one in facts if can_grow(one)}
    return _Quiet(checksums=seen, until=min(until, now + LONGEST_QUIET_SECONDS), edition=edition, growing=growing)


def _restarting(fleet: Fleet, serving: Mapping[NodeId, str]) -> dict[str, list[NodeId]]:
    """Per model, the nodes whose workers are about to start an engine of it again."""
    found: dict[str, list[NodeId]] = {}
    for node in fleet.nodes:
        if node.id in serving:
            for key in node.report.restarting:
                found.setdefault(key.rpartition("#")[0], []).append(node.id)
    return found


def _names(fleet: Fleet) -> set[str]:
    """The models to look at: those that are loaded or wanted."""
    loaded = {used.replica.model for used in fleet.replicas}
    return {*fleet.schedules, *(name for name, info in fleet.infos.items() if info.kept), *loaded}


def _has_rows(seen: ServingChecksums) -> bool:
    """Whether there is anything to reconcile besides drains: something that runs, is wanted or was wanted."""
    return bool(seen.replicas.count or seen.schedules[0] or seen.infos[0])


def _take_back(connection: Connection) -> None:
    """Let replicas serve again whose stop ended without stopping them."""
    for replica in replicas.leaving(connection):
        subject = f"replica:{replica.model}#{replica.slot}"
        if subject not in {one.subject for one in operations.open_on(connection, replica.node_id)}:
            replicas.set_leaving(connection, replica.node_id, replica.model, replica.slot, False)


def _forgive_after_changes(connection: Connection, every: list[Node]) -> None:
    """When nodes joined, left or changed, or became free, whatever did not fit is tried again at once."""
    facts = [
        (
            node.id,
            node.approved,
            node.health == "healthy",
            node.drained,
            sorted(labels_of(node).items()),
            node.max_replicas_per_model,
            node.capability,
            node.capacity.total_ram,
            node.capacity.total_vram,
        )
        for node in sorted(every, key=lambda node: node.id)
    ]
    replicas_held = sum(len(node.report.replicas) for node in every)
    fingerprint = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]
    before, _, held = cluster_values.get(connection, _FINGERPRINT).partition(" ")
    if f"{before} {held}" == f"{fingerprint} {replicas_held}":
        return
    cluster_values.put(connection, _FINGERPRINT, f"{fingerprint} {replicas_held}")
    if before and (before != fingerprint or (held.isdecimal() and replicas_held < int(held))):
        load_infos.forgive(connection)


def _learn(connection: Connection, fleet: Fleet) -> None:
    """Remember what replicas really took: the next placement uses it."""
    most: dict[str, int] = {}
    for node in fleet.nodes:
        for one in node.report.replicas:
            info = fleet.infos.get(one.model_id)
            if info is not None and one.revision == info.revision and one.memory_bytes > info.memory_bytes:
                most[one.model_id] = max(most.get(one.model_id, 0), one.memory_bytes)
    for model, memory_bytes in sorted(most.items()):
        load_infos.change(connection, model, partial(_with_memory, memory_bytes=memory_bytes))


def _with_memory(known: LoadInfo, *, memory_bytes: int) -> LoadInfo:
    return msgspec.structs.replace(known, memory_bytes=memory_bytes)
