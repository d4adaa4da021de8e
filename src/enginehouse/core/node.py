"""Nodes: a machine and its row.

Approval, health and drained are three separate facts; on the wire they fold into LocalAI's one `status`. Decisions use
the facts, never the folded status.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.report import Report

Health = Literal["healthy", "unhealthy", "offline"]
NodeType = Literal["backend", "agent"]
Status = Literal["pending", "healthy", "unhealthy", "offline", "draining"]
MAX_WAITING = 10  # pending nodes named in an answer: one join token can create any number


class Node(Struct, frozen=True, kw_only=True):
    id: NodeId
    name: str
    node_type: NodeType
    public_key: str
    approved: bool
    health: Health
    drained: bool
    address: str
    http_address: str
    capability: str
    platform: str
    labels: dict[str, str]
    max_replicas_per_model: int
    capacity: Capacity
    created_at: float
    updated_at: float
    last_heartbeat: float
    report: Report
    claim: str = ""  # distinguishes nodes of the same name without a key
    waits_for: str = ""  # why a formerly approved node waits for approval again
    registered_at: float = 0.0  # when the challenge of its last registration was issued
    bus_away: bool = False  # its last heartbeat said that commands do not reach it
    report_digest: str = ""  # of the stored report (`core.report.stored_digest`); "" if unknown

    @property
    def status(self) -> Status:
        if not self.approved:
            return "pending"
        if self.drained:
            return "draining"
        return self.health

    @property
    def is_degraded(self) -> bool:
        """Whether the node is up but unreachable by commands. Its replicas keep serving."""
        return self.bus_away and self.health == "unhealthy"

    @property
    def is_target(self) -> bool:
        """Whether operations may target it. Absent nodes count: their intents wait."""
        return self.approved and self.node_type == "backend"

    @property
    def is_localai(self) -> bool:
        """Whether its worker is LocalAI's, which has no key: frontends push files and load models there."""
        return not self.public_key

    @property
    def is_schedulable(self) -> bool:
        return self.is_target and self.health == "healthy" and not self.drained


class NodeQuery(Struct, frozen=True, kw_only=True):
    """Which nodes a list shows, by name and age."""

    limit: int | None = None
    after: NodeId = NodeId("")  # the last node of the previous page
    status: Status | None = None
    name: str = ""


def health_after(silence_seconds: float, stale_seconds: float) -> Health:
    """Unhealthy after `stale_seconds` without a heartbeat, offline after twice that."""
    if silence_seconds >= 2 * stale_seconds:
        return "offline"
    return "unhealthy" if silence_seconds >= stale_seconds else "healthy"


def registration_message(name: str, public_key: str, addresses: tuple[str, str], challenge: str) -> bytes:
    """The message that a worker signs with its node key when it registers.

    So a join token is not enough to be the node, and a recorded registration cannot be sent again or changed.
    """
    return "\n".join(("enginehouse register", public_key, name, *addresses, challenge)).encode()
