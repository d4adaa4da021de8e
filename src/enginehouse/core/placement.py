"""Where one replica goes. Pure: the same nodes give the same choice."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from enginehouse.core.backend import find
from enginehouse.core.errors import Unavailable
from enginehouse.core.model import Model, holds
from enginehouse.core.node import MAX_WAITING, Capacity, Node


def choose_node(
    model: Model,
    nodes: Sequence[Node],
    supported: Collection[str],
    *,
    avoid: Collection[str] = (),
    only: str = "",
) -> Node:
    """The node for a replica of `model`.

    `supported` are the nodes on which the backend can run at all, `avoid` those that this load has already failed on,
    `only` the node that the operator named. Where the model fits into memory comes first, since a start is refused
    elsewhere. What is already on a node counts next (a warm node answers in a second, a cold one after a download),
    then whether it still reports a replica (which nobody can reach, or there would be no load), then how much runs
    there, then its memory, then its name, so that the choice is stable.
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
    """Of the machine and its graphics cards together, as far as it is known."""
    return capacity.available_ram + capacity.available_vram


def fits(model: Model, capacity: Capacity) -> bool:
    """Whether the files of a model fit into free memory; what is not known counts as fitting."""
    return not capacity.available_ram or not model.size_bytes or model.size_bytes <= free_memory(capacity)


def may_return(nodes: Sequence[Node], supported: Collection[str], *, avoid: Collection[str], only: str) -> bool:
    """Whether a node that would do is away for a moment: silent, but not for so long that it counts as offline."""
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


def _why_none(model: Model, nodes: Sequence[Node], supported: Collection[str], only: str) -> str:
    """One reason per node, so that the operator need not guess; of those that wait for approval, a few."""
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
            why = "is one of LocalAI's workers, which load models for LocalAI only"
        elif node.id not in supported:
            why = f"cannot run {model.backend}"
        else:
            why = "failed to start it"
        reasons.append(f"{node.name} {why}")
    reasons += [f"{len(unnamed)} more wait for approval"] if unnamed else []
    told = "; ".join(reasons) or "there is no node; join one with `enginehouse join`"
    return f"cannot place {model.name}: {told}"
