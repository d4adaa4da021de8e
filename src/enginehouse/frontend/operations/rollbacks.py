"""Chooses what a rollback does on each node: the version before the current one, which its worker has kept.

A rollback is an install of that version by its digest (`InstallBackend.returns`). The worker exchanges the two trees
and downloads nothing; a second rollback undoes the first. The report of a node says which version it has kept, so a
node without one is left out before anything is sent. What runs is replaced by the reconciler, as after an upgrade.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.core import backend as backends
from enginehouse.core.action import Action, InstallBackend
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.ids import NodeId
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest

LOCALAI_REASON = "LocalAI's workers keep no previous version"


def choose_rollbacks(
    request: BackendRequest, targets: Sequence[Node], reasons: dict[NodeId, str]
) -> list[tuple[Node, Action]]:
    """Return the action per node, and add the reason of each other one to `reasons`."""
    actions: list[tuple[Node, Action]] = []
    for node in targets:
        held = backends.find(node.report.backends, request.plain_name)
        if node.is_localai:
            reasons[node.id] = LOCALAI_REASON
        elif held is None:
            reasons[node.id] = f"{request.plain_name} is not installed there"
        elif not held.previous_digest:
            reasons[node.id] = f"it has kept no previous version of {held.name}"
        else:
            build = previous_build(held, node)
            actions.append((node, InstallBackend(backend=request.plain_name, resolved=build, returns=True)))
    return actions


def previous_build(held: InstalledBackend, node: Node) -> Resolved:
    """The version before the installed one. If its tree is gone by then, an image is fetched by this digest."""
    pointers = (one.name for one in node.report.backends if one.is_meta and one.meta_backend_for == held.name)
    return Resolved(
        directory=held.name,
        uri=held.uri,
        digest=held.previous_digest,
        platform=node.platform,
        meta=next(pointers, ""),
        version=held.previous_version,
        gallery_url=held.gallery_url,
    )
