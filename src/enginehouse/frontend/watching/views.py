"""Renders operations and nodes for people and programs: LocalAI's keys first, then additional ones.

Pure functions; nothing is read or stored here. Where LocalAI's key is a formatted string, a number is added beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

import msgspec
from msgspec import Struct

from enginehouse import __version__
from enginehouse.core import action as actions
from enginehouse.core import operation as operations
from enginehouse.core.backend import version_name
from enginehouse.core.canary import CANARY_FAILED
from enginehouse.core.fingerprint import fingerprint_of
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import DRAINING, NODE_AWAY, OPEN, Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation
from enginehouse.core.progress import Progress, format_bytes, is_newer
from enginehouse.core.version import is_older
from enginehouse.core.views import CanaryRow, CanaryView, NodeRow, NodeView, OperationView

# LocalAI's words; other kinds use their own name.
TASK_TYPES = {"install": "Installation", "upgrade": "Upgrade", "delete": "deletion", "load": "staging"}
# Fields of a node that are shown as they are.
_SHOWN_OF_NODES = (set(Node.__struct_fields__) & set(NodeView.__struct_fields__)) - {
    *("last_heartbeat", "created_at", "updated_at")
}
MAX_ERRORS = 20  # in the error of an operation; a fleet may have a thousand of the same
DRAINED_MESSAGE = "the node is drained; this continues when it is resumed"


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
    operation: Operation, intents: Sequence[Intent], rows: Sequence[NodeRow], moment: Moment, *, revision: int
) -> OperationView:
    """An operation with these rows, which are those of all its intents."""
    # By name; the sort is stable, so the steps of a load stay in order.
    rows = sorted(rows, key=lambda row: row.node_name)
    status = operations.status_of(operation, intents)
    error = _returned(operation, intents) or operation.error_message or _errors_of(rows)
    total = sum(row.total_bytes for row in rows if row.total_bytes)
    done = sum(row.current_bytes for row in rows if row.current_bytes)
    return OperationView(
        id=operation.name,
        name=operation.name.rpartition("@")[2],
        fullName=operation.name,
        jobID=operation.id,
        progress=int(sum(row.percentage for row in rows) / len(rows)) if rows else 0,
        taskType=TASK_TYPES.get(operation.kind, operation.kind),
        isDeletion=operation.kind in ("delete", "delete_model"),
        isBackend=operation.is_about_backend,
        isQueued=status == "queued",
        cancellable=status in ("queued", "running"),
        message=_message(operation, status, rows),
        nodeID=operation.targets[0] if _is_for_one_node(operation) else NodeId(""),
        phase=_phase(status, rows),
        currentBytes=done,
        totalBytes=total,
        error=error,
        nodes=rows,
        kind=operation.kind,
        status=status,
        isParked=operations.is_parked(operation, intents, moment.absent, moment.drained),
        author=operation.author,
        createdAt=render_time(operation.created_at),
        excluded=operation.excluded,
        targets=operation.targets,
        asked=operation.asked,
        retryOf=operation.retry_of or OperationId(""),
        dismissed=operation.dismissed,
        finishedAt=_finished_at(operation, intents, status),
        errorCode=operation.error_code,
        canary=_canary(operation),
        counts=dict(Counter(row.status for row in rows)),
        revision=revision,
    )


def _errors_of(rows: Sequence[NodeRow]) -> str:
    """The errors of the first nodes that failed, and how many more there are: the rows have them all."""
    failed = [row for row in rows if row.status == "error" and row.error]
    more = f"; and {len(failed) - MAX_ERRORS} more" if len(failed) > MAX_ERRORS else ""
    return "; ".join(f"{row.node_name}: {row.error}" for row in failed[:MAX_ERRORS]) + more


def _canary(operation: Operation) -> CanaryView | None:
    canary = operation.canary
    if canary is None:
        return None
    rows = [
        CanaryRow(
            node_id=one.node_id,
            node_name=one.name,
            state="left" if one.left else "passed" if one.passed else "watched",
            waits_for=one.left or one.waits_for,
        )
        for one in canary.nodes
    ]
    return CanaryView(phase=canary.phase, seconds=canary.seconds, nodes=rows, message=canary.message)


def _returned(operation: Operation, intents: Sequence[Intent]) -> str:
    """The error of an upgrade whose canary failed, with what became of the way back; "" for other operations."""
    if operation.error_code != CANARY_FAILED:
        return ""
    back = [one for one in intents if operations.is_return(one)]
    if not back:
        return f"{operation.error_message}; nothing had been changed"
    build = back[0].action.resolved if isinstance(back[0].action, actions.InstallBackend) else None
    version = version_name(build.version, build.digest) if build is not None else ""
    if any(one.is_open for one in back):
        return f"{operation.error_message}; returning to {version}"
    lost = next((one for one in back if one.state != "succeeded"), None)
    if lost is not None:
        return f"{operation.error_message}; not returned to {version}: {lost.message or lost.state}"
    return f"{operation.error_message}; returned to {version}"


def _is_for_one_node(operation: Operation) -> bool:
    """Whether the request named this one node, as LocalAI's node routes do."""
    return len(operation.targets) == 1 and len(operation.asked.nodes or ()) == 1


def _phase(status: str, rows: Sequence[NodeRow]) -> str:
    """Return the phase of the running node with the least progress."""
    if status == "queued":
        return "queued"
    at_work = [row for row in rows if row.state == "running" and row.phase]
    return min(at_work, key=lambda row: row.percentage).phase if at_work else ""


def _finished_at(operation: Operation, intents: Sequence[Intent], status: str) -> str:
    if status in ("queued", "running"):
        return ""
    return render_time(max((intent.updated_at for intent in intents), default=operation.created_at))


def word_of(intent: Intent, sign: Sign | None, moment: Moment) -> operations.NodeWord:
    """The status of a row: it changes by silence alone, too."""
    intent = _resent(intent, sign)
    _, silent, patience = _heard(intent, sign, moment)
    return operations.node_word(intent, silent, patience)


def _resent(intent: Intent, sign: Sign | None) -> Intent:
    """The intent, as running if another frontend sent it again and its progress arrived before its row was read."""
    if sign is None or not intent.is_open or sign.progress.attempt <= intent.attempt:
        return intent
    return msgspec.structs.replace(
        intent, state="running", attempt=sign.progress.attempt, reason="", message="", progress=None
    )


def _heard(intent: Intent, sign: Sign | None, moment: Moment) -> tuple[Progress | None, float, float]:
    """The newest progress of an intent, the seconds since its last sign, and how many of them are usual."""
    if sign is None or sign.progress.attempt != intent.attempt:
        return intent.progress, moment.now - intent.dispatched_at, moment.patience.budget_of(intent)
    # Another frontend may have received and stored newer progress.
    written = intent.progress
    progress = written if written is not None and is_newer(written, sign.progress) else sign.progress
    return progress, moment.monotonic - sign.monotonic, moment.patience.stall_seconds


def render_row(intent: Intent, name: str, sign: Sign | None, moment: Moment) -> NodeRow:
    intent = _resent(intent, sign)
    progress, silent, patience = _heard(intent, sign, moment)
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
        failures=intent.failures,
        reason=intent.reason,
        startedAt=render_time(intent.dispatched_at) if intent.dispatched_at else "",
        finishedAt="" if intent.state in OPEN else render_time(intent.updated_at),
    )
    if intent.state == "succeeded":
        remark = intent.action.resolved.remark if isinstance(intent.action, actions.InstallBackend) else ""
        row.note = "; ".join(part for part in (intent.message, remark) if part)
    else:
        row.error = intent.message
    if row.status == "running_on_worker":
        row.error = f"no progress for {silent:.0f} s; it may still be running there, and its result will be stored"
    if operations.waits_for_node(intent, moment.absent):
        row.reason, row.error = NODE_AWAY, moment.absent.get(intent.node_id, operations.AWAY_MESSAGE)
    elif operations.waits_for_resume(intent, moment.drained):
        row.reason, row.error = DRAINING, DRAINED_MESSAGE
    elif intent.state == "waiting" and intent.due_at > moment.now and not intent.is_held:
        row.due_in_seconds = round(intent.due_at - moment.now, 1)
    if progress is not None and intent.state == "running":
        _add_progress(row, progress)
    return row


def _add_progress(row: NodeRow, progress: Progress) -> None:
    row.file_name, row.phase = progress.file, progress.phase
    if progress.total_bytes:
        row.current, row.total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
        row.current_bytes, row.total_bytes = progress.done_bytes, progress.total_bytes


def _message(operation: Operation, status: str, rows: Sequence[NodeRow]) -> str:
    done = sum(row.status == "success" for row in rows)
    if operation.kind == "drain" and status == "succeeded":
        return "safe to stop"
    if operation.kind == "drain" and operation.is_steered and done == len(rows):
        return f"{status}: loads its models on other nodes first"
    return f"{status}: {done} of {len(rows)} done" if len(rows) > 1 else status


def render_node(node: Node, now: float) -> NodeView:
    return NodeView(
        **msgspec.structs.asdict(node.capacity),
        **{field: getattr(node, field) for field in _SHOWN_OF_NODES},
        last_heartbeat=render_time(node.last_heartbeat),
        created_at=render_time(node.created_at),
        updated_at=render_time(node.updated_at),
        status=node.status,
        model_count=len(node.report.replicas),
        fingerprint=fingerprint_of(node.public_key),
        heartbeat_age_seconds=round(max(0.0, now - node.last_heartbeat), 1),
        degraded=node.is_degraded,
        worker_version=node.report.version,
        behind=is_older(node.report.version, __version__),
        engine_confinement=node.report.confinement,
        backends=node.report.backends,
        replicas=node.report.replicas,
        failed_replicas=node.report.failed,
    )
