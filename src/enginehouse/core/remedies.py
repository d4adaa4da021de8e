"""What would have to change so that a node takes a replica, for people who wait for one.

Pure. An obstacle is removed in thought and the node is judged again, so that what is named is enough as far as is
known. A node that can never take the model is not named.
"""

from __future__ import annotations

from collections.abc import Sequence
from shlex import quote

import msgspec

from enginehouse.core.demand import disk_needed, missing_bytes
from enginehouse.core.node import Node
from enginehouse.core.placement import (
    Needs,
    Rejection,
    Room,
    best_card,
    free_memory,
    is_unified,
    judge,
    need_on_card,
)
from enginehouse.core.progress import format_bytes

MAX_STEPS = 5  # the number of different obstacles that a person can remove
MAX_SHOWN = 3


def remedies(needs: Needs, rooms: Sequence[Room]) -> tuple[str, ...]:
    """One sentence per node, the easiest first."""
    found = [(steps, room.node.name) for room in rooms if (steps := _steps(needs, room))]
    if found:
        found.sort(key=lambda one: (len(one[0]), one[1]))
        return tuple(f"{name}: {', then '.join(steps)}" for steps, name in found[:MAX_SHOWN])
    size = f" with {format_bytes(needs.demand.memory_bytes)} of free memory" if needs.demand.memory_bytes else ""
    return (f"add a node{size} that can run {needs.model.backend} (enginehouse nodes add)",)


def _steps(needs: Needs, room: Room) -> list[str]:
    """What has to be done for one node; empty if nothing helps."""
    steps: list[str] = []
    for _ in range(MAX_STEPS):
        verdict = judge(needs, room)
        if not isinstance(verdict, Rejection):
            return steps
        if verdict.obstacle == "memory" and not verdict.is_temporary:
            step = _memory(needs, room)
            return [*steps, step] if step else []
        changed = _without(needs, room, verdict)
        if changed is None:
            return []
        step, room = changed
        steps.append(step)
    return []


def _without(needs: Needs, room: Room, verdict: Rejection) -> tuple[str, Room] | None:
    """How to remove an obstacle, and the node without it."""
    node, name = room.node, quote(room.node.name)
    if verdict.is_temporary:
        return "its loads have to end", msgspec.structs.replace(room, reserved=())
    match verdict.obstacle:
        case "drained":
            return f"resume it (enginehouse nodes resume {name})", _with(room, drained=False)
        case "away":
            return "it has to come back", _with(room, health="healthy")
        case "not_a_target":
            return f"approve it (enginehouse nodes approve {name})", _with(room, approved=True)
        case "selector":
            labels = " ".join(quote(f"{key}={value}") for key, value in sorted(needs.selector.items()))
            if any(key.startswith(("node.", "gpu.")) for key in needs.selector):
                return None  # these follow from what the machine is
            return f"label it (enginehouse nodes label {name} {labels})", _with(
                room, labels={**node.labels, **needs.selector}
            )
        case "slots":
            number = max(1, node.max_replicas_per_model) + 1
            step = f"start its worker with --max-replicas-per-model {number}"
            return step, _with(room, max_replicas_per_model=number)
        case "disk":
            wanted = disk_needed(missing_bytes(needs.model, node.report.models))
            if node.capacity.total_disk and wanted > node.capacity.total_disk:
                return None
            capacity = msgspec.structs.replace(node.capacity, available_disk=wanted)
            step = f"free {format_bytes(wanted - node.capacity.available_disk)} of its disk"
            return step, _with(room, capacity=capacity)
        case _:
            return None


def _with(room: Room, **fields: object) -> Room:
    return msgspec.structs.replace(room, node=msgspec.structs.replace(room.node, **fields))


def _memory(needs: Needs, room: Room) -> str:
    """How much memory is short, and which model has as much; "" if the machine is too small."""
    capacity, best = room.node.capacity, best_card(needs, room)
    if best is not None and need_on_card(needs) > best:
        if need_on_card(needs) > max(card.total_vram or 0 for card in capacity.gpu_cards):
            return ""
        return f"free {format_bytes(need_on_card(needs) - best)} of VRAM on its best card"
    need = needs.demand.memory_bytes
    total = capacity.total_ram + (0 if is_unified(capacity) else capacity.total_vram)
    if total and need > total:
        return ""
    short = need - (free_memory(capacity) - room.reserved_bytes())
    return f"free {format_bytes(short)} of its memory{_holder(room.node, needs.model.name, short)}"


def _holder(node: Node, model: str, short: int) -> str:
    """The model whose replica holds the least that is enough."""
    held = [
        (one.memory_bytes, one.model_id)
        for one in node.report.replicas
        if one.model_id != model and one.memory_bytes >= short
    ]
    return f" (enginehouse models unload {quote(min(held)[1])} would)" if held else ""
