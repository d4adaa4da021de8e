"""Operations: what was requested. The status is computed from the intents, never stored.

`is_steered` is the one fact that intents cannot express: the loader may still add steps to a load, and the reconciler
to a drain, so an operation whose steps are all done is not finished yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Literal

from msgspec import Struct

from enginehouse.core.action import InstallBackend, RemoveModel, StopReplica
from enginehouse.core.canary import Canary
from enginehouse.core.errors import NotFound
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import NODE_AWAY, OPEN, Change, Intent, State
from enginehouse.core.name import shown
from enginehouse.core.progress import Progress

BackendKind = Literal["install", "upgrade", "delete", "rollback"]
OperationKind = Literal["install", "upgrade", "delete", "rollback", "load", "unload", "delete_model", "drain"]
OperationStatus = Literal["queued", "running", "succeeded", "partial", "failed", "cancelled", "superseded"]
ENDED: frozenset[OperationStatus] = frozenset({"succeeded", "partial", "failed", "cancelled", "superseded"})
NodeWord = Literal["queued", "downloading", "running_on_worker", "success", "error", "cancelled", "superseded"]


class OperationFilter(Struct, frozen=True, kw_only=True):
    """Which operations a list is about; what is empty chooses all of them."""

    kind: str = ""
    status: str = ""  # "open", or how it ended
    node: str = ""  # id or name of a node for which it has an intent


ALL_OPERATIONS = OperationFilter()


class Excluded(Struct, frozen=True):
    """A node that was left out, and the reason."""

    node_id: NodeId
    node_name: str
    reason: str
    code: str = ""  # `unknown`: it cannot be decided whether the node should have been included


class RequestOptions(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Options of a request, kept for its history; intents say what is done. `nodes` None: every approved node."""

    nodes: tuple[str, ...] | None = None
    force: bool = False
    uri: str = ""
    alias: str = ""
    sha256: str = ""
    max_parallel: int = 0
    canary: bool = True  # of an upgrade: one node per kind of hardware first, where that protects something


class BackendRequest(RequestOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request about a backend: the body of `POST /api/operations`, and the frontend's own form of it."""

    kind: BackendKind
    name: str

    @property
    def options(self) -> RequestOptions:
        return RequestOptions(**{field: getattr(self, field) for field in RequestOptions.__struct_fields__})

    @property
    def plain_name(self) -> str:
        return self.name.rpartition("@")[2]

    @property
    def task(self) -> str:
        """What is requested, for the message of a refusal."""
        return f"{'roll back' if self.kind == 'rollback' else self.kind} {self.name}"

    @property
    def insists(self) -> bool:
        """Whether to ask a registry again that failed a moment ago."""
        return self.kind == "upgrade" or self.force


class ReplacedReplica(Struct, frozen=True, kw_only=True):
    """The replica that a load replaces. It is stopped when the new one is ready, or before if there is no room."""

    node_id: NodeId
    slot: int
    nonce: str


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
    replaces: ReplacedReplica | None = None
    canary: Canary | None = None  # of an upgrade that began, or begins, with some of its nodes

    @property
    def is_watching(self) -> bool:
        """Whether nodes are held until canaries have proven the new version."""
        return self.canary is not None and self.canary.is_watching

    @property
    def is_about_backend(self) -> bool:
        return self.kind in ("install", "upgrade", "delete", "rollback")


def status_of(operation: Operation, intents: Iterable[Intent]) -> OperationStatus:
    return status_by_states(operation, {intent.state for intent in intents})


def status_by_states(operation: Operation, states: Set[str]) -> OperationStatus:
    """The status of an operation whose intents have these states."""
    if operation.is_steered:
        return "running" if "running" in states or "succeeded" in states else "queued"
    is_open = bool(states & OPEN)
    if operation.canary is not None and is_open and (operation.is_watching or operation.error_code):
        # Held intents wait for what others do; after a failure the canaries are still on their way back.
        return "running" if states & {"running", "succeeded"} else "queued"
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
AWAY_MESSAGE = "the node is offline; this starts when it reconnects"
BUS_AWAY_MESSAGE = "the node has no connection to NATS; this starts when it reconnects"


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
    """Whether nothing happens until an absent node returns or a drained one is resumed: clients need not wait."""
    # What is held waits for the others: they decide.
    open_ones = [intent for intent in intents if intent.is_open and not intent.is_held]
    # A drain adds its stops one by one; what is still to come cannot be stopped either while its node is away.
    is_drain_of_absent = operation.kind == "drain" and any(node_id in absent for node_id in operation.targets)
    return (is_drain_of_absent if operation.is_steered else bool(open_ones)) and all(
        waits_for_node(intent, absent) or waits_for_resume(intent, drained) for intent in open_ones
    )


_WORDS: dict[State, NodeWord] = {
    "accepted": "queued",
    "waiting": "queued",
    "running": "downloading",
    "succeeded": "success",
    "failed": "error",
    "cancelled": "cancelled",
    "superseded": "superseded",
}


def node_word(intent: Intent, silent_seconds: float, patience_seconds: float) -> NodeWord:
    """LocalAI's word for one node of an operation. Silence only changes what is shown (amber), never the state."""
    is_silent = intent.state == "running" and silent_seconds >= patience_seconds
    return "running_on_worker" if is_silent else _WORDS[intent.state]


def counts_by_word(states: Mapping[State, int]) -> dict[str, int]:
    """How many nodes there are by their word, without regard to silence."""
    counts: Counter[str] = Counter()
    for state, number in states.items():
        counts[_WORDS[state]] += number
    return dict(counts)


def percentage_of(intent: Intent, live: Progress | None) -> float:
    if intent.state == "succeeded":
        return 100.0
    known = live or intent.progress
    return known.percentage if known else 0.0


def is_return(intent: Intent) -> bool:
    """Whether an intent takes a node back to the version before."""
    return isinstance(intent.action, InstallBackend) and intent.action.returns


def unknown_operation(operation_id: OperationId) -> NotFound:
    return NotFound(
        f"cannot find an operation with the id {shown(operation_id)}. `enginehouse ops list` shows them; those that "
        "ended long ago are deleted",
        param="id",
    )
