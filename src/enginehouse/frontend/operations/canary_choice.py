"""Decides how an upgrade begins: which of its nodes are canaries, and which are held until those have proven it.

Runs in the transaction that accepts the request, or plans it. Writes nothing. `core.canary` makes the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from enginehouse.core.action import Action, InstallBackend, subject_of
from enginehouse.core.backend import InstalledBackend, Resolved, find, is_version
from enginehouse.core.canary import Canary, CanaryCandidate, CanaryNode, choose_canaries, hardware_of
from enginehouse.core.changes import nodes_after
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.replica import Replica, process_key
from enginehouse.store import intents, nodes, operations, replicas
from enginehouse.store.db import Connection


class CanaryRules(Struct, frozen=True, kw_only=True):
    seconds: float = 30.0  # that a canary must be ready before the rest follows
    limit_seconds: float = 900.0  # after the swap, for a canary that does not become ready


NO_SETTINGS = CanaryRules()


def begin_canary(
    connection: Connection, actions: Sequence[tuple[NodeId, Action]], rules: CanaryRules, *, is_wanted: bool
) -> Canary | None:
    """The canary phase of an upgrade with these actions; None if it goes to all nodes at once.

    Raises `Conflict` for nodes that are held already: a second request would either undo what the first one is for,
    or wait for it without saying so.
    """
    installs = {node_id: one for node_id, one in actions if isinstance(one, InstallBackend)}
    if not installs or not is_wanted:
        return None
    known = {node.id: node for node in nodes.many(connection, installs)}
    found = [known[node_id] for node_id in installs if node_id in known]
    changes = intents.changing(connection, found, {subject_of(one) for one in installs.values()})
    _check_free(connection, installs, changes)
    if not all(one.upgrade for one in installs.values()):
        return None
    after = nodes_after(found, [one for one in changes if not one.is_open])
    rows = replicas.every(connection)
    changing = [node for node in after if not _is_there(node, installs[node.id])]
    candidates = [candidate_of(node, installs[node.id], rows) for node in changing]
    chosen = choose_canaries(candidates)
    if chosen is None:
        return None
    by_id = {node.id: node for node in changing}
    return Canary(
        seconds=rules.seconds,
        hardware={one.node_id: one.hardware for one in candidates},
        nodes=tuple(canary_node(by_id[one], installs[one], rows) for one in chosen),
    )


def _check_free(connection: Connection, installs: Mapping[NodeId, InstallBackend], changes: Sequence[Intent]) -> None:
    held = [one for one in changes if one.is_held and subject_of(installs[one.node_id]) == one.subject]
    if not held:
        return
    watched = operations.of_intents(connection, [held[0].id])
    named = next((one.id for one in watched if one.is_watching), "")
    backend = installs[held[0].node_id].backend
    raise Conflict(
        f"cannot change {backend}: an upgrade of it is watching its canary (operation {named}). Wait for it, "
        "let the rest follow with `enginehouse ops release`, or cancel it first",
        code="conflict",
    )


def _is_there(node: Node, action: InstallBackend) -> bool:
    installed = find(node.report.backends, action.resolved.directory)
    return installed is not None and is_version(installed.digest, action.resolved)


def candidate_of(node: Node, action: InstallBackend, rows: Sequence[Replica]) -> CanaryCandidate:
    directory = action.resolved.directory
    installed = find(node.report.backends, directory)
    return CanaryCandidate(
        node_id=node.id,
        hardware=hardware_of(node),
        replicas=sum(one.node_id == node.id and one.backend == directory for one in rows),
        is_present=node.is_schedulable,
        # LocalAI's workers install what a tag means, and cannot go back.
        can_return=not node.is_localai and installed is not None and bool(installed.digest),
    )


def canary_node(node: Node, action: InstallBackend, rows: Sequence[Replica]) -> CanaryNode:
    directory = action.resolved.directory
    installed = find(node.report.backends, directory)
    assert installed is not None, "only a node whose version is known is chosen"
    models = {one.model for one in rows if one.node_id == node.id and one.backend == directory}
    return CanaryNode(
        node_id=node.id,
        name=node.name,
        before=version_before(action.resolved, installed.version, installed.digest, installed),
        models=tuple(sorted(models)),
        failed=tuple(process_key(one.model_id, one.replica_index) for one in node.report.failed),
    )


def version_before(build: Resolved, version: str, digest: str, installed: InstalledBackend) -> Resolved:
    """The build that takes a node back to a version. Its worker has the tree; where it has been removed, an image is
    fetched again by its digest.
    """
    is_same_place = installed.uri in ("", build.uri)
    return Resolved(
        directory=build.directory,
        uri=installed.uri or build.uri,
        digest=digest,
        source=build.source,
        platform=build.platform,
        meta=build.meta,
        alias=build.alias,
        version=version,
        mirrors=build.mirrors if is_same_place else (),
        gallery_url=installed.gallery_url or build.gallery_url,
        protocol=build.protocol,
    )
