"""The next step of a load: a pure function of what the load has done so far and what the nodes report.

The engine and the model's files come side by side, so two downloads take as long as the longer one; the start waits for
both.
Each step is idempotent, so whoever holds the load's lease may take it; nothing is remembered between steps but the
intents themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core import placement
from enginehouse.core.action import InstallBackend, PullModel, StartReplica
from enginehouse.core.backend import Resolved, find
from enginehouse.core.errors import Unavailable
from enginehouse.core.intent import Intent
from enginehouse.core.model import Model, holds
from enginehouse.core.node import Node


class Next(Struct, frozen=True):
    """Add this intent."""

    node_id: str
    action: InstallBackend | PullModel | StartReplica


class Wait(Struct, frozen=True):
    """An intent is under way, or a node is expected back."""


class Done(Struct, frozen=True):
    """The replica was started."""


class GiveUp(Struct, frozen=True):
    """No step is left to take."""

    code: str
    message: str


Step = Next | Wait | Done | GiveUp


def next_step(
    model: Model,
    intents: Sequence[Intent],
    nodes: Sequence[Node],
    resolved: Mapping[str, Resolved],
    *,
    only: str,
    new_key: str,
) -> Step:
    """`resolved` has the build of the model's backend for each node that can run it; `only` is the node that the
    operator named, if any.
    """
    if any(intent.is_open for intent in intents):
        return _beside(model, intents, nodes)
    if any(intent.state == "cancelled" for intent in intents):
        return GiveUp(code="cancelled", message=f"cannot load {model.name}: it was cancelled")
    last = intents[-1] if intents else None
    # Where a step was superseded somebody wants something else, and newer wishes win: that node is theirs.
    failed = [intent for intent in intents if intent.state in ("failed", "superseded")]
    failed_on = {intent.node_id for intent in failed}
    if last is not None and last.node_id not in failed_on:
        if isinstance(last.action, StartReplica):
            return Done()
        chosen = next((node for node in nodes if node.id == last.node_id), None)
        if chosen is not None and chosen.id in resolved:
            return Next(chosen.id, _next_action(model, chosen, intents, resolved[chosen.id], new_key))
    try:
        node = placement.choose_node(model, nodes, resolved.keys(), avoid=failed_on, only=only)
    except Unavailable as error:
        if placement.may_return(nodes, resolved.keys(), avoid=failed_on, only=only):
            return Wait()
        if failed:
            # The last cause says more than "no node is left".
            cause = failed[-1]
            told = cause.message if cause.state == "failed" else f"cannot load {model.name}: {cause.message}"
            return GiveUp(code=cause.reason or cause.state, message=told)
        return GiveUp(code=error.code, message=error.message)
    return Next(node.id, _next_action(model, node, intents, resolved[node.id], new_key))


def _beside(model: Model, intents: Sequence[Intent], nodes: Sequence[Node]) -> Next | Wait:
    """What can be done while a step is under way: place the files while the engine is installed."""
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
    """What the node still lacks. A step of this load that succeeded counts at once, the report may lag behind it."""
    done = [intent.action for intent in intents if intent.node_id == node.id and intent.state == "succeeded"]
    installed = find(node.report.backends, resolved.directory)
    if installed is None and not any(isinstance(action, InstallBackend) for action in done):
        return InstallBackend(backend=model.backend, resolved=resolved)
    if not holds(node.report.models, model) and not any(isinstance(action, PullModel) for action in done):
        return PullModel(model=model)
    return StartReplica(model=model, slot=0, directory=resolved.directory, key=new_key)
