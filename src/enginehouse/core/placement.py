"""Placement: the node and slot for one replica, or per node the reason why not, in numbers.

Pure: the same rooms give the same choice. A room is what a node has, less what loads under way have reserved. Unknown
amounts are never full. When no node has room, the least recently used idle replicas make room, never below the minimum
of their model. It only chooses; the load adds the intents.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from enginehouse.core.backend import Resolved, find
from enginehouse.core.capacity import Capacity
from enginehouse.core.demand import Demand, disk_needed, missing_bytes
from enginehouse.core.ids import NodeId
from enginehouse.core.model import Model, holds
from enginehouse.core.node import MAX_WAITING, Node
from enginehouse.core.offload import is_on_one_card, known_cards
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.progress import format_bytes
from enginehouse.core.threads import is_for_card

VRAM_SIZES = (8, 16, 24, 48, 80)  # in GiB; the values of LocalAI's label `gpu.vram`
LOADS_PER_NODE = 2  # at once: more would read the same disk and fill the same memory, and all would be late

Obstacle = Literal[
    "not_a_target",
    "other_node",
    "away",
    "drained",
    "unsupported",
    "selector",
    "failed",
    "slots",
    "memory",
    "disk",
    "loads",
]


class Reservation(Struct, frozen=True, kw_only=True):
    """Memory that a load under way will take, and its slot."""

    operation_id: str
    node_id: NodeId
    model: str
    slot: int
    memory_bytes: int
    settled_at: float = 0.0  # when its replica was ready: later heartbeats show the memory as used


class IdleReplica(Struct, frozen=True, kw_only=True):
    """A replica that may be stopped to make room."""

    model: str
    slot: int
    memory_bytes: int  # what it is known to hold; 0 if unknown
    used_at: float


class Room(Struct, frozen=True, kw_only=True):
    """A node as a placement sees it."""

    node: Node
    slots: tuple[int, ...] = ()  # of this model that ready replicas have
    reserved: tuple[Reservation, ...] = ()  # of other loads
    idle: tuple[IdleReplica, ...] = ()  # least recently used first
    neighbours: tuple[str, ...] = ()  # models of the same concurrency group that run here

    def reserved_bytes(self) -> int:
        return sum(self.unseen_amounts())

    def unseen(self) -> list[Reservation]:
        """Those whose memory still counts as free."""
        return [one for one in self.reserved if self._is_unseen(one)]

    def unseen_amounts(self) -> list[int]:
        """What loads will take that the node's free memory does not show yet."""
        return [one.memory_bytes for one in self.unseen()]

    def _is_unseen(self, one: Reservation) -> bool:
        """Whether the free memory of the node is from before the replica. A heartbeat may have been long on its way: it
        counts if its report shows the replica, or was certainly taken later.
        """
        node, report = self.node, self.node.report
        if not one.settled_at or node.last_heartbeat <= one.settled_at:
            return True
        is_shown = any((each.model_id, each.replica_index) == (one.model, one.slot) for each in report.replicas)
        return report.is_whole and not is_shown and report.mark <= one.settled_at


class Needs(Struct, frozen=True, kw_only=True):
    """What a replica needs of its node."""

    model: Model
    demand: Demand
    builds: Mapping[NodeId, Resolved]  # of the nodes that can run its backend
    selector: Mapping[str, str] = {}
    only: str = ""  # the node that the operator named
    avoid: Collection[NodeId] = ()  # nodes where this load has failed
    may_replace: bool = True  # a replica in the way is unreachable, or there would be no load
    replaces: ReplacedReplica | None = None


class Rejection(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    node_name: str
    obstacle: Obstacle
    reason: str
    is_temporary: bool = False  # it goes away by itself, when loads under way end


class Placement(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    slot: int
    stops: tuple[IdleReplica, ...] = ()  # first, to make room


class NoRoom(Struct, frozen=True, kw_only=True):
    """No node fits."""

    rejections: tuple[Rejection, ...]

    @property
    def is_temporary(self) -> bool:
        return any(one.is_temporary for one in self.rejections)


def place(needs: Needs, rooms: Sequence[Room]) -> Placement | NoRoom:
    """Choose a node: enough free memory on the card first, then data that is there, few replicas, most free memory."""
    rejections: list[Rejection] = []
    fitting: list[tuple[Room, int]] = []
    for room in rooms:
        found = judge(needs, room)
        if isinstance(found, Rejection):
            rejections.append(found)
        else:
            fitting.append((room, found))
    if fitting:
        room, slot = min(fitting, key=lambda each: _rank(needs, *each))
        return Placement(node_id=room.node.id, slot=slot)
    making = [one for room in rooms if (one := _after_stops(needs, room)) is not None]
    if making:
        # The fewest stops, then those that were used least recently.
        return min(making, key=lambda one: (len(one.stops), max(stop.used_at for stop in one.stops), one.node_id))
    return NoRoom(rejections=tuple(rejections))


def judge(needs: Needs, room: Room) -> int | Rejection:
    """The slot for a replica on this node, or the reason why it does not fit."""
    node, model = room.node, needs.model
    standing = _standing(needs, node)
    if standing is not None:
        return standing
    slot = free_slot(needs, room)
    if slot is None:
        number = max(1, node.max_replicas_per_model)
        is_loading = any(one.model == model.name and not one.settled_at for one in room.reserved)
        does = "already runs or loads" if is_loading else "already runs"
        some = f"{does} a replica of it" if number == 1 else f"{does} {number} replicas of it"
        why = f"{some}, and --max-replicas-per-model of its worker allows no more"
        return _reject(node, "slots", why, is_temporary=is_loading)
    disk, fetched = node.capacity.available_disk, missing_bytes(model, node.report.models)
    if disk and disk < disk_needed(fetched):
        why = f"needs {format_bytes(disk_needed(fetched))} of disk, {format_bytes(disk)} free"
        return _reject(node, "disk", why)
    short = memory_short(needs, room)
    if short:
        return _reject(node, "memory", short, is_temporary=_fits_later(needs, room))
    loading = [one for one in room.reserved if not one.settled_at]
    if len(loading) >= LOADS_PER_NODE:
        names = " and ".join(one.model for one in loading)
        return _reject(node, "loads", f"is loading {names}", is_temporary=True)
    return slot


def free_memory(capacity: Capacity) -> int:
    """Free memory of the machine and its graphics cards, as far as known."""
    if is_unified(capacity):
        return max(capacity.available_ram, capacity.available_vram)
    return capacity.available_ram + capacity.available_vram


def is_unified(capacity: Capacity) -> bool:
    """Whether the card uses the machine's memory: it then reports about as much as the machine has."""
    return bool(capacity.total_vram) and abs(capacity.total_vram - capacity.total_ram) * 20 < capacity.total_ram


def fits(model: Model, capacity: Capacity) -> bool:
    """Whether the files of a model fit into free memory; unknown sizes count as fitting."""
    return not capacity.available_ram or not model.size_bytes or model.size_bytes <= free_memory(capacity)


def memory_short(needs: Needs, room: Room) -> str:
    """Why the memory of a node does not suffice, in numbers; "" if it does, or if it is unknown."""
    capacity, need = room.node.capacity, needs.demand.memory_bytes
    best = best_card(needs, room)
    if best is not None and need_on_card(needs) > best:
        asked, number = format_bytes(need_on_card(needs)), len(capacity.gpu_cards)
        return f"needs {asked} of VRAM on one card, {format_bytes(best)} free on the best of {number}"
    free, reserved = free_memory(capacity), room.reserved_bytes()
    if not need or not capacity.available_ram or need <= free - reserved:
        return ""
    kind = "VRAM and RAM" if capacity.available_vram and not is_unified(capacity) else "memory"
    why = f"needs {needs.demand.phrase} of {kind}, {format_bytes(free)} free"
    if reserved:
        names = ", ".join(dict.fromkeys(one.model for one in room.unseen() if one.memory_bytes))
        why += f", {format_bytes(reserved)} reserved for {names}"
    return why


def need_on_card(needs: Needs) -> int:
    """What a replica needs on its card. What was measured is memory of the machine, so the weights count at least."""
    demand = needs.demand
    return max(demand.memory_bytes, needs.model.size_bytes) if demand.origin == "measured" else demand.memory_bytes


def best_card(needs: Needs, room: Room, *, reserved: bool = True) -> int | None:
    """The free memory of the card with the most, for a replica that has to be on one card; None if it does not, or if
    the node does not have several cards whose memory is known.

    Loads under way are taken to choose the card with the most free memory, one after the other, as workers do.
    """
    cards = known_cards(room.node.capacity)
    build = needs.builds.get(room.node.id)
    if (
        len(cards) < 2
        or build is None
        or not is_on_one_card(needs.model, build.directory, room.node.capacity.gpu_vendor)
    ):
        return None
    free = [card.available_vram or 0 for card in cards]
    for amount in sorted(room.unseen_amounts() if reserved else (), reverse=True):
        best = max(range(len(free)), key=free.__getitem__)
        free[best] = max(0, free[best] - amount)
    return max(free)


def selects(selector: Mapping[str, str], node: Node) -> bool:
    """Whether a node has every label of a selector."""
    if not selector:
        return True
    labels = labels_of(node)
    return all(labels.get(key) == value for key, value in selector.items())


def labels_of(node: Node) -> dict[str, str]:
    """Its labels, and those that follow from what it is; a label that an operator set wins."""
    system, _, architecture = node.platform.partition("/")
    implied = {
        "node.name": node.name,
        "node.os": system,
        "node.arch": architecture,
        "node.capability": node.capability,
        "gpu.vendor": node.capacity.gpu_vendor,
        "gpu.vram": _vram_label(node.capacity.total_vram),
        "node.replica-slots": str(max(1, node.max_replicas_per_model)),
    }
    return {**{key: value for key, value in implied.items() if value}, **node.labels}


def _vram_label(total_bytes: int) -> str:
    """LocalAI's label: the largest of a few sizes that a machine has, or its own below the smallest."""
    size = total_bytes // 1024**3
    if size >= VRAM_SIZES[-1]:
        return f"{VRAM_SIZES[-1]}GB+"
    return f"{max([one for one in VRAM_SIZES if one <= size], default=size)}GB" if total_bytes else ""


def may_return(needs: Needs, rooms: Sequence[Room]) -> bool:
    """Whether a suitable node is briefly away: silent, but not long enough to be offline."""
    return any(
        room.node.is_target
        and not room.node.drained
        and room.node.health == "unhealthy"
        and room.node.id in needs.builds
        and room.node.id not in needs.avoid
        and selects(needs.selector, room.node)
        and (not needs.only or room.node.id == needs.only)
        for room in rooms
    )


def explanation(needs: Needs, found: NoRoom) -> str:
    """One reason per node. Of the nodes that wait for approval, only a few are named."""
    shown = [one for one in found.rejections if one.obstacle != "other_node"]
    pending = [one for one in shown if one.obstacle == "not_a_target"]
    unnamed = {one.node_id for one in pending[MAX_WAITING:]}
    reasons = [f"{one.node_name} {one.reason}" for one in shown if one.node_id not in unnamed]
    reasons += [f"{len(unnamed)} more wait for approval"] if unnamed else []
    reason = "; ".join(reasons) or "there is no node. `enginehouse nodes add` shows how to join one"
    return f"cannot place {needs.model.name}: {reason}"


def _standing(needs: Needs, node: Node) -> Rejection | None:
    """Why a node is no candidate, whatever room it has."""
    if node.node_type != "backend" or (needs.only and node.id != needs.only):
        return _reject(node, "other_node", "is not the requested node")
    if not node.approved:
        return _reject(node, "not_a_target", "waits for approval")
    if node.drained:
        return _reject(node, "drained", "is drained")
    if node.health != "healthy":
        return _reject(node, "away", f"is {node.health}")
    if node.is_localai and node.id not in needs.builds:
        why = f"has a LocalAI worker, which runs images of galleries only, and {needs.model.backend} has none for it"
        return _reject(node, "unsupported", why)
    if node.id not in needs.builds:
        return _reject(node, "unsupported", f"cannot run {needs.model.backend}")
    if not selects(needs.selector, node):
        wanted = ", ".join(f"{key}={value}" for key, value in sorted(needs.selector.items()))
        return _reject(node, "selector", f"does not have the labels {wanted}")
    if node.id in needs.avoid:
        return _reject(node, "failed", "failed to start it")
    return None


def _reject(node: Node, obstacle: Obstacle, reason: str, *, is_temporary: bool = False) -> Rejection:
    return Rejection(node_id=node.id, node_name=node.name, obstacle=obstacle, reason=reason, is_temporary=is_temporary)


def free_slot(needs: Needs, room: Room) -> int | None:
    """The lowest free slot of the model on a node; None if there is none."""
    # For the time of its replacement a replica does not count, unless the worker itself keeps to the number.
    is_beside = needs.replaces is not None and needs.replaces.node_id == room.node.id and not room.node.is_localai
    number = max(1, room.node.max_replicas_per_model) + is_beside
    loading = {one.slot for one in room.reserved if one.model == needs.model.name and not one.settled_at}
    taken = loading | set(room.slots)
    if len(taken) < number:  # which slots are taken says nothing: a replacement may have one beyond the number
        return next(slot for slot in range(number) if slot not in taken)
    if needs.may_replace:
        return next((slot for slot in sorted(room.slots) if slot not in loading), None)
    return None


def _fits_later(needs: Needs, room: Room) -> bool:
    """Whether the memory would suffice if the loads under way ended without a replica."""
    need, best = needs.demand.memory_bytes, best_card(needs, room, reserved=False)
    return need <= free_memory(room.node.capacity) and (best is None or need_on_card(needs) <= best)


def _rank(needs: Needs, room: Room, slot: int) -> tuple[object, ...]:
    node, model, capacity = room.node, needs.model, room.node.capacity
    build = needs.builds[node.id]
    need = needs.demand.memory_bytes
    best = best_card(needs, room)
    on_card = capacity.available_vram if best is None else best
    is_on_card = is_for_card(build.directory, capacity.gpu_vendor) and need <= on_card
    return (
        slot in room.slots,  # the replica there is unreachable
        not is_on_card,
        len(room.neighbours),
        find(node.report.backends, model.backend) is None and find(node.report.backends, build.directory) is None,
        not holds(node.report.models, model),
        any(one.model_id == model.name for one in node.report.replicas),  # it may be lost
        len(node.report.replicas) + len(room.reserved),
        room.reserved_bytes() - free_memory(capacity),
        node.name,
    )


def _after_stops(needs: Needs, room: Room) -> Placement | None:
    """The placement on this node after the fewest stops of idle replicas; None if these do not help."""
    if _standing(needs, room.node) is not None or not memory_short(needs, room):
        return None
    slot = free_slot(needs, room)
    disk, fetched = room.node.capacity.available_disk, missing_bytes(needs.model, room.node.report.models)
    if slot is None or (disk and disk < disk_needed(fetched)):
        return None
    need, best = needs.demand.memory_bytes, best_card(needs, room)
    short = need - (free_memory(room.node.capacity) - room.reserved_bytes())
    if best is not None:
        need = need_on_card(needs)
        if need > max(card.total_vram or 0 for card in room.node.capacity.gpu_cards):
            return None  # no card would be large enough
        # Which card an idle replica uses is not known. If a stop made room on another one, the next look stops more.
        short = max(short, need - best)
    stops: list[IdleReplica] = []
    for one in room.idle:
        if short <= 0:
            break
        if one.memory_bytes:
            stops.append(one)
            short -= one.memory_bytes
    return Placement(node_id=room.node.id, slot=slot, stops=tuple(stops)) if short <= 0 else None
