"""Operations: what was requested. The status is computed from the intents, never stored.

`is_steered` is the one fact that intents cannot express: the loader may still add steps, so a load whose steps are all
done is not finished yet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

from enginehouse.core.action import RemoveModel, StopReplica
from enginehouse.core.errors import NotFound
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import NODE_AWAY, Change, Intent
from enginehouse.core.name import shown
from enginehouse.core.progress import Progress

BackendKind = Literal["install", "upgrade", "delete"]
OperationKind = Literal["install", "upgrade", "delete", "load", "unload", "delete_model", "drain"]
OperationStatus = Literal["queued", "running", "succeeded", "partial", "failed", "cancelled", "superseded"]
ENDED: frozenset[OperationStatus] = frozenset({"succeeded", "partial", "failed", "cancelled", "superseded"})
NodeWord = Literal["queued", "downloading", "running_on_worker", "success", "error", "cancelled", "superseded"]


class Excluded(Struct, frozen=True):
    """A node that was left out, and the reason."""

    node_id: NodeId
    node_name: str
    reason: str
    code: str = ""  # `unknown`: it cannot be decided whether the node should have been included


class RequestOptions(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The options of a request besides kind and name. `nodes` None means every approved node.

    They are stored with the operation for its history; the intents say what is done.
    """

    nodes: tuple[str, ...] | None = None
    force: bool = False
    uri: str = ""
    alias: str = ""
    sha256: str = ""
    max_parallel: int = 0


class BackendRequest(RequestOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Install, upgrade or delete a backend: the body of `POST /api/operations`, and the frontend's own form of it."""

    kind: BackendKind
    name: str

    @property
    def options(self) -> RequestOptions:
        return RequestOptions(**{field: getattr(self, field) for field in RequestOptions.__struct_fields__})

    @property
    def plain_name(self) -> str:
        return self.name.rpartition("@")[2]

    @property
    def insists(self) -> bool:
        """Whether to ask a registry again that failed a moment ago."""
        return self.kind == "upgrade" or self.force


class Operation(Struct, frozen=True, kw_only=True):
    id: OperationId
    kind: OperationKind
    name: str  # the backend, model or node
    author: str
    created_at: float
    targets: tuple[NodeId, ...]
    excluded: tuple[Excluded, ...] = ()
    is_steered: bool = False
    error_code: str = ""  # why steering ended without a further step
    error_message: str = ""
    asked: RequestOptions = RequestOptions()
    retry_of: OperationId = OperationId("")  # the operation whose failed nodes this one retries
    dismissed: bool = False  # the failure was acknowledged

    @property
    def is_about_backend(self) -> bool:
        return self.kind in ("install", "upgrade", "delete")


def status_of(operation: Operation, intents: Sequence[Intent]) -> OperationStatus:
    states = {intent.state for intent in intents}
    if operation.is_steered:
        return "running" if "running" in states or "succeeded" in states else "queued"
    if operation.error_code:
        return "cancelled" if operation.error_code == "cancelled" else "failed"
    if "running" in states:
        return "running"
    if states & {"accepted", "waiting"}:
        return "queued"
    if states <= {"succeeded"}:
        return "succeeded"
    if "succeeded" in states:
        # A load that moved to a second node after a failure on the first did what was requested.
        return "succeeded" if operation.kind == "load" else "partial"
    if "failed" in states:
        return "failed"
    return "superseded" if "superseded" in states else "cancelled"


FLEET_SHARE = 0.25  # share of the nodes upgraded at the same time, so that three quarters keep serving


def width_of(kind: OperationKind, max_parallel: int, fleet: int) -> int:
    """How many of an operation's intents may run at once; 0 means no limit."""
    if max_parallel:
        return max_parallel
    return max(1, int(FLEET_SHARE * fleet)) if kind == "upgrade" else 0


STILL_RUNNING = "LocalAI's worker cannot cancel it and continues"
OLDER_AT_WORK = "older_at_work"  # the reason of an intent that is sent after an older command has ended on the worker
OLDER_MESSAGE = "LocalAI's worker is still busy with an older request for the same subject; this one is sent afterwards"
AWAY_MESSAGE = "the node is away; this continues automatically when it returns"
BUS_AWAY_MESSAGE = "the node has no connection to the bus; this continues automatically when it reconnects"


def wait_for_node(now: float) -> Change:
    """Return the change of an intent whose node is away: it is due as soon as the node returns."""
    return Change(kind="wait", now=now, reason=NODE_AWAY, message=AWAY_MESSAGE, due_at=now)


def absence_of(health: str, *, bus_away: bool) -> str:
    """What an intent for an unavailable node waits for, as text; "" for a healthy node."""
    if health == "healthy":
        return ""
    return BUS_AWAY_MESSAGE if health == "unhealthy" and bus_away else AWAY_MESSAGE


def waits_for_node(intent: Intent, absent: Collection[NodeId]) -> bool:
    """Whether an intent waits only for its node's return: it was sent and given back, or never sent."""
    if intent.state == "waiting" and intent.reason == NODE_AWAY:
        return True
    return intent.state in ("accepted", "waiting") and intent.node_id in absent


def waits_for_resume(intent: Intent, drained: Collection[NodeId]) -> bool:
    """Whether an intent waits for its node to be resumed: a drained node only gets stops."""
    is_stop = isinstance(intent.action, StopReplica | RemoveModel)
    return intent.state in ("accepted", "waiting") and intent.node_id in drained and not is_stop


def is_parked(
    operation: Operation, intents: Sequence[Intent], absent: Collection[NodeId], drained: Collection[NodeId] = ()
) -> bool:
    """Whether nothing will happen until an absent node returns or a drained one is resumed, so that a client should not
    wait.
    """
    open_ones = [intent for intent in intents if intent.is_open]
    return (
        not operation.is_steered
        and bool(open_ones)
        and all(waits_for_node(intent, absent) or waits_for_resume(intent, drained) for intent in open_ones)
    )


def node_word(intent: Intent, silent_seconds: float, patience_seconds: float) -> NodeWord:
    """LocalAI's word for one node of an operation. Silence only changes what is shown (amber), never the state."""
    match intent.state:
        case "accepted" | "waiting":
            return "queued"
        case "running":
            return "running_on_worker" if silent_seconds >= patience_seconds else "downloading"
        case "succeeded":
            return "success"
        case "failed":
            return "error"
        case "cancelled":
            return "cancelled"
        case "superseded":
            return "superseded"


def percentage_of(intent: Intent, live: Progress | None) -> float:
    if intent.state == "succeeded":
        return 100.0
    known = live or intent.progress
    return known.percentage if known else 0.0


def unknown_operation(operation_id: OperationId) -> NotFound:
    return NotFound(
        f"cannot find an operation with the id {shown(operation_id)}. `enginehouse ops list` shows them; those that "
        "ended long ago are deleted",
        param="id",
    )
