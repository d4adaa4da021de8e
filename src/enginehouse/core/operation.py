"""Operations: what someone asked for. The status is computed from the intents, never stored.

`is_steered` is the one thing that intents cannot say: the loader may still add steps, so that a load whose steps so
far are done is not done.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

from enginehouse.core.intent import NODE_AWAY, Intent
from enginehouse.core.progress import Progress

OperationKind = Literal["install", "upgrade", "delete", "load", "unload"]
OperationStatus = Literal["queued", "running", "succeeded", "partial", "failed", "cancelled", "superseded"]
NodeWord = Literal["queued", "downloading", "running_on_worker", "success", "error", "cancelled", "superseded"]


class Excluded(Struct, frozen=True):
    """A node that was not asked, and why."""

    node_id: str
    node_name: str
    reason: str


class Operation(Struct, frozen=True, kw_only=True):
    id: str
    kind: OperationKind
    name: str  # the backend or model it is about
    author: str
    created_at: float
    targets: tuple[str, ...]
    excluded: tuple[Excluded, ...] = ()
    is_steered: bool = False
    error_code: str = ""  # why steering ended without another step to take
    error_message: str = ""

    @property
    def is_about_backend(self) -> bool:
        return self.kind in ("install", "upgrade", "delete")


def status_of(operation: Operation, intents: Sequence[Intent]) -> OperationStatus:
    states = {intent.state for intent in intents}
    if operation.is_steered:
        return "running" if "running" in states or "succeeded" in states else "queued"
    if operation.error_code:
        return "failed"
    if "running" in states:
        return "running"
    if states & {"accepted", "waiting"}:
        return "queued"
    if states <= {"succeeded"}:
        return "succeeded"
    if "succeeded" in states:
        # A load that went to a second node after a failure on the first did what was asked.
        return "succeeded" if operation.kind == "load" else "partial"
    if "failed" in states:
        return "failed"
    return "superseded" if "superseded" in states else "cancelled"


AWAY_MESSAGE = "the node is away; this happens by itself when it returns"


def waits_for_node(intent: Intent, absent: Collection[str]) -> bool:
    """Whether an intent waits for nothing but its node's return: sent and given back, or not sent at all."""
    if intent.state == "waiting" and intent.reason == NODE_AWAY:
        return True
    return intent.state in ("accepted", "waiting") and intent.node_id in absent


def is_parked(operation: Operation, intents: Sequence[Intent], absent: Collection[str]) -> bool:
    """Whether nothing will happen until an absent node returns: what a person need not sit and wait for."""
    open_ones = [intent for intent in intents if intent.is_open]
    return not operation.is_steered and bool(open_ones) and all(waits_for_node(intent, absent) for intent in open_ones)


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
