"""Reads what a placement needs: the demand of a model, and per node its free slots, reservations and idle replicas.

Reads only. `core.placement` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core.backend import Resolved
from enginehouse.core.demand import demand_of
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, served_config
from enginehouse.core.node import Node
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.core.placement import IdleReplica, Needs, Reservation, Room
from enginehouse.core.replica import Replica, parse_process_key
from enginehouse.core.schedule import LoadInfo, Schedule
from enginehouse.store import load_infos, models, replicas, reservations, schedules
from enginehouse.store.db import Connection
from enginehouse.store.replicas import UsedReplica


class Fleet(Struct, frozen=True, kw_only=True):
    """What is stored about all nodes, replicas and wanted replicas at one moment."""

    now: float
    nodes: Sequence[Node]
    replicas: Sequence[UsedReplica]
    reservations: Sequence[Reservation]
    schedules: Mapping[str, Schedule]
    infos: Mapping[str, LoadInfo]
    by_model: Mapping[str, Sequence[UsedReplica]]
    replaced: frozenset[str]  # processes, by their nonces, whose backend was replaced since their start
    drained: frozenset[NodeId]

    def of_model(self, model: str) -> Sequence[UsedReplica]:
        return self.by_model.get(model, ())

    def why_outdated(self, replica: Replica, revision: str) -> str:
        return why_outdated(
            replica, revision, is_drained=replica.node_id in self.drained, is_replaced=replica.nonce in self.replaced
        )

    def measured(self, model: Model) -> int:
        found = self.infos.get(model.name)
        return found.memory_bytes if found is not None and found.revision == model.revision else 0


def why_outdated(replica: Replica, revision: str, *, is_drained: bool, is_replaced: bool) -> str:
    """Why a replica is to be replaced by another one; "" if it is not. `is_replaced`: its worker shows its process as
    one of a backend that was replaced.
    """
    if is_drained:
        return "its node is drained"
    if replica.revision != revision:
        return "the model was changed"
    return "its backend was upgraded" if replica.nonce and is_replaced else ""


def read_fleet(connection: Connection, every: Sequence[Node], now: float) -> Fleet:
    found = replicas.every_with_use(connection)
    by_model: dict[str, list[UsedReplica]] = {}
    for used in found:
        by_model.setdefault(used.replica.model, []).append(used)
    return Fleet(
        now=now,
        nodes=every,
        replicas=found,
        by_model=by_model,
        replaced=frozenset(one.nonce for node in every for one in node.report.replicas if one.outdated),
        drained=frozenset(node.id for node in every if node.drained),
        reservations=reservations.every(connection, now),
        schedules={one.model_name: one for one in schedules.every(connection)},
        infos={one.model: one for one in load_infos.every(connection)},
    )


def needs_of(
    fleet: Fleet,
    model: Model,
    builds: Mapping[NodeId, Resolved],
    *,
    only: str = "",
    may_replace: bool = True,
    replaces: ReplacedReplica | None = None,
) -> Needs:
    schedule = fleet.schedules.get(model.name)
    return Needs(
        model=model,
        demand=demand_of(model, fleet.measured(model)),
        builds=builds,
        selector=schedule.node_selector if schedule is not None else {},
        only=only,
        may_replace=may_replace,
        replaces=replaces,
    )


def rooms_for(
    connection: Connection, fleet: Fleet, model: Model, operation_id: str = "", *, pace: ServingPace = USUAL
) -> list[Room]:
    """The rooms for a replica of this model; what its own load has reserved is free for it."""
    slots: dict[NodeId, list[int]] = {}
    for used in fleet.replicas:
        if used.replica.model == model.name and not used.leaving:
            slots.setdefault(used.replica.node_id, []).append(used.replica.slot)
    reserved: dict[NodeId, list[Reservation]] = {}
    for one in fleet.reservations:
        if one.operation_id != operation_id:
            reserved.setdefault(one.node_id, []).append(one)
    for one in [*_restarting(connection, fleet, model.name), *_unseen(connection, fleet)]:
        reserved.setdefault(one.node_id, []).append(one)
    idle = _idle(fleet, model.name, pace.idle_seconds)
    near = _neighbours(connection, fleet, model)
    return [
        Room(
            node=node,
            slots=tuple(slots.get(node.id, ())),
            reserved=tuple(reserved.get(node.id, ())),
            idle=tuple(idle.get(node.id, ())),
            neighbours=tuple(near.get(node.id, ())),
        )
        for node in fleet.nodes
    ]


def _restarting(connection: Connection, fleet: Fleet, model: str) -> list[Reservation]:
    """The memory of engines of other models that ended and that their workers start again at any moment. An engine of
    the same model is no obstacle: a start replaces it.
    """
    found: list[Reservation] = []
    for node in fleet.nodes:
        for key in node.report.restarting:
            try:
                name, slot = parse_process_key(key)
            except Invalid:
                continue  # a name of the worker's own
            other = models.get(connection, name) if name != model else None
            if other is not None:
                taken = demand_of(other, fleet.measured(other)).memory_bytes
                found.append(Reservation(operation_id="", node_id=node.id, model=name, slot=slot, memory_bytes=taken))
    return found


def _unseen(connection: Connection, fleet: Fleet) -> list[Reservation]:
    """The memory of replicas that a report has shown before the heartbeat with the new amount of free memory was
    stored. The load of a replica reserves it; a worker that started it by itself had no load.
    """
    heard = {node.id: node.last_heartbeat for node in fleet.nodes}
    known = {
        (one.node_id, one.model, one.slot)
        for one in fleet.reservations
        if not one.settled_at or one.settled_at >= heard.get(one.node_id, 0.0)
    }
    found: list[Reservation] = []
    for used in fleet.replicas:
        replica, at = used.replica, used.created_at
        is_unseen = at > heard.get(replica.node_id, at)
        model = models.get(connection, replica.model) if is_unseen else None
        if model is not None and (replica.node_id, replica.model, replica.slot) not in known:
            found.append(
                Reservation(
                    operation_id="",
                    node_id=replica.node_id,
                    model=replica.model,
                    slot=replica.slot,
                    memory_bytes=demand_of(model, fleet.measured(model)).memory_bytes,
                    settled_at=at,
                )
            )
    return found


def _idle(fleet: Fleet, model: str, idle_seconds: float) -> dict[NodeId, list[IdleReplica]]:
    """Per node, the replicas of other models that nobody wants or uses, least recently used first."""
    counts: dict[str, int] = {}
    for used in fleet.replicas:
        counts[used.replica.model] = counts.get(used.replica.model, 0) + (not used.leaving)
    held = {
        (node.id, one.model_id, one.replica_index): one.memory_bytes
        for node in fleet.nodes
        for one in node.report.replicas
    }
    found: dict[NodeId, list[IdleReplica]] = {}
    for used in sorted(fleet.replicas, key=lambda one: one.last_used):
        replica = used.replica
        if replica.model == model or used.leaving or fleet.now - used.last_used < idle_seconds:
            continue
        if counts[replica.model] <= least_wanted(fleet, replica.model):
            continue
        counts[replica.model] -= 1
        info = fleet.infos.get(replica.model)
        memory = held.get((replica.node_id, replica.model, replica.slot)) or (info.memory_bytes if info else 0)
        found.setdefault(replica.node_id, []).append(
            IdleReplica(model=replica.model, slot=replica.slot, memory_bytes=memory, used_at=used.last_used)
        )
    return found


def least_wanted(fleet: Fleet, model: str) -> int:
    """How many replicas of a model must stay, whoever else needs room."""
    schedule, info = fleet.schedules.get(model), fleet.infos.get(model)
    if schedule is not None and schedule.spread_all:
        return len(fleet.nodes)
    return max(schedule.min_replicas if schedule is not None else 0, info.kept_replicas if info is not None else 0)


def _neighbours(connection: Connection, fleet: Fleet, model: Model) -> dict[NodeId, list[str]]:
    """Per node, the running models of a concurrency group of this one. LocalAI's configurations name such groups."""
    groups = set(served_config(model).concurrency_groups) if model.config.get("concurrency_groups") else set()
    if not groups:
        return {}
    sharing: dict[str, bool] = {}
    near: dict[NodeId, list[str]] = {}
    for used in fleet.replicas:
        name = used.replica.model
        if name == model.name:
            continue
        if name not in sharing:
            other = models.get(connection, name)
            sharing[name] = other is not None and bool(groups & set(served_config(other).concurrency_groups))
        if sharing[name]:
            near.setdefault(used.replica.node_id, []).append(name)
    return near
