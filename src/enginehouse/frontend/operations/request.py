"""Accepts requests: each becomes one operation and one intent per target node, stored before the answer is sent.

Targets are fixed at that moment and shown in the operation. With an idempotency key, the same request is the same
operation on every frontend. Only this package creates, cancels, retries and supersedes operations and intents; the
loader adds the steps of a load.
"""

from __future__ import annotations

from contextlib import suppress

from enginehouse.core.action import RemoveModel, StartReplica, StopReplica
from enginehouse.core.errors import NotFound, Unavailable
from enginehouse.core.ids import OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.name import check_model_name
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest, width_of
from enginehouse.frontend.acceptance import (
    Acceptance,
    NodeActions,
    OperationDetails,
    Requester,
    insert_operation,
    new_operation,
)
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.operations.cancel import cancel_all
from enginehouse.frontend.operations.checks import check_backend_request
from enginehouse.frontend.operations.targets import Freshen, Targets, use_last_reports
from enginehouse.store import db, models, nodes, operations, replicas
from enginehouse.store.db import Connection

DRAIN_SECONDS = 30.0  # for running answers on a node that is drained; the same as in LocalAI


class Requests:
    def __init__(self, acceptance: Acceptance, targets: Targets, freshen: Freshen = use_last_reports) -> None:
        self._acceptance = acceptance
        self._store = acceptance.store
        self._board = acceptance.board
        self._targets = targets
        self._freshen = freshen

    async def request(self, request: BackendRequest, requester: Requester) -> OperationId:
        """Accept a request and return the operation's id. On return the operation is stored durably."""
        check_backend_request(request)
        unknown = await self._targets.prepare(self._store, request, self._freshen)

        def work(connection: Connection) -> OperationId:
            chosen = self._targets.choose(connection, request, unknown)
            targets = tuple(node.id for node, _ in chosen.actions)
            kept = OperationDetails(targets=targets, excluded=tuple(chosen.excluded), asked=request.options)
            operation = new_operation(connection, request.kind, request.name, requester.author, kept)
            actions = [(node.id, action) for node, action in chosen.actions]
            return insert_operation(
                connection, operation, actions, width_of(request.kind, request.max_parallel, chosen.fleet)
            )

        return await self._acceptance.accept(work, requester, request)

    async def request_unload(self, model: str, node: str | None, requester: Requester) -> OperationId:
        """Stop the replicas of a model, on one node or on all."""

        def work(connection: Connection) -> OperationId:
            only = find_node(connection, node).id if node else None
            found = [one for one in replicas.of_model(connection, model) if only in (None, one.node_id)]
            if not found:
                where = f" on {node}" if node else ""
                raise NotFound(f"cannot unload {model}: it has no replica{where}", code="not_found", param="model")
            stops: NodeActions = [(one.node_id, StopReplica(model=model, slot=one.slot)) for one in found]
            targets = tuple(dict.fromkeys(node_id for node_id, _ in stops))
            operation = new_operation(connection, "unload", model, requester.author, OperationDetails(targets=targets))
            return insert_operation(connection, operation, stops)

        return await self._acceptance.accept(work, requester, ["unload", model, node])

    async def request_model_delete(self, model: str, requester: Requester) -> OperationId:
        """Stop serving a model and remove its files from every node, whether it is loaded or not."""
        check_model_name(model)

        def work(connection: Connection) -> OperationId:
            models.get(connection, model, lock=True)  # the lock keeps loads from adding steps meanwhile
            every = [node for node in nodes.every(connection) if node.is_target]
            holders = [node for node in every if _has(connection, node, model)]
            is_row = models.remove(connection, model)
            if not holders and not is_row:
                raise NotFound(f"cannot delete {model}: it is not served, and no node has its files", param="model")
            removals: NodeActions = [(node.id, RemoveModel(model=model)) for node in holders]
            targets = tuple(node.id for node in holders)
            operation = new_operation(
                connection, "delete_model", model, requester.author, OperationDetails(targets=targets)
            )
            for node in holders:
                # An unsent start is never sent. A late one is refused by the worker, which knows of the removal.
                starts = [one for one in operations.open_on(connection, node.id) if _starts(one, model)]
                cancel_all(connection, starts, "model_deleted", f"{model} was deleted by {requester.author}")
            return insert_operation(connection, operation, removals)

        return await self._acceptance.accept(work, requester, ["delete_model", model])

    async def request_drain(self, name_or_id: str, requester: Requester) -> OperationId:
        """Drain a node: it gets no more work, and its replicas stop. It stays drained until it is resumed."""

        def work(connection: Connection) -> OperationId:
            node = find_node(connection, name_or_id)
            nodes.set_drained(connection, node.id, True, db.now(connection))
            stops: NodeActions = [
                (node.id, StopReplica(model=replica.model, slot=replica.slot, drain_seconds=DRAIN_SECONDS))
                for replica, _ in replicas.on_node(connection, node.id)
            ]
            operation = new_operation(
                connection, "drain", node.name, requester.author, OperationDetails(targets=(node.id,))
            )
            return insert_operation(connection, operation, stops)

        accepted = await self._acceptance.accept(work, requester, ["drain", name_or_id])
        with suppress(Unavailable):  # the drain is stored; the next round of the poller does the same
            await self._freshen((name_or_id,))  # also stops idle processes of installs on LocalAI's workers
        return accepted


def _starts(intent: Intent, model: str) -> bool:
    return isinstance(intent.action, StartReplica) and intent.action.model.name == model


def _has(connection: Connection, node: Node, model: str) -> bool:
    """Whether a node has, or is about to have, files or a process of a model."""
    held = any(one.name == model for one in node.report.models)
    runs = any(one.model_id == model for one in node.report.replicas)
    subjects = {one.subject for one in operations.open_on(connection, node.id)}
    about = {f"model:{model}", *(one for one in subjects if one.rpartition("#")[0] == f"replica:{model}")}
    return held or runs or bool(about & subjects)
