"""Intents: one Action on one node, and the only table of their state changes.

Each row of the table allows one kind of change in one state and gives the new state; any other change raises. Ended
states have no rows. `apply` is the only function that applies a change; the store writes its result with a
compare-and-set on `version`.

`attempt` and `failures` differ: `attempt` grows with every dispatch and orders messages from workers; `failures` counts
failed attempts only and is capped. An absent node may thus be retried for ever.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.core.action import Action, StartReplica
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.model import PinnedFile
from enginehouse.core.progress import Progress
from enginehouse.core.replica import OPENAI_HTTP, EngineProtocol

State = Literal["accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded"]
ChangeKind = Literal["claim", "take_over", "succeed", "fail", "wait", "release", "cancel", "supersede"]

OPEN: frozenset[State] = frozenset({"accepted", "running", "waiting"})
MAX_FAILURES = 10  # LocalAI's number: with our backoff about eight minutes of retries
BACKOFF_FIRST_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 300.0
MAX_MESSAGE = 4096  # characters kept of a worker's message: about a screen, not a log
MAX_ADDRESS = 255
MAX_NONCE = 64
MAX_STOPPED = 1000
MAX_PINS = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CODE = re.compile(r"[a-z0-9_]{0,64}")
DRAINING = "draining"  # the reason of a wait that ends when the node is resumed
NODE_REMOVED = "node_removed"  # the reason of intents cancelled because their node was removed
NODE_LEFT = "node_left"  # the reason of steps cancelled because their load left a node that is drained or offline
NODE_AWAY = "node_away"  # the reason of a wait that ends when the node returns, not at a time
CANARY = "canary"  # the reason of a wait that ends when other nodes have proven the new version (`core.canary`)
HELD_UNTIL = 32_503_680_000.0  # the year 3000: frontends of any version leave it alone until it is released

# A start without a free core or an engine may succeed in an hour, but a client waits now. The loader can try another
# node only after this one has failed.
_BETTER_ELSEWHERE = frozenset({"insufficient_capacity", "not_found"})

TABLE: dict[tuple[State, ChangeKind], State] = {
    ("accepted", "claim"): "running",
    ("waiting", "claim"): "running",
    ("running", "take_over"): "running",
    ("running", "succeed"): "succeeded",
    ("accepted", "succeed"): "succeeded",
    ("waiting", "succeed"): "succeeded",
    ("running", "fail"): "failed",
    ("running", "wait"): "waiting",
    ("waiting", "release"): "waiting",
    ("accepted", "cancel"): "cancelled",
    ("waiting", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("accepted", "supersede"): "superseded",
    ("waiting", "supersede"): "superseded",
    ("running", "supersede"): "superseded",
}


class Outcome(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The result of a command from the worker. `code` is empty if and only if it succeeded."""

    code: str = ""
    message: str = ""
    can_heal: bool = False
    address: str = ""
    nonce: str = ""
    digest: str = ""
    stopped: tuple[str, ...] = ()
    checks_key: bool = True  # of a start: whether the engine refuses requests without its key
    protocol: EngineProtocol = OPENAI_HTTP  # of a start: what the engine speaks
    pinned: tuple[PinnedFile, ...] = ()  # of a pull: digests of files whose source gave none
    freed: bool | None = None  # of a stop: whether the engine released its model first; None if it was not asked to

    @property
    def succeeded(self) -> bool:
        return not self.code


def bounded(outcome: Outcome) -> Outcome:
    """Limit a worker's outcome to what fits into a row. Used by the frontend, which does not trust the bus.

    An invalid address or nonce makes it a failure, because a truncated address would be another address.
    """
    if max(len(outcome.address) - MAX_ADDRESS, len(outcome.nonce) - MAX_NONCE) > 0 or not (
        outcome.address.isprintable() and outcome.nonce.isprintable()
    ):
        return Outcome(code="upstream_error", message="the worker replied with an invalid address")
    message = outcome.message.replace("\0", "")  # the only character that a database refuses
    return msgspec.structs.replace(
        outcome,
        code=outcome.code if _CODE.fullmatch(outcome.code) else "upstream_error",
        message=message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 2] + " …",
        digest=outcome.digest[:MAX_ADDRESS],
        stopped=outcome.stopped[:MAX_STOPPED],
        pinned=tuple(pin for pin in outcome.pinned[:MAX_PINS] if _SHA256.fullmatch(pin.sha256) and pin.size_bytes >= 0),
    )


class Intent(Struct, frozen=True, kw_only=True):
    id: IntentId
    node_id: NodeId
    subject: str
    generation: int
    action: Action
    state: State
    created_at: float
    updated_at: float
    due_at: float
    attempt: int = 0
    failures: int = 0
    fence: int = 0
    owner: str = ""
    lease_until: float = 0.0
    dispatched_at: float = 0.0
    reason: str = ""
    message: str = ""
    progress: Progress | None = None
    outcome: Outcome | None = None
    version: int = 0
    # At most `lane_width` intents of one lane run at once; "" means no lane.
    lane: str = ""
    lane_width: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def is_held(self) -> bool:
        """Whether it waits for the canaries of its operation."""
        return self.state == "waiting" and self.reason == CANARY


class Change(Struct, frozen=True, kw_only=True):
    """One change of an intent. The relevant fields depend on the kind."""

    kind: ChangeKind
    now: float
    owner: str = ""
    lease_until: float = 0.0
    reason: str = ""
    message: str = ""
    due_at: float = 0.0
    counts_as_failure: bool = False
    outcome: Outcome | None = None


def apply(intent: Intent, change: Change) -> Intent:
    """The intent after the change; raises `Conflict` (`already_terminal`) if the table has no row."""
    state = TABLE.get((intent.state, change.kind))
    if state is None:
        raise Conflict(
            f"cannot {change.kind.replace('_', ' ')} intent {intent.id}: it is {intent.state}",
            code="already_terminal",
        )
    after = msgspec.structs.replace(intent, state=state, updated_at=change.now, version=intent.version + 1)
    match change.kind:
        case "claim":
            return msgspec.structs.replace(
                after,
                attempt=intent.attempt + 1,
                fence=intent.fence + 1,
                owner=change.owner,
                lease_until=change.lease_until,
                dispatched_at=change.now,
                reason="",
                message="",
                progress=None,
            )
        case "take_over":
            return msgspec.structs.replace(
                after, fence=intent.fence + 1, owner=change.owner, lease_until=change.lease_until
            )
        case "wait":
            return msgspec.structs.replace(
                after,
                owner="",
                lease_until=0.0,
                due_at=change.due_at,
                reason=change.reason,
                message=change.message,
                failures=intent.failures + (1 if change.counts_as_failure else 0),
            )
        case "release":
            return msgspec.structs.replace(after, due_at=change.now, reason="", message="")
        case "succeed" | "fail" | "cancel" | "supersede":
            return msgspec.structs.replace(
                after,
                owner="",
                lease_until=0.0,
                reason=change.reason,
                message=change.message,
                outcome=change.outcome,
                failures=intent.failures + (1 if change.kind == "fail" else 0),
            )


def backoff_seconds(failures: int, jitter: float) -> float:
    """1 s doubling to 5 min, ±20 % by `jitter` in [0, 1], so that nodes do not retry in step."""
    plain = min(BACKOFF_CAP_SECONDS, BACKOFF_FIRST_SECONDS * 2.0 ** min(failures, 16))
    return plain * (1.0 + 0.4 * (jitter - 0.5))


def after_outcome(intent: Intent, outcome: Outcome, now: float, jitter: float) -> Change:
    """The change that a worker's outcome causes in a running intent."""
    if outcome.succeeded:
        return Change(kind="succeed", now=now, outcome=outcome, message=outcome.message)
    heals_here = outcome.can_heal and not (
        isinstance(intent.action, StartReplica) and outcome.code in _BETTER_ELSEWHERE
    )
    if heals_here and intent.failures + 1 < MAX_FAILURES:
        return Change(
            kind="wait",
            now=now,
            reason=outcome.code,
            message=outcome.message,
            due_at=now + backoff_seconds(intent.failures, jitter),
            counts_as_failure=True,
        )
    return Change(kind="fail", now=now, reason=outcome.code, message=outcome.message, outcome=outcome)
