"""The next step of a load: a pure function of the steps so far and the reports of the nodes.

The engine and the model's files are fetched in parallel; the start waits for both. Each step is idempotent, so any
holder of the load's lease may take it. The intents are the only state between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from enginehouse.core.action import InstallBackend, PullModel, RemoveBackend, StartReplica, StopReplica
from enginehouse.core.backend import Resolved, find
from enginehouse.core.changes import nodes_after
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import NODE_LEFT, NODE_REMOVED, Intent
from enginehouse.core.model import Model, holds
from enginehouse.core.node import Node
from enginehouse.core.operation import ReplacedReplica
from enginehouse.core.placement import (
    Needs,
    NoRoom,
    Rejection,
    Reservation,
    Room,
    explanation,
    free_slot,
    judge,
    may_return,
    place,
)
from enginehouse.core.reference import parse_uri

_GONE = frozenset({NODE_REMOVED, NODE_LEFT})
MAX_TIMES = 4  # installs of the same engine on the same node per load: operators may delete it once or twice meanwhile


class Next(Struct, frozen=True):
    """Add this intent, and reserve the slot and the memory on its node."""

    node_id: NodeId
    action: InstallBackend | PullModel | StartReplica
    slot: int = 0


class MakeRoom(Struct, frozen=True):
    """Stop idle replicas on this node first."""

    node_id: NodeId
    actions: tuple[StopReplica, ...]


class Wait(Struct, frozen=True):
    """An intent is under way, a node is expected back, or other loads end first."""


class Done(Struct, frozen=True):
    """The replica was started."""


class GiveUp(Struct, frozen=True):
    """No step is left to take."""

    code: str
    message: str


LoadStep = Next | MakeRoom | Wait | Done | GiveUp


class LoadState(Struct, frozen=True, kw_only=True):
    """What is known about a load."""

    intents: Sequence[Intent]
    # All intents for its engine and its files that are open or succeeded since the last reports, of any operation.
    changes: Sequence[Intent] = ()
    reserved: Reservation | None = None  # by this load


def next_step(needs: Needs, rooms: Sequence[Room], state: LoadState, *, new_key: str) -> LoadStep:
    """`needs.avoid` is empty: the nodes where the load failed follow from its intents."""
    model, intents, resolved = needs.model, state.intents, needs.builds
    nodes = [room.node for room in rooms]
    left = left_steps(intents, nodes)
    if any(intent.is_open and intent not in left for intent in intents):
        return _beside(model, state, nodes)
    if any(intent.state == "cancelled" and intent.reason not in _GONE for intent in intents):
        return GiveUp(code="cancelled", message=f"cannot load {model.name}: it was cancelled")
    last = intents[-1] if intents else None
    newest = _newest(state.changes, resolved)
    after = nodes_after(nodes, [*(one for one in state.changes if not one.is_open), *intents])
    rooms = [msgspec.structs.replace(room, node=node) for room, node in zip(rooms, after, strict=True)]
    failed = [intent for intent in intents if _has_failed(intent, intents, newest)]
    failed_on = {intent.node_id for intent in failed} | _in_vain(intents) | {node.id for node in nodes if _is_out(node)}
    if last is not None and last.node_id not in failed_on:
        if isinstance(last.action, StartReplica) and last.state == "succeeded":
            return Done()
        chosen = next((room for room in rooms if room.node.id == last.node_id), None)
        if isinstance(last.action, StopReplica):
            if chosen is not None and chosen.node.last_heartbeat <= last.updated_at:
                return Wait()  # the node's next report shows how much room there is now
        elif chosen is not None and chosen.node.id in resolved:
            if chosen.node.id in newest:
                return Wait()  # another operation installs or removes the engine there
            slot = _slot_on(needs, chosen, state.reserved)
            if slot is not None:
                return _step_on(needs, chosen.node, slot, intents, new_key)
    leaving = {node_id for node_id, one in newest.items() if isinstance(one.action, RemoveBackend)}
    needs = msgspec.structs.replace(needs, avoid=failed_on | leaving)
    found = place(needs, rooms)
    if needs.replaces is not None and (isinstance(found, NoRoom) or found.stops):
        instead = _in_place(needs, needs.replaces, rooms)
        if instead is not None:
            return instead
    if isinstance(found, NoRoom):
        return _without_room(needs, rooms, found, failed, leaving - failed_on)
    if found.stops:
        return MakeRoom(found.node_id, tuple(StopReplica(model=one.model, slot=one.slot) for one in found.stops))
    node = next(room.node for room in rooms if room.node.id == found.node_id)
    return _step_on(needs, node, found.slot, intents, new_key)


def _in_place(needs: Needs, replaced: ReplacedReplica, rooms: Sequence[Room]) -> MakeRoom | None:
    """Stop the replica that is replaced first: there is no room beside it. None if it is gone, or its node has no
    other obstacle that its end would remove.
    """
    room = next((one for one in rooms if one.node.id == replaced.node_id), None)
    if room is None or replaced.slot not in room.slots:
        return None
    found = judge(needs, room)
    if isinstance(found, Rejection) and found.obstacle in ("slots", "memory") and not found.is_temporary:
        return MakeRoom(replaced.node_id, (StopReplica(model=needs.model.name, slot=replaced.slot),))
    return None


def left_steps(intents: Sequence[Intent], nodes: Sequence[Node]) -> list[Intent]:
    """The open steps on nodes that are drained or offline: they may wait for ever, so a load goes elsewhere."""
    out = {node.id for node in nodes if _is_out(node)}
    return [intent for intent in intents if intent.is_open and intent.node_id in out]


def _is_out(node: Node) -> bool:
    return node.drained or node.health == "offline"


def _without_room(
    needs: Needs, rooms: Sequence[Room], found: NoRoom, failed: Sequence[Intent], leaving: set[NodeId]
) -> Wait | GiveUp:
    if found.is_temporary or may_return(msgspec.structs.replace(needs, avoid=set(needs.avoid) - leaving), rooms):
        return Wait()
    if any(room.node.is_schedulable for room in rooms if room.node.id in leaving and needs.only in ("", room.node.id)):
        return Wait()  # the engine is being deleted there; afterwards it is installed again
    causes = [one for one in failed if one.reason not in _GONE]
    if causes:
        # The last cause says more than "no node is left".
        cause = causes[-1]
        name = needs.model.name
        message = cause.message if cause.state == "failed" else f"cannot load {name}: {cause.message}"
        return GiveUp(code=cause.reason or cause.state, message=message)
    return GiveUp(code="insufficient_capacity", message=explanation(needs, found))


def _slot_on(needs: Needs, room: Room, reserved: Reservation | None) -> int | None:
    if reserved is not None and reserved.node_id == room.node.id:
        return reserved.slot
    return free_slot(needs, room)


def _newest(changes: Sequence[Intent], resolved: Mapping[NodeId, Resolved]) -> dict[NodeId, Intent]:
    """Per node, the open intent of any operation for the engine there."""
    return {
        one.node_id: one
        for one in changes
        if one.is_open
        and not one.is_held  # its node goes on with the version it has
        and one.node_id in resolved
        and isinstance(one.action, InstallBackend | RemoveBackend)
        and one.subject == f"backend:{resolved[one.node_id].directory}"
    }


def _has_failed(intent: Intent, intents: Sequence[Intent], newest: Mapping[NodeId, Intent]) -> bool:
    """Whether a step shows that this load cannot proceed on its node.

    If a step was superseded, a newer request takes precedence and the node is given up, unless the newer request
    installs another version of the engine. "Not installed here" from a worker means that the engine must be installed;
    the second time it is a failure.
    """
    if intent.state == "superseded":
        by = newest.get(intent.node_id)
        return not (isinstance(intent.action, InstallBackend) and by is not None and _installs(by))
    if intent.state == "cancelled":
        return True
    if intent.state != "failed":
        return False
    missing = [one for one in intents if one.node_id == intent.node_id and _lacks_engine(one)]
    return not _lacks_engine(intent) or len(missing) > 1


def _in_vain(intents: Sequence[Intent]) -> set[NodeId]:
    """The nodes where the step succeeded so often without a lasting result that a repetition will not help."""
    done = Counter((one.node_id, type(one.action)) for one in intents if one.state == "succeeded")
    return {node_id for (node_id, _), times in done.items() if times >= MAX_TIMES}


def _installs(intent: Intent) -> bool:
    return isinstance(intent.action, InstallBackend)


def _lacks_engine(intent: Intent) -> bool:
    return intent.state == "failed" and isinstance(intent.action, StartReplica) and intent.reason == "not_found"


def _beside(model: Model, state: LoadState, nodes: Sequence[Node]) -> Next | Wait:
    """A step that can run beside the open one: pull the files while the engine is installed."""
    intents, reserved = state.intents, state.reserved
    last = intents[-1]
    if not last.is_open or not isinstance(last.action, InstallBackend):
        return Wait()
    tried = any(isinstance(one.action, PullModel) and one.node_id == last.node_id for one in intents)
    chosen = next((node for node in nodes if node.id == last.node_id), None)
    if tried or chosen is None or holds(chosen.report.models, model):
        return Wait()
    return Next(chosen.id, PullModel(model=model), reserved.slot if reserved is not None else 0)


def _step_on(needs: Needs, node: Node, slot: int, intents: Sequence[Intent], new_key: str) -> Next:
    """The next thing that the node lacks."""
    model, resolved = needs.model, needs.builds[node.id]
    here = [intent for intent in intents if intent.node_id == node.id]
    if find(node.report.backends, resolved.directory) is None or (here and _lacks_engine(here[-1])):
        # Any version of an image will do: another operation may be installing it, or have installed it since.
        is_image = parse_uri(resolved.uri).kind == "image"
        return Next(node.id, InstallBackend(backend=model.backend, resolved=resolved, keep=is_image), slot)
    if not holds(node.report.models, model):
        return Next(node.id, PullModel(model=model), slot)
    return Next(node.id, StartReplica(model=model, slot=slot, directory=resolved.directory, key=new_key), slot)
