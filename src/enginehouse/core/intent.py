"""Intents: one Action on one node, and the only table that says how one may change.

Reading the table: a change of the given kind is allowed in the states that have a row for it and leads to the state
on the right; anything else raises. Ended states have no rows, so they absorb nothing. `apply` is the one function
that applies a change; the store writes its result with a compare-and-set on `version`.

Two numbers are easily confused. `attempt` grows with every sending and orders what workers say. `failures` counts
only attempts that failed, and is what the cap is for: a node that is away may be tried for ever.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from msgspec import Struct

from enginehouse.core.action import Action, StartReplica
from enginehouse.core.errors import Conflict
from enginehouse.core.progress import Progress

State = Literal["accepted", "running", "waiting", "succeeded", "failed", "cancelled", "superseded"]
ChangeKind = Literal["claim", "take_over", "succeed", "fail", "wait", "cancel", "supersede"]

OPEN: frozenset[State] = frozenset({"accepted", "running", "waiting"})
MAX_FAILURES = 10  # LocalAI's number: with our backoff about eight minutes of trying
BACKOFF_FIRST_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 300.0
MAX_MESSAGE = 4096  # characters of a worker's reason that are kept: a screen of it, not a log
MAX_ADDRESS = 255
MAX_NONCE = 64
MAX_STOPPED = 1000
_CODE = re.compile(r"[a-z0-9_]{0,64}")
DRAINING = "draining"  # the reason of a wait that ends when its node is resumed
NODE_REMOVED = "node_removed"  # the reason of what was cancelled with its node
NODE_AWAY = "node_away"  # the reason of a wait that ends when the node returns, not by the clock

# A start that finds no core left, or no engine, may heal in an hour; somebody waits for an answer now, and the loader
# can look for another node only when this one has said no.
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
    ("accepted", "cancel"): "cancelled",
    ("waiting", "cancel"): "cancelled",
    ("running", "cancel"): "cancelled",
    ("accepted", "supersede"): "superseded",
    ("waiting", "supersede"): "superseded",
    ("running", "supersede"): "superseded",
}


class Outcome(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What a worker said at the end of a command. `code` is empty exactly when it succeeded."""

    code: str = ""
    message: str = ""
    can_heal: bool = False
    address: str = ""
    nonce: str = ""
    digest: str = ""
    stopped: tuple[str, ...] = ()
    checks_key: bool = True  # of a start: whether the engine refuses requests without its key

    @property
    def succeeded(self) -> bool:
        return not self.code


def bounded(outcome: Outcome) -> Outcome:
    """What a worker sent, within the bounds of a row. For the frontend: the bus is not trusted.

    An address or nonce that cannot be one makes it a failure: cut to size it would be another address.
    """
    if max(len(outcome.address) - MAX_ADDRESS, len(outcome.nonce) - MAX_NONCE) > 0 or not (
        outcome.address.isprintable() and outcome.nonce.isprintable()
    ):
        return Outcome(code="upstream_error", message="the worker answered with an address that cannot be one")
    message = outcome.message.replace("\0", "")  # the one character that a database refuses
    return msgspec.structs.replace(
        outcome,
        code=outcome.code if _CODE.fullmatch(outcome.code) else "upstream_error",
        message=message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 2] + " …",
        digest=outcome.digest[:MAX_ADDRESS],
        stopped=outcome.stopped[:MAX_STOPPED],
    )


class Intent(Struct, frozen=True, kw_only=True):
    id: str
    node_id: str
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
    # Of the intents in one lane, at most as many run at once as it is wide; "" is no lane.
    lane: str = ""
    lane_width: int = 0

    @property
    def is_open(self) -> bool:
        return self.state in OPEN


class Change(Struct, frozen=True, kw_only=True):
    """One step of an intent. Which fields matter depends on the kind."""

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
    """The intent after the change; raises `Conflict` (`already_terminal`) where the table has no row."""
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
    """1 s doubling to 5 min, ±20 % by `jitter` in [0, 1], so that a fleet does not return in step."""
    plain = min(BACKOFF_CAP_SECONDS, BACKOFF_FIRST_SECONDS * 2.0 ** min(failures, 16))
    return plain * (1.0 + 0.4 * (jitter - 0.5))


def after_outcome(intent: Intent, outcome: Outcome, now: float, jitter: float) -> Change:
    """What a worker's last word does to a running intent."""
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
