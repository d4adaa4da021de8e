"""Which build of a backend a node can run a model with.

A worker of ours runs what the galleries have for its machine. LocalAI's workers know neither the built-in gallery nor
Python packages: they run images that speak LocalAI's protocol, also one of another gallery under the same name.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from enginehouse.core.action import InstallBackend
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError
from enginehouse.core.ids import NodeId
from enginehouse.core.listing import installed_at
from enginehouse.core.node import Node
from enginehouse.core.reference import parse_uri
from enginehouse.core.replica import LOCALAI_GRPC
from enginehouse.frontend.galleries import Galleries


def builds_for(
    galleries: Galleries, name: str, nodes: Iterable[Node], *, has_carrier: bool
) -> tuple[dict[NodeId, Resolved], dict[NodeId, str]]:
    """The build for each node that can run the backend, and the reason for each other node. Raises `NotFound` for an
    unknown name. Without a carrier no model is loaded on LocalAI's workers.
    """
    every = list(nodes)
    builds, reasons = galleries.resolve_each(name, every)
    for node in every:
        if not node.is_localai:
            continue
        found = builds.pop(node.id, None)
        build = _image_for(galleries, name, node, found) if has_carrier else None
        if build is not None:
            builds[node.id] = build
            reasons.pop(node.id, None)
        else:
            reasons[node.id] = "LocalAI's workers run images that speak LocalAI's protocol, and no gallery has one"
    return builds, reasons


def install_for(action: InstallBackend, node: Node, galleries: str) -> InstallBackend:
    """The install of a load as a LocalAI worker needs it: the build by its own name, and where to look it up."""
    if not node.is_localai:
        return action
    build = msgspec.structs.replace(action.resolved, meta="")
    before = installed_at(node.report.backends, build.directory) if node.report.mark else None
    return msgspec.structs.replace(action, backend=build.directory, resolved=build, galleries=galleries, before=before)


def _image_for(galleries: Galleries, name: str, node: Node, found: Resolved | None) -> Resolved | None:
    if found is not None and _is_usable(found):
        return found
    if "@" in name:
        return None  # this gallery and no other
    for state in galleries.states():
        if state.status != "built-in":
            try:
                build = galleries.resolve(f"{state.name}@{name}", node)
            except EnginehouseError:
                continue
            if _is_usable(build):
                return build
    return None


def _is_usable(build: Resolved) -> bool:
    return parse_uri(build.uri).kind == "image" and build.protocol in ("", LOCALAI_GRPC)
