"""Ends operations: cancel, retry and dismiss, removal of nodes, and the end of intents that can never run.

An ended intent never changes: a retry is a new operation with the same actions. Only operations that ended long ago are
deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable

from enginehouse.core.action import InstallBackend, RemoveBackend, UnknownAction
from enginehouse.core.errors import Conflict, Invalid
from enginehouse.core.ids import IntentId, OperationId
from enginehouse.core.intent import NODE_REMOVED, Change, Intent
from enginehouse.core.node import Node
from enginehouse.core.operation import STILL_RUNNING, Operation, is_return, width_of
from enginehouse.frontend.acceptance import (
    Acceptance,
    OperationDetails,
    Requester,
    insert_operation,
    new_operation,
    with_intents,
)
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.operations.canary import end_canary
from enginehouse.frontend.operations.canary_choice import begin_canary
from enginehouse.frontend.operations.targets import Targets
from enginehouse.frontend.operations.versions import Versions, without_pin
from enginehouse.store import (
    bus_credentials,
    db,
    gone_nodes,
    history,
    idempotency,
    intents,
    keys,
    leases,
    lingering,
    load_infos,
    nodes,
    operations,
    replicas,
    reservations,
)
from enginehouse.store.db import Connection

log = logging.getLogger(__name__)

PRUNE_SECONDS = 600.0  # between two prunes of the history; not urgent
KEPT_SECONDS = 7 * 24 * 3600.0
UNUSED_LEASE_SECONDS = 3600.0  # expired for so long, a lease has no owner left who could come back to it
KEPT_OPERATIONS = 1000
_PRUNED_AT_ONCE = 500  # keeps each transaction short
_RETRIED = ("failed", "cancelled")

SendCancels = Callable[[Iterable[Intent]], Awaitable[None]]


class Cancellation:
    """`send_cancels` tells workers to stop cancelled intents; it is the dispatcher's method."""

    def __init__(
        self,
        acceptance: Acceptance,
        send_cancels: SendCancels,
        targets: Targets,
        versions: Versions,
        *,
        owner: str,
        lease_seconds: float,
    ) -> None:
        self._acceptance = acceptance
        self._targets = targets
        self._versions = versions
        self._store = acceptance.store
        self._board = acceptance.board
        self._wake = acceptance.wake
        self._send_cancels = send_cancels
        self._owner = owner
        self._lease_seconds = lease_seconds

    async def cancel(self, operation_id: OperationId, node: str | None, author: str) -> None:
        """Cancel the open intents of an operation, on one node or on all, and tell the workers."""

        def work(connection: Connection) -> list[Intent]:
            operation, intents = with_intents(connection, operation_id, node)
            if operation.is_watching:
                operation = operations.lock(connection, operation_id) or operation
            open_ones = _locked(connection, intents)
            if not open_ones and not operation.is_steered:
                what = f"operation {operation_id}" + (f" on {node}" if node else "")
                raise Conflict(f"cannot cancel {what}: it has ended already", code="already_terminal")
            change = Change(kind="cancel", now=db.now(connection), reason="cancelled", message=f"cancelled by {author}")
            ended = [operations.cancel_share(connection, operation_id, intent, change) for intent in open_ones]
            _note_lingering(connection, open_ones, [one for one in ended if one is not None])
            if node is None:
                end_canary(connection, operation)
            if operation.is_steered and node is None:
                operations.end_steering(connection, operation_id, "cancelled", f"cancelled by {author}")
                if operation.kind == "load":
                    load_infos.note_cancelled(connection, operation, self._acceptance.pace.max_retry_seconds)
                    reservations.remove(connection, operation_id)
            running = {intent.id for intent in open_ones if intent.state == "running"}
            return [intent for intent in ended if intent is not None and intent.id in running]

        stopped = await self._store.transaction(work)
        await self._send_cancels(stopped)
        self._wake()
        await self._board.operations_changed([operation_id])
        log.info("operation.cancelled operation=%s node=%s by=%s", operation_id, node or "-", author)

    async def retry(self, operation_id: OperationId, node: str | None, requester: Requester) -> OperationId:
        """Create an operation of another one's failed and cancelled actions, at attempt 1, with tags resolved anew."""
        first = await self._store.read(lambda connection: _retried(connection, operation_id, node))
        builds = [one.action.resolved for one in first[1] if isinstance(one.action, InstallBackend)]
        await self._versions.resolve([without_pin(build) for build in builds])

        def work(connection: Connection) -> OperationId:
            before, again = _retried(connection, operation_id, node)
            actions = self._targets.again(connection, [(intent.node_id, intent.action) for intent in again])
            kept = OperationDetails(
                targets=tuple(intent.node_id for intent in again),
                asked=before.asked,
                retry_of=before.id,
                canary=begin_canary(connection, actions, self._targets.canary_rules, is_wanted=before.asked.canary),
            )
            operation = new_operation(connection, before.kind, before.name, requester.author, kept)
            if not _left_behind(connection, before.id, {intent.id for intent in again}):
                operations.dismiss(connection, before.id, db.now(connection))
            fleet = sum(one.is_target for one in nodes.every(connection))
            width = width_of(before.kind, before.asked.max_parallel, fleet)
            return insert_operation(connection, operation, actions, width)

        accepted = await self._acceptance.accept(work, requester, ["retry", operation_id, node])
        await self._board.operations_changed([operation_id])
        return accepted

    async def dismiss(self, operation_id: OperationId) -> None:
        """Mark an ended operation as seen; it stays in the history."""

        def work(connection: Connection) -> None:
            operation, intents = with_intents(connection, operation_id, None)
            if operation.is_steered or any(intent.is_open for intent in intents):
                raise Conflict(
                    f"cannot dismiss operation {operation_id}: it has not ended; cancel it first", code="conflict"
                )
            operations.dismiss(connection, operation_id, db.now(connection))

        await self._store.transaction(work)
        await self._board.operations_changed([operation_id])

    async def prune_step(self) -> None:
        """Delete operations that ended more than a week ago; the last thousand are kept."""

        def work(connection: Connection) -> int:
            now = db.now(connection)
            history.note_every_end(connection)
            idempotency.prune(connection, now)
            leases.prune(connection, now - UNUSED_LEASE_SECONDS)
            return history.prune(connection, now - KEPT_SECONDS, KEPT_OPERATIONS, _PRUNED_AT_ONCE)

        while await self._store.transaction(work) == _PRUNED_AT_ONCE:
            pass

    # Removed nodes ---------------------------------------------------------------------------------

    async def remove_node(self, name_or_id: str, author: str, *, force: bool = True) -> str:
        """Remove a node and cancel its open intents. A worker that still runs there registers as a new node.

        Without `force` a node that is healthy and not drained is refused: it has work. Returns the name of the node.
        """

        def work(connection: Connection) -> tuple[Node, list[Intent]]:
            node = find_node(connection, name_or_id)
            if not force and node.is_schedulable:
                raise Conflict(
                    f"cannot remove {node.name}: it is healthy, and its replicas and files would be lost to the "
                    "cluster. Drain it first, or remove it with --force (force=true)",
                    code="node_healthy",
                    param="force",
                )
            why = f"the node {node.name} was removed by {author}"
            ended = cancel_all(connection, operations.open_on(connection, node.id), NODE_REMOVED, why)
            replicas.remove_all_on(connection, node.id)
            lingering.remove(connection, lingering.on_node(connection, node.id))
            bus_credentials.revoke_of(connection, node.id)
            nodes.remove(connection, node.id)
            gone_nodes.note_removed(connection, node.id, node.name, db.now(connection))
            keys.note_change(connection)  # its token is no longer valid
            return node, ended

        node, ended = await self._store.transaction(work)
        log.info("node.removed node=%s name=%s by=%s cancelled=%d", node.id, node.name, author, len(ended))
        self._wake()
        self._board.node_removed(node.id)
        await self._board.intents_changed(ended)
        return node.name

    async def hopeless_step(self) -> None:
        """End intents that can never run, because of their node or their name; one frontend at a time, by a lease."""

        def work(connection: Connection) -> list[Intent]:
            now = db.now(connection)
            if not leases.acquire(connection, "hopeless", self._owner, now, now + self._lease_seconds):
                return []
            ended: list[Intent] = []
            for intent, is_there in intents.open_without_node(connection):
                why = "its node takes no backends" if is_there else "its node was removed"
                ended += cancel_all(connection, [intent], "unsupported" if is_there else NODE_REMOVED, why)
            nameless = [one for one in intents.nameless(connection) if _names_nothing(one)]
            return ended + cancel_all(connection, nameless, "invalid_name", "it names no backend")

        ended = await self._store.transaction(work)
        for intent in ended:
            log.warning("intent.hopeless intent=%s reason=%s", intent.id, intent.reason)
        await self._board.intents_changed(ended)


def _retried(connection: Connection, operation_id: OperationId, node: str | None) -> tuple[Operation, list[Intent]]:
    """Return an operation and its intents that a retry repeats, on one node or on all."""
    before, found = with_intents(connection, operation_id, node)
    if before.kind == "load":
        raise Invalid(
            f"cannot retry the load of {before.name}: request a new load, which chooses a node again",
            code="unsupported",
        )
    # What was taken back to the version before is upgraded again.
    returned = {intent.node_id for intent in found if is_return(intent)}
    again = [
        intent
        for intent in _newest(one for one in found if not is_return(one))
        if (intent.state in _RETRIED or intent.node_id in returned) and not isinstance(intent.action, UnknownAction)
    ]
    if not again:
        raise Conflict(f"cannot retry operation {operation_id}: no part of it failed or was cancelled", code="conflict")
    present = nodes.named(connection, {intent.node_id for intent in again})[0]
    again = [intent for intent in again if intent.node_id in present]
    if not again:
        raise Conflict(f"cannot retry operation {operation_id}: its nodes were removed", code="conflict")
    return before, again


def _locked(connection: Connection, intents: Iterable[Intent]) -> list[Intent]:
    """Lock these intents and return those that are open; waits for concurrent claims and replies."""
    open_ones = [intent.id for intent in intents if intent.is_open]
    return [intent for intent in operations.lock_intents(connection, open_ones).values() if intent.is_open]


def _note_lingering(connection: Connection, before: Iterable[Intent], cancelled: Iterable[Intent]) -> None:
    """Record the cancelled commands that LocalAI's workers continue, and say so in their messages until they end."""
    after = {one.id: one for one in cancelled}
    continuing = lingering.add(connection, [one for one in before if one.id in after])
    for intent_id in continuing | lingering.among(connection, after):
        one = after[intent_id]
        operations.remark(connection, one, f"{one.message}; {STILL_RUNNING}", one.updated_at)


def _left_behind(connection: Connection, operation_id: OperationId, again: Collection[IntentId]) -> bool:
    """Whether the operation has a failed intent that the retry does not repeat; then it is not dismissed."""
    every = operations.intents_of(connection, [operation_id])[operation_id]
    return any(intent.state == "failed" and intent.id not in again for intent in _newest(every))


def _newest(intents: Iterable[Intent]) -> list[Intent]:
    """Return the last intent of each node and subject."""
    return list({(intent.node_id, intent.subject): intent for intent in intents}.values())


def cancel_all(connection: Connection, intents: Iterable[Intent], reason: str, message: str) -> list[Intent]:
    change = Change(kind="cancel", now=db.now(connection), reason=reason, message=message)
    ended = [operations.apply(connection, intent, change) for intent in _locked(connection, intents)]
    operations.note_ended(connection, [intent.id for intent in ended])
    return ended


def _names_nothing(intent: Intent) -> bool:
    match intent.action:
        case InstallBackend():
            return not intent.action.resolved.directory
        case RemoveBackend():
            return not intent.action.directory
        case _:
            return False
