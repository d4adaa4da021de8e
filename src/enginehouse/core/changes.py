"""What a node has: its last report plus the changes by intents since then.

Every decision based on reports follows one rule: the effect of an intent takes precedence over the report. A report is
up to a heartbeat old, and much older if the node is away; an intent that ended since is newer. To compute what a node
*will* have, pass the open intents as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec

from enginehouse.core.action import (
    InstallBackend,
    PullModel,
    RemoveBackend,
    RemoveModel,
    StartReplica,
    StopReplica,
    UnknownAction,
)
from enginehouse.core.backend import InstalledBackend
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.model import HeldModel, pinned
from enginehouse.core.node import Node
from enginehouse.core.report import Report


def counts(intent: Intent, report: Report) -> bool:
    """Whether an intent may have changed what the report does not show: it is open, or it succeeded later."""
    return intent.is_open or (intent.state == "succeeded" and intent.updated_at >= report.mark)


def report_after(report: Report, intents: Iterable[Intent]) -> Report:
    """The report as it would be after those of the node's intents that count."""
    for intent in sorted(intents, key=lambda one: (one.subject, one.generation)):
        if counts(intent, report):
            report = _after(report, intent)
    return report


def nodes_after(nodes: Iterable[Node], intents: Iterable[Intent]) -> list[Node]:
    """Like `report_after`, for many nodes."""
    by_node: dict[NodeId, list[Intent]] = {}
    for intent in intents:
        by_node.setdefault(intent.node_id, []).append(intent)
    return [
        msgspec.structs.replace(node, report=report_after(node.report, by_node[node.id]))
        if node.id in by_node
        else node
        for node in nodes
    ]


def _after(report: Report, intent: Intent) -> Report:
    action = intent.action
    match action:
        case InstallBackend():
            return msgspec.structs.replace(report, backends=_with(report.backends, action, intent))
        case RemoveBackend():
            gone = {action.directory, action.called} - {""}
            left = (one for one in report.backends if one.name not in gone and one.meta_backend_for not in gone)
            return msgspec.structs.replace(report, backends=tuple(left))
        case PullModel() | RemoveModel():
            return msgspec.structs.replace(report, models=changed_models(report, intent))
        case StartReplica() | StopReplica() | UnknownAction():
            return report  # processes have their own rows
        case _:
            assert_never(action)


def changed_models(report: Report, intent: Intent) -> tuple[HeldModel, ...]:
    """The models that a node has after an intent about the files of one."""
    action = intent.action
    if isinstance(action, RemoveModel):
        return tuple(one for one in report.models if one.name != action.model)
    if not isinstance(action, PullModel):
        return report.models
    pins = intent.outcome.pinned if intent.outcome is not None else ()
    files = pinned(action.model, pins).files
    held = HeldModel(action.model.name, tuple(file.sha256 for file in files))
    return (*(one for one in report.models if one.name != held.name), held)


def _with(
    backends: tuple[InstalledBackend, ...], action: InstallBackend, intent: Intent
) -> tuple[InstalledBackend, ...]:
    build = action.resolved
    # A worker that resolved the tag itself reports the digest it found.
    digest = (intent.outcome.digest if intent.outcome is not None else "") or build.digest
    before = next((one for one in backends if one.name == build.directory and not one.is_meta), None)
    is_same = before is not None and (action.keep or before.digest == digest)
    installed = InstalledBackend(
        name=build.directory,
        is_system=False,
        is_meta=False,
        gallery_url=build.gallery_url,
        version=build.version,
        uri=build.uri,
        digest=digest,
        generation=intent.generation,
        # A worker keeps the version that it replaced.
        previous_digest="" if before is None else before.previous_digest if is_same else before.digest,
        previous_version="" if before is None else before.previous_version if is_same else before.version,
    )
    names = {build.directory}
    pointers: tuple[InstalledBackend, ...] = ()
    if build.meta and build.meta != build.directory:
        names.add(build.meta)
        pointers = (InstalledBackend(name=build.meta, is_system=False, is_meta=True, meta_backend_for=build.directory),)
    return (*(one for one in backends if one.name not in names), installed, *pointers)
