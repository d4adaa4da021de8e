"""Placement: the choice of a node for one replica, or one reason per node why none fits.

Pure: the same nodes give the same choice. It only chooses; the load adds the intents.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from enginehouse.core.backend import find
from enginehouse.core.capacity import Capacity
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, holds
from enginehouse.core.node import MAX_WAITING, Node


def choose_node(
    model: Model,
    nodes: Sequence[Node],
    supported: Collection[NodeId],
    *,
    avoid: Collection[NodeId] = (),
    only: str = "",
) -> Node:
    """Choose the node for a replica of `model`.

    `supported` are the nodes that can run the backend, `avoid` those where this load has failed, `only` the node that
    the operator named. Nodes with enough memory come first, because others refuse the start. Then come nodes that have
    the backend and the files: a warm node answers in a second, a cold one after a download. A node that still reports a
    replica of the model ranks lower: that replica is unreachable, or there would be no load. The rest of the order is
    running replicas, free memory and name, which makes the choice stable.
    """
    fitting = [
        node
        for node in nodes
        if node.is_schedulable and node.id in supported and node.id not in avoid and (not only or node.id == only)
    ]
    if not fitting:
        raise Unavailable(_why_none(model, nodes, supported, only), code="insufficient_capacity")
    return min(
        fitting,
        key=lambda node: (
            not fits(model, node.capacity),
            find(node.report.backends, model.backend) is None,
            not holds(node.report.models, model),
            any(replica.model_id == model.name for replica in node.report.replicas),
            len(node.report.replicas),
            -node.capacity.available_ram,
            node.name,
        ),
    )


def free_memory(capacity: Capacity) -> int:
    """Free memory of the machine and its graphics cards, as far as known."""
    return capacity.available_ram + capacity.available_vram


def fits(model: Model, capacity: Capacity) -> bool:
    """Whether the files of a model fit into free memory; unknown sizes count as fitting."""
    return not capacity.available_ram or not model.size_bytes or model.size_bytes <= free_memory(capacity)


def may_return(nodes: Sequence[Node], supported: Collection[NodeId], *, avoid: Collection[NodeId], only: str) -> bool:
    """Whether a suitable node is briefly away: silent, but not long enough to be offline."""
    return any(
        node.is_target
        and not node.is_localai
        and not node.drained
        and node.health == "unhealthy"
        and node.id in supported
        and node.id not in avoid
        and (not only or node.id == only)
        for node in nodes
    )


def _why_none(model: Model, nodes: Sequence[Node], supported: Collection[NodeId], only: str) -> str:
    """One reason per node. Of the nodes that wait for approval, only a few are named."""
    considered = [node for node in nodes if node.node_type == "backend" and (not only or node.id == only)]
    unnamed = [node.id for node in considered if not node.approved][MAX_WAITING:]
    reasons = []
    for node in considered:
        if node.id in unnamed:
            continue
        if not node.approved:
            why = "waits for approval"
        elif node.drained:
            why = "is drained"
        elif node.health != "healthy":
            why = f"is {node.health}"
        elif node.is_localai:
            why = "has a LocalAI worker, which loads models only for LocalAI"
        elif node.id not in supported:
            why = f"cannot run {model.backend}"
        else:
            why = "failed to start it"
        reasons.append(f"{node.name} {why}")
    reasons += [f"{len(unnamed)} more wait for approval"] if unnamed else []
    reason = "; ".join(reasons) or "there is no node. Join one with `enginehouse join`"
    return f"cannot place {model.name}: {reason}"
