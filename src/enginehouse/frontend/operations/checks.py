"""Validates a request about a backend: first what needs no nodes and no galleries, before any transaction.

`check_unused` runs inside the transaction that would store a delete, so no replica can start in between unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.core.action import Action, RemoveBackend
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.core.installation import check_directory
from enginehouse.core.name import check_name
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.store import replicas
from enginehouse.store.db import Connection

MAX_URI = 2048
MAX_PARALLEL = 10_000


def check_backend_request(request: BackendRequest) -> None:
    gallery, at, plain = request.name.rpartition("@")
    check_name(plain, "backend")
    if at:
        check_name(gallery, "gallery")
    if not 0 <= request.max_parallel <= MAX_PARALLEL:
        raise Invalid(
            f"cannot run {request.max_parallel} at once: max_parallel must be a number from 1 to {MAX_PARALLEL}",
            code="invalid_name",
            param="max_parallel",
        )
    if request.kind == "rollback" and request.force:
        raise Invalid(
            f"cannot roll back {request.name} by force: the version before is there, or it is not",
            code="unsupported",
            param="force",
        )
    if request.uri:
        _check_uri(request)
    elif request.alias or request.sha256:
        raise Invalid(
            f"cannot {request.task}: alias and sha256 need a uri",
            code="unsupported",
            param="uri",
        )


def check_unused(connection: Connection, request: BackendRequest, actions: Sequence[tuple[Node, Action]]) -> None:
    """Raise `Conflict` if a delete would stop models that run from the backend, and name them."""
    going = {node.id: action for node, action in actions if isinstance(action, RemoveBackend)}
    names = {node.id: node.name for node, _ in actions}
    found: dict[str, set[str]] = {}
    for one in replicas.every(connection):
        action = going.get(one.node_id)
        if action is not None and one.backend in (action.directory, action.backend):
            found.setdefault(one.model, set()).add(names[one.node_id])
    if not found:
        return
    stopped = {model: sorted(places) for model, places in sorted(found.items())}
    models = "; ".join(f"{model} on {', '.join(places)}" for model, places in stopped.items())
    refused = Conflict(
        f"cannot delete {request.plain_name}: it would stop {models}. Unload first, or use --force.",
        code="in_use",
        param="name",
    )
    refused.details["models"] = [{"model": model, "nodes": places} for model, places in stopped.items()]
    raise refused


def _check_uri(request: BackendRequest) -> None:
    if request.kind != "install" or "@" in request.name:
        raise Invalid(
            f"cannot {request.task} from a URI: only an install under a new name can have one",
            code="unsupported",
            param="uri",
        )
    if len(request.uri) > MAX_URI:
        raise Invalid(f"cannot use a URI of more than {MAX_URI} characters", code="invalid_uri", param="uri")
    check_directory(request.name)
    if request.alias:
        check_name(request.alias, "backend")
    if parse_uri(request.uri).kind in ("directory", "ocifile"):
        raise Invalid(
            f"cannot install from {shown_uri(request.uri)} on a cluster: install files of one machine there, with "
            "`enginehouse local install`",
            code="uri_not_allowed",
            param="uri",
        )
