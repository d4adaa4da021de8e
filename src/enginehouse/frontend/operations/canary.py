"""Canary phases of upgrades: watches the canaries, then lets the rest go, or takes the canaries back.

One frontend at a time watches, under a lease; the state is in the operation's row, so any other can go on. Held intents
are rows like any other: they are released, or cancelled, in the transaction that ends the phase. `core.canary` decides.
Nothing is sent from here: the way back is an intent of the same operation, with a new generation.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from enginehouse.core.action import InstallBackend
from enginehouse.core.canary import (
    CANARY_FAILED,
    GONE,
    LOST,
    Canary,
    CanaryNode,
    CanaryVerdict,
    Evidence,
    Phase,
    ServedCount,
    choose_one,
    hold_message,
    judge,
    observe,
)
from enginehouse.core.errors import Conflict
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Change, Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation, is_return
from enginehouse.core.usage import HOUR_SECONDS
from enginehouse.frontend.acceptance import with_intents
from enginehouse.frontend.operations.canary_choice import CanaryRules, canary_node, candidate_of
from enginehouse.frontend.watching.board import Board
from enginehouse.store import db, intents, leases, nodes, operations, replicas, usage
from enginehouse.store.db import Connection, Store
from enginehouse.store.supersession import Wanted, add_intents, generation_at, release

log = logging.getLogger(__name__)

LEASE = "canary"
CANARY_STEP_SECONDS = 2.0  # without a reason to look earlier


class Canaries:
    def __init__(
        self,
        store: Store,
        board: Board,
        rules: CanaryRules,
        wake: Callable[[], None],
        *,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self.rules = rules
        self._store = store
        self._board = board
        self._wake = wake
        self._owner = owner
        self._lease_seconds = lease_seconds

    async def step(self) -> None:
        """Look at the canaries of every upgrade in its canary phase."""
        if self._store.is_away:
            return  # woken when it is back
        if not await self._store.look(operations.watching):
            return
        changed = await self._store.transaction(self._look)
        if changed:
            self._wake()
            await self._board.operations_changed(changed)

    async def release(self, operation_id: OperationId, author: str) -> None:
        """Let the held nodes of an operation go on now. Its canaries are not watched any more."""

        def work(connection: Connection) -> None:
            operation, _ = with_intents(connection, operation_id, None)
            locked = operations.lock(connection, operation_id) or operation
            if locked.canary is None or not locked.is_watching:
                raise Conflict(
                    f"cannot release operation {operation_id}: it is in no canary phase, so nothing is held",
                    code="conflict",
                )
            held = _held(connection, operation_id)
            for one in held:
                release(connection, one, db.now(connection))
            _write(connection, locked, phase="released", message=f"released by {author}")

        await self._store.transaction(work)
        self._wake()
        await self._board.operations_changed([operation_id])
        log.info("canary.released operation=%s by=%s", operation_id, author)

    def _look(self, connection: Connection) -> list[OperationId]:
        watched = operations.watching(connection)
        now = db.now(connection)
        if not watched or not leases.acquire(connection, LEASE, self._owner, now, now + self._lease_seconds):
            return []
        every = {node.id: node for node in nodes.every(connection)}
        changed: list[OperationId] = []
        for one in watched:
            operation = operations.lock(connection, one.id)
            if operation is not None and operation.is_watching and self._look_at(connection, operation, every, now):
                changed.append(one.id)
        return changed

    def _look_at(self, connection: Connection, operation: Operation, every: Mapping[NodeId, Node], now: float) -> bool:
        """Take the next step of one phase; whether something changed."""
        canary = operation.canary
        assert canary is not None
        found = operations.intents_of(connection, [operation.id])[operation.id]
        held = [one for one in found if one.is_held]
        if not held:
            # All of them were cancelled, removed or asked for in another way.
            _write(connection, operation, phase="ended")
            return True
        seen: list[CanaryNode] = []
        failed: tuple[CanaryNode, str] | None = None
        for one in canary.nodes:
            if one.left or one.passed:
                seen.append(one)
                continue
            after, verdict = self._judged(connection, one, found, every, now)
            seen.append(after)
            if verdict.kind == "fail" and failed is None:
                failed = after, verdict.reason
        after_all = msgspec.structs.replace(canary, nodes=tuple(seen))
        if failed is not None:
            _fail(connection, msgspec.structs.replace(operation, canary=after_all), found, failed, now)
            return True
        after_all, chosen, unable = _chosen_anew(connection, after_all, held, every)
        # One that is gone, and has no substitute, holds back its own kind only.
        is_decided = not chosen and all(one.passed or one.waits_for in GONE for one in after_all.watched)
        rest = [one for one in held if _may_follow(after_all, one.node_id, unable)] if is_decided else []
        if after_all == canary and not rest:
            return False
        for intent in (*chosen, *rest):
            release(connection, intent, now)
        if chosen:
            going = {intent.id for intent in chosen}
            for intent in held:
                if intent.id not in going:
                    operations.remark(connection, intent, hold_message(after_all), now)
        is_over = len(rest) == len(held)
        fresh = msgspec.structs.replace(operation, canary=after_all)
        message = "every canary stayed ready" if is_over else ""
        _write(connection, fresh, phase="passed" if is_over else "watching", message=message)
        if rest:
            log.info("canary.passed operation=%s released=%d", operation.id, len(rest))
        return True

    def _judged(
        self,
        connection: Connection,
        canary: CanaryNode,
        found: Sequence[Intent],
        every: Mapping[NodeId, Node],
        now: float,
    ) -> tuple[CanaryNode, CanaryVerdict]:
        install = _install_on(found, canary.node_id)
        node = every.get(canary.node_id)
        directory = canary.before.directory
        subject = f"backend:{directory}"
        if install is not None and install.state == "succeeded" and not canary.installed_at:
            own, others = _served(connection, canary, every, install.updated_at)
            canary = msgspec.structs.replace(canary, installed_at=install.updated_at, own=own, others=others)
        is_newest = install is not None and generation_at(connection, canary.node_id, subject) == install.generation
        since = canary.installed_at
        evidence = Evidence(
            now=now,
            node=node,
            install=install,
            is_newest=is_newest,
            directory=directory,
            starts=intents.starts_since(connection, canary.node_id, since) if since else (),
            ready={one.nonce for one, _ in replicas.on_node(connection, canary.node_id)},
        )
        requests = (ServedCount(), ServedCount())
        if since:
            own, others = _served(connection, canary, every, since)
            requests = own.since(canary.own), others.since(canary.others)
        rules = self.rules
        verdict = judge(canary, observe(canary, evidence), requests, now, (rules.seconds, rules.limit_seconds))
        after = msgspec.structs.replace(
            canary,
            ready_since=verdict.ready_since,
            waits_for=verdict.reason,
            passed=verdict.kind == "pass",
        )
        return after, verdict


def _served(
    connection: Connection, canary: CanaryNode, every: Mapping[NodeId, Node], since: float
) -> tuple[ServedCount, ServedCount]:
    """Requests for the models of a canary since the hour before the swap: its own, and those of the other nodes."""
    hour = int(since) - int(since) % HOUR_SECONDS - HOUR_SECONDS
    counts = usage.served(connection, hour, canary.models) if canary.models else {}
    names = {node.name for node in every.values()} - {canary.name}
    others = [tally for name, tally in counts.items() if name in names]
    total = ServedCount(sum(one.requests for one in others), sum(one.failures for one in others))
    return counts.get(canary.name, ServedCount()), total


def _install_on(found: Sequence[Intent], node_id: NodeId) -> Intent | None:
    here = [one for one in found if one.node_id == node_id and isinstance(one.action, InstallBackend)]
    return next((one for one in reversed(here) if not is_return(one)), None)


def _held(connection: Connection, operation_id: OperationId) -> list[Intent]:
    found = operations.intents_of(connection, [operation_id])[operation_id]
    locked = operations.lock_intents(connection, [one.id for one in found if one.is_held])
    return [one for one in locked.values() if one.is_held]


def _may_follow(canary: Canary, node_id: NodeId, unable: Collection[str]) -> bool:
    """Whether the canary of a node's kind has passed; of a kind that cannot have one, whether all others have."""
    kind = canary.hardware.get(node_id, "")
    if kind in unable:
        return all(one.passed for one in canary.watched)
    return any(one.passed and canary.hardware.get(one.node_id, "") == kind for one in canary.watched)


def _chosen_anew(
    connection: Connection, canary: Canary, held: Sequence[Intent], every: Mapping[NodeId, Node]
) -> tuple[Canary, list[Intent], set[str]]:
    """Choose another canary of each kind whose own is gone, or that had none yet: the state after it, and the intents
    to release. Where no node can be one at the moment, the kind waits. The kinds of which no node can ever be one
    come last.
    """
    unable: set[str] = set()
    rows = replicas.every(connection)
    by_kind: dict[str, list[Intent]] = {}
    for one in held:
        by_kind.setdefault(canary.hardware.get(one.node_id, ""), []).append(one)
    kept, released = list(canary.nodes), []
    for kind, some in by_kind.items():
        own = [one for one in canary.watched if canary.hardware.get(one.node_id, "") == kind]
        if any(one.passed or one.waits_for not in GONE for one in own):
            continue
        candidates = [
            candidate_of(node, one.action, rows)
            for one in some
            if (node := every.get(one.node_id)) is not None and isinstance(one.action, InstallBackend)
        ]
        if not any(one.can_return for one in candidates):
            unable.add(kind)
        chosen = choose_one(candidates)
        if chosen is None:
            # One that is away may return; one that was removed, or has another request, does not.
            kept = [_without_return(one) if one in own else one for one in kept]
            continue
        intent = next(one for one in some if one.node_id == chosen)
        assert isinstance(intent.action, InstallBackend)
        kept = [msgspec.structs.replace(one, left=one.waits_for) if one in own else one for one in kept]
        kept.append(canary_node(every[chosen], intent.action, rows))
        released.append(intent)
    return msgspec.structs.replace(canary, nodes=tuple(kept)), released, unable


def _without_return(canary: CanaryNode) -> CanaryNode:
    return msgspec.structs.replace(canary, left=canary.waits_for) if canary.waits_for in LOST else canary


def _fail(
    connection: Connection,
    operation: Operation,
    found: Sequence[Intent],
    failed: tuple[CanaryNode, str],
    now: float,
) -> None:
    """End a phase: held nodes keep their version, canaries get theirs back."""
    canary, (culprit, reason) = operation.canary, failed
    assert canary is not None
    text = f"canary failed on {culprit.name}: {reason}"
    cancelled = Change(kind="cancel", now=now, reason=CANARY_FAILED, message=f"not upgraded: {text}")
    kept = [operations.apply(connection, one, cancelled) for one in _held(connection, operation.id)]
    back: list[Wanted] = []
    for one in canary.nodes:
        install = _install_on(found, one.node_id)
        if one.passed or install is None or not isinstance(install.action, InstallBackend) or not install.attempt:
            continue
        if generation_at(connection, one.node_id, install.subject) != install.generation:
            continue  # somebody asked for something else there since
        action = InstallBackend(
            backend=install.action.backend, resolved=one.before, returns=True, galleries=install.action.galleries
        )
        back.append(Wanted(one.node_id, action, IntentId(str(uuid.uuid4()))))
    unsent = [one for one in found if one.is_open and not one.is_held and not one.attempt]
    watched = {one.node_id for one in canary.nodes if not one.passed}
    locked = operations.lock_intents(connection, [one.id for one in unsent if one.node_id in watched])
    still = [one for one in locked.values() if one.is_open and not one.attempt]
    kept += [operations.apply(connection, one, cancelled) for one in still]
    failed_now = msgspec.structs.replace(operation, error_code=CANARY_FAILED, error_message=text)
    _write(connection, failed_now, phase="failed", message=text)
    if back:
        add_intents(connection, operation.id, back, now)
    operations.note_ended(connection, [one.id for one in kept])
    log.warning(
        "canary.failed operation=%s node=%s kept=%d returned=%d reason=%r",
        operation.id,
        culprit.name,
        len(kept),
        len(back),
        reason,
    )


def _write(connection: Connection, operation: Operation, *, phase: Phase, message: str = "") -> None:
    assert operation.canary is not None
    canary = msgspec.structs.replace(operation.canary, phase=phase, message=message)
    operations.set_canary(connection, msgspec.structs.replace(operation, canary=canary))


def end_canary(connection: Connection, operation: Operation) -> None:
    """End the phase of an operation that was cancelled."""
    if operation.is_watching:
        _write(connection, operation, phase="ended", message="cancelled")
