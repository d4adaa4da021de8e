"""Renders operations and nodes for people and programs: LocalAI's keys first, then additional ones.

Pure functions; nothing is read or stored here. Where LocalAI's key is a formatted string, a number is added beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, Struct, UnsetType

from enginehouse.core import action as actions
from enginehouse.core import operation as operations
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import DRAINING, NODE_AWAY, Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Excluded, Operation, RequestOptions
from enginehouse.core.progress import Progress, format_bytes, is_newer
from enginehouse.core.views import NodeView

# LocalAI's words; other kinds use their own name.
_TASK_TYPES = {"install": "Installation", "upgrade": "Upgrade", "delete": "deletion", "load": "staging"}
DRAINED_MESSAGE = "the node is drained; this continues when it is resumed"


class NodeRow(Struct, kw_only=True):
    """One node (one intent) of an operation."""

    node_id: NodeId
    node_name: str
    status: str
    percentage: float
    file_name: str | UnsetType = UNSET
    current: str | UnsetType = UNSET
    total: str | UnsetType = UNSET
    phase: str | UnsetType = UNSET
    error: str | UnsetType = UNSET
    # Additional.
    action: str  # in words
    kind: str  # of the action, for programs
    intent: IntentId
    state: str
    attempt: int
    reason: str | UnsetType = UNSET
    current_bytes: int | UnsetType = UNSET
    total_bytes: int | UnsetType = UNSET
    due_in_seconds: float | UnsetType = UNSET
    note: str | UnsetType = UNSET  # the worker's remark on a success, such as `already_absent`


class OperationView(Struct, kw_only=True):
    id: str
    name: str
    fullName: str
    jobID: OperationId
    progress: int
    taskType: str
    isDeletion: bool
    isBackend: bool
    isQueued: bool
    cancellable: bool
    message: str
    nodeID: NodeId | UnsetType = UNSET
    phase: str | UnsetType = UNSET
    currentBytes: int | UnsetType = UNSET
    totalBytes: int | UnsetType = UNSET
    error: str | UnsetType = UNSET
    nodes: list[NodeRow] | UnsetType = UNSET
    # Additional.
    kind: str
    status: str
    isParked: bool
    author: str
    createdAt: str
    excluded: tuple[Excluded, ...]
    targets: tuple[NodeId, ...]
    asked: RequestOptions
    retryOf: OperationId | UnsetType = UNSET
    dismissed: bool
    finishedAt: str | UnsetType = UNSET


class Sign(Struct):
    """The last progress of a running intent that this frontend received."""

    progress: Progress
    monotonic: float


class SilenceLimits(Struct, frozen=True):
    """After how much silence a running intent is shown as `running_on_worker`."""

    stall_seconds: float = 120.0
    install_seconds: float = 900.0
    upgrade_seconds: float = 900.0

    def budget_of(self, intent: Intent) -> float:
        """Return the limit for an attempt without any progress yet."""
        is_upgrade = isinstance(intent.action, actions.InstallBackend) and intent.action.upgrade
        return self.upgrade_seconds if is_upgrade else self.install_seconds


class Moment(Struct, frozen=True):
    """The time of a rendering, the limits of silence, and the nodes that get no commands then."""

    now: float
    monotonic: float
    patience: SilenceLimits
    absent: Mapping[NodeId, str]  # nodes that get no commands, and why
    drained: Collection[NodeId]


def render_time(seconds: float) -> str:
    """RFC 3339, as Go writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def render_operation(
    operation: Operation,
    intents: Sequence[Intent],
    names: Mapping[NodeId, str],
    signs: Mapping[IntentId, Sign],
    moment: Moment,
) -> OperationView:
    rows = [
        render_row(intent, names.get(intent.node_id, intent.node_id), signs.get(intent.id), moment)
        for intent in intents
    ]
    # By name; the sort is stable, so the steps of a load stay in order.
    rows.sort(key=lambda row: row.node_name)
    status = operations.status_of(operation, intents)
    error = operation.error_message or "; ".join(
        f"{row.node_name}: {row.error}" for row in rows if row.status == "error" and row.error
    )
    total = sum(row.total_bytes for row in rows if row.total_bytes)
    done = sum(row.current_bytes for row in rows if row.current_bytes)
    return OperationView(
        id=operation.name,
        name=operation.name.rpartition("@")[2],
        fullName=operation.name,
        jobID=operation.id,
        progress=int(sum(row.percentage for row in rows) / len(rows)) if rows else 0,
        taskType=_TASK_TYPES.get(operation.kind, operation.kind),
        isDeletion=operation.kind in ("delete", "delete_model"),
        isBackend=operation.is_about_backend,
        isQueued=status == "queued",
        cancellable=status in ("queued", "running"),
        message=_message(status, rows),
        nodeID=operation.targets[0] if _is_for_one_node(operation) else UNSET,
        phase=_phase(status, rows) or UNSET,
        currentBytes=done or UNSET,
        totalBytes=total or UNSET,
        error=error or UNSET,
        nodes=rows or UNSET,
        kind=operation.kind,
        status=status,
        isParked=operations.is_parked(operation, intents, moment.absent, moment.drained),
        author=operation.author,
        createdAt=render_time(operation.created_at),
        excluded=operation.excluded,
        targets=operation.targets,
        asked=operation.asked,
        retryOf=operation.retry_of or UNSET,
        dismissed=operation.dismissed,
        finishedAt=_finished_at(operation, intents, status),
    )


def _is_for_one_node(operation: Operation) -> bool:
    """Whether the request named this one node, as LocalAI's node routes do."""
    return len(operation.targets) == 1 and len(operation.asked.nodes or ()) == 1


def _phase(status: str, rows: Sequence[NodeRow]) -> str:
    """Return the phase of the running node with the least progress."""
    if status == "queued":
        return "queued"
    at_work = [row for row in rows if row.state == "running" and isinstance(row.phase, str)]
    return str(min(at_work, key=lambda row: row.percentage).phase) if at_work else ""


def _finished_at(operation: Operation, intents: Sequence[Intent], status: str) -> str | UnsetType:
    if status in ("queued", "running"):
        return UNSET
    return render_time(max((intent.updated_at for intent in intents), default=operation.created_at))


def render_row(intent: Intent, name: str, sign: Sign | None, moment: Moment) -> NodeRow:
    if sign is not None and intent.is_open and sign.progress.attempt > intent.attempt:
        # Another frontend sent it again, and its progress arrived before its row was read.
        intent = msgspec.structs.replace(
            intent, state="running", attempt=sign.progress.attempt, reason="", message="", progress=None
        )
    if sign is not None and sign.progress.attempt == intent.attempt:
        # Another frontend may have received and stored newer progress.
        written = intent.progress
        is_behind = written is not None and is_newer(written, sign.progress)
        progress: Progress | None = written if is_behind else sign.progress
        silent, patience = moment.monotonic - sign.monotonic, moment.patience.stall_seconds
    else:
        progress = intent.progress
        silent, patience = moment.now - intent.dispatched_at, moment.patience.budget_of(intent)
    row = NodeRow(
        node_id=intent.node_id,
        node_name=name,
        status=operations.node_word(intent, silent, patience),
        percentage=operations.percentage_of(intent, progress),
        action=actions.phrase(intent.action),
        kind=actions.kind_of(intent.action),
        intent=intent.id,
        state=intent.state,
        attempt=intent.attempt,
    )
    if intent.message and intent.state == "succeeded":
        row.note = intent.message
    elif intent.message:
        row.error = intent.message
    if intent.reason:
        row.reason = intent.reason
    if row.status == "running_on_worker":
        row.error = f"no progress for {silent:.0f} s; it may still be running there, and its result will be stored"
    if operations.waits_for_node(intent, moment.absent):
        row.reason, row.error = NODE_AWAY, moment.absent.get(intent.node_id, operations.AWAY_MESSAGE)
    elif operations.waits_for_resume(intent, moment.drained):
        row.reason, row.error = DRAINING, DRAINED_MESSAGE
    elif intent.state == "waiting" and intent.due_at > moment.now:
        row.due_in_seconds = round(intent.due_at - moment.now, 1)
    if progress is not None and intent.state == "running":
        _add_progress(row, progress)
    return row


def _add_progress(row: NodeRow, progress: Progress) -> None:
    if progress.file:
        row.file_name = progress.file
    if progress.phase:
        row.phase = progress.phase
    if progress.total_bytes:
        row.current, row.total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
        row.current_bytes, row.total_bytes = progress.done_bytes, progress.total_bytes


def _message(status: str, rows: Sequence[NodeRow]) -> str:
    done = sum(row.status == "success" for row in rows)
    return f"{status}: {done} of {len(rows)} done" if len(rows) > 1 else status


def render_node(node: Node, now: float) -> NodeView:
    return NodeView(
        **msgspec.structs.asdict(node.capacity),
        id=node.id,
        name=node.name,
        node_type=node.node_type,
        address=node.address,
        http_address=node.http_address,
        status=node.status,
        capability=node.capability,
        max_replicas_per_model=node.max_replicas_per_model,
        last_heartbeat=render_time(node.last_heartbeat),
        created_at=render_time(node.created_at),
        updated_at=render_time(node.updated_at),
        model_count=len(node.report.replicas),
        labels=node.labels,
        approved=node.approved,
        health=node.health,
        drained=node.drained,
        platform=node.platform,
        fingerprint=node.public_key[:16],
        heartbeat_age_seconds=round(max(0.0, now - node.last_heartbeat), 1),
        degraded=node.is_degraded,
        worker_version=node.report.version,
        waits_for=node.waits_for,
        engine_confinement=node.report.confinement,
        backends=node.report.backends,
        replicas=node.report.replicas,
    )
