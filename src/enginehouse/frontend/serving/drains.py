"""Steers drains: replicas stop when they have no answer under way, and those that must stay up are moved first.

Runs in the pass of the reconciler, which begins the moves. A drain ends when its node has no replica left; then its
machine can be stopped. A node that is resumed meanwhile ends its drain.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from enginehouse.core.action import StopReplica
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation
from enginehouse.core.pace import ServingPace
from enginehouse.core.reconcile import RECONCILER
from enginehouse.frontend.acceptance import OperationDetails, new_operation
from enginehouse.frontend.serving.rooms import Fleet
from enginehouse.store import db, nodes, operations, replicas, supersession
from enginehouse.store.db import Connection
from enginehouse.store.replicas import UsedReplica

StaysFor = Callable[[UsedReplica], bool]  # whether a replica waits until another one has taken its place


def steer_drains(connection: Connection, fleet: Fleet, stays: StaysFor, pace: ServingPace) -> list[OperationId]:
    """Take the next steps of all drains, and return those that changed."""
    held: dict[NodeId, list[UsedReplica]] = {}
    for used in fleet.replicas:
        held.setdefault(used.replica.node_id, []).append(used)
    drains = {one.targets[0]: one for one in operations.steered(connection, kind="drain")}
    changed: list[OperationId] = []
    for node in fleet.nodes:
        here = held.get(node.id, [])
        drain = drains.pop(node.id, None)
        if drain is None and node.drained and any(not used.leaving for used in here) and node.is_target:
            # A load that was under way when the drain began has ended since.
            details = OperationDetails(targets=(node.id,), is_steered=True)
            drain = new_operation(connection, "drain", node.name, RECONCILER, details)
            operations.insert(connection, drain)
            changed.append(drain.id)
        if drain is not None and _steer(connection, drain, node, here, stays, pace.drain_seconds):
            changed.append(drain.id)
    for gone in drains.values():
        operations.end_steering(connection, gone.id)
        changed.append(gone.id)
    return changed


def _steer(
    connection: Connection,
    drain: Operation,
    node: Node,
    here: Sequence[UsedReplica],
    stays: StaysFor,
    drain_seconds: float,
) -> bool:
    now = db.now(connection)
    if not node.drained:
        fresh = nodes.get(connection, node.id)
        if fresh is None or fresh.drained:
            return False  # it was drained after this pass had read it
        operations.end_steering(connection, drain.id, "cancelled", f"{drain.name} was resumed")
        return True
    stopping = [used.replica for used in here if not used.leaving and not stays(used)]
    for one in stopping:
        replicas.set_leaving(connection, one.node_id, one.model, one.slot, True)
        stop = StopReplica(model=one.model, slot=one.slot, drain_seconds=drain_seconds)
        supersession.add_intent(connection, drain.id, one.node_id, stop, IntentId(str(uuid.uuid4())), now)
    if here:
        return bool(stopping)
    operations.end_steering(connection, drain.id)
    return True
