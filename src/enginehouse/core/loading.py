"""The next step of a load: a pure function of the steps so far and the reports of the nodes.

The engine and the model's files are fetched in parallel; the start waits for both. Each step is idempotent, so any
holder of the load's lease may take it. The intents are the only state between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core import placement
from enginehouse.core.action import InstallBackend, PullModel, RemoveBackend, StartReplica
from enginehouse.core.backend import Resolved, find
from enginehouse.core.changes import nodes_after
from enginehouse.core.errors import Unavailable
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import NODE_REMOVED, Intent
from enginehouse.core.model import Model, holds
from enginehouse.core.node import Node
from enginehouse.core.reference import parse_uri

MAX_TIMES = 4  # installs of the same engine on the same node per load: operators may delete it once or twice meanwhile


class Next(Struct, frozen=True):
    """Add this intent."""

    node_id: NodeId
    action: InstallBackend | PullModel | StartReplica


class Wait(Struct, frozen=True):
    """An intent is under way, or a node is expected back."""


class Done(Struct, frozen=True):
    """The replica was started."""


class GiveUp(Struct, frozen=True):
    """No step is left to take."""

    code: str
    message: str


LoadStep = Next | Wait | Done | GiveUp


def next_step(
    model: Model,
    intents: Sequence[Intent],
    nodes: Sequence[Node],
    resolved: Mapping[NodeId, Resolved],
    *,
    only: str,
    new_key: str,
    changes: Sequence[Intent] = (),
) -> LoadStep:
    """`resolved` maps each suitable node to the build of the model's backend. `only` is the node that the operator
    named, or "".

    `changes` are all intents for that engine and these files that are open or succeeded since the last reports,
    including those of other operations.
    """
    if any(intent.is_open for intent in intents):
        return _beside(model, intents, nodes)
    if any(intent.state == "cancelled" and intent.reason != NODE_REMOVED for intent in intents):
        return GiveUp(code="cancelled", message=f"cannot load {model.name}: it was cancelled")
    last = intents[-1] if intents else None
    newest = _newest(changes, resolved)
    nodes = nodes_after(nodes, [*(one for one in changes if not one.is_open), *intents])
    failed = [intent for intent in intents if _has_failed(intent, intents, newest)]
    failed_on = {intent.node_id for intent in failed} | _in_vain(intents)
    if last is not None and last.node_id not in failed_on:
        if isinstance(last.action, StartReplica) and last.state == "succeeded":
            return Done()
        chosen = next((node for node in nodes if node.id == last.node_id), None)
        if chosen is not None and chosen.id in resolved:
            if chosen.id in newest:
                return Wait()  # another operation installs or removes the engine there
            return Next(chosen.id, _next_action(model, chosen, intents, resolved[chosen.id], new_key))
    leaving = {node_id for node_id, one in newest.items() if isinstance(one.action, RemoveBackend)}
    try:
        node = placement.choose_node(model, nodes, resolved.keys(), avoid=failed_on | leaving, only=only)
    except Unavailable as error:
        if placement.may_return(nodes, resolved.keys(), avoid=failed_on, only=only):
            return Wait()
        if any(one.is_schedulable for one in nodes if one.id in leaving - failed_on and only in ("", one.id)):
            return Wait()  # the engine is being deleted there; afterwards it is installed again
        if failed:
            # The last cause says more than "no node is left".
            cause = failed[-1]
            message = cause.message if cause.state == "failed" else f"cannot load {model.name}: {cause.message}"
            return GiveUp(code=cause.reason or cause.state, message=message)
        return GiveUp(code=error.code, message=error.message)
    return Next(node.id, _next_action(model, node, intents, resolved[node.id], new_key))


def _newest(changes: Sequence[Intent], resolved: Mapping[NodeId, Resolved]) -> dict[NodeId, Intent]:
    """Per node, the open intent of any operation for the engine there."""
    return {
        one.node_id: one
        for one in changes
        if one.is_open
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
    """The nodes where the same step succeeded so often that a repetition will not help, because its result does not
    last.
    """
    done = Counter((one.node_id, type(one.action)) for one in intents if one.state == "succeeded")
    return {node_id for (node_id, _), times in done.items() if times >= MAX_TIMES}


def _installs(intent: Intent) -> bool:
    return isinstance(intent.action, InstallBackend)


def _lacks_engine(intent: Intent) -> bool:
    return intent.state == "failed" and isinstance(intent.action, StartReplica) and intent.reason == "not_found"


def _beside(model: Model, intents: Sequence[Intent], nodes: Sequence[Node]) -> Next | Wait:
    """A step that can run beside the open one: pull the files while the engine is installed."""
    last = intents[-1]
    if not last.is_open or not isinstance(last.action, InstallBackend):
        return Wait()
    tried = any(isinstance(one.action, PullModel) and one.node_id == last.node_id for one in intents)
    chosen = next((node for node in nodes if node.id == last.node_id), None)
    if tried or chosen is None or holds(chosen.report.models, model):
        return Wait()
    return Next(chosen.id, PullModel(model=model))


def _next_action(
    model: Model, node: Node, intents: Sequence[Intent], resolved: Resolved, new_key: str
) -> InstallBackend | PullModel | StartReplica:
    """The next thing that the node lacks."""
    here = [intent for intent in intents if intent.node_id == node.id]
    if find(node.report.backends, resolved.directory) is None or (here and _lacks_engine(here[-1])):
        # Any version of an image will do: another operation may be installing it, or have installed it since.
        is_image = parse_uri(resolved.uri).kind == "image"
        return InstallBackend(backend=model.backend, resolved=resolved, keep=is_image)
    if not holds(node.report.models, model):
        return PullModel(model=model)
    return StartReplica(model=model, slot=0, directory=resolved.directory, key=new_key)
