"""Canaries: an upgrade goes to one node per kind of hardware first, and to the rest if the new version works there.

Pure: which nodes are canaries, what is seen of one, and the verdict. A canary phase exists only where it protects
something: two nodes of a kind would change, and replicas of the backend run on them. The state is part of the
operation's row, so that any frontend can go on with it. Whoever cannot be returned to its version is no canary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from msgspec import Struct

from enginehouse.core.action import StartReplica
from enginehouse.core.backend import Resolved, find
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent
from enginehouse.core.node import Node
from enginehouse.core.replica import process_key

Phase = Literal["watching", "passed", "released", "failed", "ended"]
CANARY_FAILED = "canary_failed"  # the code of an operation whose canary failed
MIN_FAILURES = 5  # fewer failed requests say nothing about a version
MAX_RISE = 0.1  # of the share of failed requests
# After the swap: a model that is not started again there by then is not expected any more (unloaded, or elsewhere).
MISSING_SECONDS = 20.0
RETRIED = 2  # attempts of a start that ended with the engine, before the version is blamed
GIB = 1024**3
# Starts that fail so say nothing about the version of the engine.
_BLAMELESS = frozenset(
    {"insufficient_capacity", "resource_exhausted", "worker_restarted", "address_refused", "not_found"}
    | {"insufficient_disk", "digest_mismatch", "process_survived", "cancelled", "superseded"}
)


class ServedCount(Struct, frozen=True):
    """Requests that nodes answered, and how many of them failed for no fault of the client."""

    requests: int = 0
    failures: int = 0

    @property
    def rate(self) -> float:
        return self.failures / self.requests if self.requests else 0.0

    def since(self, before: ServedCount) -> ServedCount:
        return ServedCount(max(0, self.requests - before.requests), max(0, self.failures - before.failures))


class CanaryNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    node_id: NodeId
    name: str
    before: Resolved  # the version it had, for the way back
    models: tuple[str, ...] = ()  # that the backend served there when it was chosen
    failed: tuple[str, ...] = ()  # process keys that its worker had given up before
    # Since the new version is in place, by the store's clock, and since all replicas are ready; 0 before.
    installed_at: float = 0.0
    ready_since: float = 0.0
    own: ServedCount = ServedCount()  # of the hour before the swap, on this node
    others: ServedCount = ServedCount()  # the same on the other nodes
    waits_for: str = ""
    passed: bool = False
    left: str = ""  # why another node took its place


class Canary(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The canary phase of an operation. `hardware` has the kind of every node that would change."""

    phase: Phase = "watching"
    seconds: float = 30.0
    hardware: dict[NodeId, str] = {}
    nodes: tuple[CanaryNode, ...] = ()
    message: str = ""

    @property
    def watched(self) -> list[CanaryNode]:
        return [one for one in self.nodes if not one.left]

    @property
    def held(self) -> set[NodeId]:
        """The nodes that waited when the phase began."""
        return set(self.hardware) - {one.node_id for one in self.nodes}

    @property
    def is_watching(self) -> bool:
        return self.phase == "watching"


class CanaryCandidate(Struct, frozen=True, kw_only=True):
    """A node that an upgrade would change."""

    node_id: NodeId
    hardware: str
    replicas: int = 0  # of the backend
    is_present: bool = True  # it can be upgraded now
    can_return: bool = True  # its version is known, and its worker can go back to it


def hardware_of(node: Node) -> str:
    """The kind of a machine. Memory in whole GiB: equal cards report unequal bytes."""
    capacity = node.capacity
    return f"{node.capability} {node.platform} {capacity.gpu_vendor} {round(capacity.total_vram / GIB)}"


def choose_canaries(candidates: Sequence[CanaryCandidate]) -> tuple[NodeId, ...] | None:
    """One node per kind of hardware; None if no phase would protect anything. A kind of which no node can be a canary
    now has none yet.
    """
    kinds: dict[str, list[CanaryCandidate]] = {}
    for one in candidates:
        kinds.setdefault(one.hardware, []).append(one)
    if not any(one.replicas for one in candidates) or all(len(some) < 2 for some in kinds.values()):
        return None
    if not any(one.can_return for one in candidates):
        return None
    chosen = [choose_one(some) for some in kinds.values()]
    return tuple(one for one in chosen if one is not None)


def choose_one(candidates: Iterable[CanaryCandidate]) -> NodeId | None:
    """The node of a kind to begin with: one with replicas, for the evidence, and with as few as possible."""
    able = [one for one in candidates if one.is_present and one.can_return]
    best = min(able, key=lambda one: (one.replicas == 0, one.replicas, one.node_id), default=None)
    return None if best is None else best.node_id


class Observation(Struct, frozen=True, kw_only=True):
    """One canary at one moment. At most one of `gone`, `trouble` and `waits_for` is set; none means ready."""

    gone: str = ""  # it can be no canary: away, drained, removed, or somebody requested something else there
    trouble: str = ""  # what is wrong with the new version
    waits_for: str = ""


class Evidence(Struct, frozen=True, kw_only=True):
    """What is stored about a canary."""

    now: float
    node: Node | None
    install: Intent | None  # of this operation on that node
    is_newest: bool  # no newer request for the backend there
    directory: str
    starts: Sequence[Intent] = ()  # of replicas there since the swap
    ready: Collection[str] = ()  # nonces of the replicas there that may get requests


def observe(canary: CanaryNode, evidence: Evidence) -> Observation:
    node, install = evidence.node, evidence.install
    gone = _absence(node, install, is_newest=evidence.is_newest)
    if gone or node is None or install is None:
        return Observation(gone=gone or REMOVED)
    if install.state == "failed":
        return Observation(trouble=f"the install failed: {install.message or install.reason}")
    if install.state != "succeeded":
        return Observation(waits_for="the new version is being installed")
    if trouble := _trouble(canary, evidence, node):
        return Observation(trouble=trouble)
    return Observation(waits_for=_unready(canary, evidence, node, install))


REMOVED, REPLACED, AWAY, DRAINED = "it was removed", "there is another request for it", "it is offline", "it is drained"
LOST = frozenset({REMOVED, REPLACED})  # for good
GONE = frozenset({*LOST, AWAY, DRAINED})  # what is waited for where a canary is gone and has no substitute


def _absence(node: Node | None, install: Intent | None, *, is_newest: bool) -> str:
    if node is None or not node.is_target:
        return REMOVED
    if install is None or install.state in ("cancelled", "superseded") or not is_newest:
        return REPLACED
    if node.health == "offline":
        return AWAY
    return DRAINED if node.drained else ""


def _trouble(canary: CanaryNode, evidence: Evidence, node: Node) -> str:
    """What the new version did wrong since it is in place: a start that failed, or an engine that ended."""
    started: dict[str, Intent] = {}
    for one in evidence.starts:
        action = one.action
        if not isinstance(action, StartReplica) or action.directory != evidence.directory:
            continue
        key = process_key(action.model.name, action.slot)
        started[key] = one
        is_blamed = one.reason not in _BLAMELESS
        if one.state == "failed" and is_blamed:
            return f"{action.model.name} could not be started: {one.message or one.reason}"
        if one.is_open and one.failures >= RETRIED and is_blamed:
            return f"{action.model.name} could not be started {one.failures} times: {one.message or 'its engine ended'}"
    models = {*canary.models, *(key.rpartition("#")[0] for key in started)}
    for lost in node.report.failed:
        if lost.model_id in models and process_key(lost.model_id, lost.replica_index) not in canary.failed:
            return f"the engine of {lost.model_id} ended again and again: {lost.message}"
    done = {key: one for key, one in started.items() if one.state == "succeeded"}
    for key in node.report.restarting:
        if key in done:
            return f"the engine of {key.rpartition('#')[0]} ended"
    for shown in node.report.replicas:
        intent = done.get(process_key(shown.model_id, shown.replica_index))
        if intent is None or intent.outcome is None or shown.generation != intent.generation or not shown.nonce:
            continue
        if shown.nonce != intent.outcome.nonce:
            return f"the engine of {shown.model_id} ended and was started again"
    return ""


def _unready(canary: CanaryNode, evidence: Evidence, node: Node, install: Intent) -> str:
    """What is missing until every replica of the backend runs the new version and is ready; "" if nothing is."""
    installed = find(node.report.backends, evidence.directory)
    wanted = install.outcome.digest if install.outcome is not None else ""
    if node.report.mark < canary.installed_at or installed is None or (wanted and installed.digest != wanted):
        return "its worker has not reported the new version yet"
    here = [one for one in node.report.replicas if one.backend in ("", evidence.directory)]
    here = [one for one in here if one.backend or one.model_id in canary.models]
    for one in here:
        if one.outdated:
            return f"{one.model_id} still runs the old version"
        if one.nonce not in evidence.ready:
            return f"{one.model_id} is not ready"
    under_way = [one.action for one in evidence.starts if one.is_open]
    for action in under_way:
        if isinstance(action, StartReplica) and action.directory == evidence.directory:
            return f"{action.model.name} is being started"
    missing = [one for one in canary.models if one not in {shown.model_id for shown in here}]
    if missing and evidence.now - canary.installed_at < MISSING_SECONDS:
        return f"{missing[0]} is not running there"
    return ""


def risen(canary: ServedCount, others: ServedCount, before: ServedCount) -> str:
    """How the share of failed requests rose; "" if it did not. `before` counts where others answered nothing."""
    compared, whom = (others, "on the other nodes") if others.requests else (before, "before")
    if canary.failures < MIN_FAILURES or canary.rate <= compared.rate + MAX_RISE:
        return ""
    return (
        f"{canary.failures} of {canary.requests} requests failed, "
        f"{canary.rate:.0%} where it was {compared.rate:.0%} {whom}"
    )


class CanaryVerdict(Struct, frozen=True, kw_only=True):
    kind: Literal["wait", "pass", "fail", "gone"]
    reason: str = ""
    ready_since: float = 0.0


def judge(
    canary: CanaryNode,
    seen: Observation,
    requests: tuple[ServedCount, ServedCount],
    now: float,
    limits: tuple[float, float],
) -> CanaryVerdict:
    """`requests` are those since the swap, on the canary and on the others; `limits` are how long it must be ready, and
    after how long since the swap it is given up.
    """
    seconds, longest = limits
    if seen.gone:
        return CanaryVerdict(kind="gone", reason=seen.gone)
    trouble = seen.trouble or (risen(*requests, canary.own) if canary.installed_at else "")
    if trouble:
        return CanaryVerdict(kind="fail", reason=trouble)
    if seen.waits_for:
        # The time of a download does not count: it has limits of its own. A version that is in place and does not
        # become ready is given up, because the nodes that wait keep a version that works.
        if canary.installed_at and now - canary.installed_at >= longest:
            reason = f"it was not ready {longest:g} s after the swap: {seen.waits_for}"
            return CanaryVerdict(kind="fail", reason=reason)
        return CanaryVerdict(kind="wait", reason=seen.waits_for)
    ready_since = canary.ready_since or now
    if now - ready_since >= seconds:
        return CanaryVerdict(kind="pass", ready_since=ready_since)
    return CanaryVerdict(kind="wait", reason=f"it is ready; watched for {seconds:g} s", ready_since=ready_since)


def hold_message(canary: Canary) -> str:
    """What a held node waits for."""
    watched = [one.name for one in canary.watched if not one.passed]
    if not watched:
        return "waits for a node of its kind that can run the new version first"
    return f"waits until {', '.join(watched)} has run the new version for {canary.seconds:g} s"
