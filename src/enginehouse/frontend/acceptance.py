"""Stores an accepted request: one operation and its intents in one transaction, once per idempotency key.

The answer is sent only after the commit, and nothing is kept in memory before it. A client that loses the answer
repeats the request with the same key and gets the same operation.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from enginehouse.core.action import Action
from enginehouse.core.canary import Canary, hold_message
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.operation import Excluded, Operation, OperationKind, RequestOptions, unknown_operation
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.watching.board import Board
from enginehouse.store import db, idempotency, operations
from enginehouse.store.db import Connection, Store
from enginehouse.store.supersession import Wanted, add_intents

MAX_KEY = 255

T = TypeVar("T")
NodeActions = Sequence[tuple[NodeId, Action]]


class Requester(Struct, frozen=True, kw_only=True):
    """The author of a request and its idempotency key ("" for none)."""

    author: str
    key: str = ""


class Acceptance:
    def __init__(self, store: Store, board: Board, wake: Callable[[], None], pace: ServingPace = USUAL) -> None:
        self.pace = pace
        self.store = store
        self.board = board
        self.wake = wake

    async def accept(
        self, work: Callable[[Connection], OperationId], requester: Requester, body: object
    ) -> OperationId:
        """Run `work` once per idempotency key; the operation's id. Another `body` with the same key is a conflict."""
        operation_id = await self.store.transaction(once(work, requester, body))
        self.wake()
        await self.board.operations_changed([operation_id])
        return operation_id


def once(
    work: Callable[[Connection], OperationId | T], requester: Requester, body: object
) -> Callable[[Connection], OperationId | T]:
    """Wrap `work` so that a used key returns the operation of its first request; other results are not kept."""
    if not requester.key:
        return work
    if len(requester.key) > MAX_KEY or not requester.key.isprintable():
        raise Invalid(
            f"cannot use this Idempotency-Key: it must be at most {MAX_KEY} printable characters",
            code="invalid_name",
            param="Idempotency-Key",
        )
    body_hash = hashlib.sha256(msgspec.json.encode(body)).hexdigest()

    def known_or_new(connection: Connection) -> OperationId | T:
        now = db.now(connection)
        known = idempotency.known(connection, requester.author, requester.key, body_hash, now)
        if known is not None:
            return known
        made = work(connection)
        if isinstance(made, str):
            idempotency.remember(connection, requester.author, requester.key, body_hash, OperationId(made), now)
        return made

    return known_or_new


class OperationDetails(Struct, frozen=True, kw_only=True):
    """The fields of an operation beside its kind, name and author."""

    targets: tuple[NodeId, ...]
    excluded: tuple[Excluded, ...] = ()
    asked: RequestOptions = RequestOptions()
    retry_of: OperationId = OperationId("")
    is_steered: bool = False
    canary: Canary | None = None


def new_operation(
    connection: Connection, kind: OperationKind, name: str, author: str, kept: OperationDetails
) -> Operation:
    return Operation(
        id=OperationId(str(uuid.uuid4())),
        kind=kind,
        name=name,
        author=author,
        created_at=db.now(connection),
        targets=kept.targets,
        excluded=kept.excluded,
        asked=kept.asked,
        retry_of=kept.retry_of,
        is_steered=kept.is_steered,
        canary=kept.canary,
    )


def insert_operation(connection: Connection, operation: Operation, actions: NodeActions, width: int = 0) -> OperationId:
    """Insert an operation and its intents, and return its id. At most `width` intents run at once; 0 means all."""
    operations.insert(connection, operation)
    held = operation.canary.held if operation.canary is not None else ()
    hold = hold_message(operation.canary) if operation.canary is not None else ""
    wanted = [
        Wanted(node_id, action, IntentId(str(uuid.uuid4())), hold if node_id in held else "")
        for node_id, action in actions
    ]
    add_intents(connection, operation.id, wanted, operation.created_at, width)
    if not actions and not operation.is_steered:
        operations.end_of(connection, operation.id)
    return operation.id


def with_intents(connection: Connection, operation_id: OperationId, node: str | None) -> tuple[Operation, list[Intent]]:
    """Return an operation and its intents, on one node or on all."""
    operation = operations.get(connection, operation_id)
    if operation is None:
        raise unknown_operation(operation_id)
    intents = operations.intents_of(connection, [operation_id])[operation_id]
    if node is None:
        return operation, intents
    only = find_node(connection, node).id
    found = [intent for intent in intents if intent.node_id == only]
    if not found:
        raise NotFound(
            f"cannot find {node} in operation {operation_id}: this node is not one of its targets", param="node"
        )
    return operation, found
