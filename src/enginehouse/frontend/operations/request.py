"""Accepts requests: each becomes one operation and one intent per target node, stored before the answer is sent.

Targets are fixed at that moment and shown in the operation. With an idempotency key, the same request is the same
operation on every frontend. Only this package creates, cancels, retries and supersedes operations and intents; the
loader adds the steps of a load.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from enginehouse.core.action import RemoveModel, StartReplica, StopReplica
from enginehouse.core.errors import Conflict, NotFound, Unavailable
from enginehouse.core.ids import NodeId, OperationId
from enginehouse.core.intent import Intent
from enginehouse.core.name import check_model_name
from enginehouse.core.node import Node
from enginehouse.core.operation import BackendRequest, width_of
from enginehouse.core.reconcile import ModelFacts, ServingReplica, must_move
from enginehouse.core.schedule import without_kept
from enginehouse.frontend.acceptance import (
    Acceptance,
    NodeActions,
    OperationDetails,
    Requester,
    insert_operation,
    new_operation,
)
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.operations.canary_choice import begin_canary
from enginehouse.frontend.operations.cancel import cancel_all
from enginehouse.frontend.operations.checks import check_backend_request, check_unused
from enginehouse.frontend.operations.targets import Freshen, Targets, use_last_reports
from enginehouse.store import db, load_infos, models, nodes, operations, replicas, schedules
from enginehouse.store.db import Connection
from enginehouse.store.replicas import UsedReplica


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
            if request.kind == "delete" and not request.force:
                check_unused(connection, request, chosen.actions)
            targets = tuple(node.id for node, _ in chosen.actions)
            actions = [(node.id, action) for node, action in chosen.actions]
            kept = OperationDetails(
                targets=targets,
                excluded=tuple(chosen.excluded),
                asked=request.options,
                canary=begin_canary(connection, actions, self._targets.canary_rules, is_wanted=request.canary),
            )
            operation = new_operation(connection, request.kind, request.name, requester.author, kept)
            return insert_operation(
                connection, operation, actions, width_of(request.kind, request.max_parallel, chosen.fleet)
            )

        return await self._acceptance.accept(work, requester, request)

    async def request_unload(self, model: str, node: str | None, requester: Requester) -> OperationId:
        """Stop the replicas of a model, on one node or on all."""

        def work(connection: Connection) -> OperationId:
            only = find_node(connection, node).id if node else None
            found = [one for one in replicas.of_model(connection, model) if only in (None, one.node_id)]
            info = load_infos.get(connection, model)
            if not found and not info.kept:
                where = f" on {node}" if node else ""
                raise NotFound(f"cannot unload {model}: it has no replica{where}", code="not_found", param="model")
            schedule = schedules.get(connection, model)
            if schedule is not None and schedule.is_kept and node is None:
                raise Conflict(
                    f"cannot unload {model}: its schedule keeps replicas of it. "
                    f"First: enginehouse models schedule {model} --remove",
                    code="conflict",
                    param="model",
                )
            load_infos.change(connection, model, lambda known: without_kept(known, only))
            for one in found:
                replicas.set_leaving(connection, one.node_id, one.model, one.slot, True)
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
            schedules.remove(connection, model)
            load_infos.remove(connection, model)
            for one in replicas.of_model(connection, model):
                # From now on nobody is answered by it, however long its worker takes to stop it.
                replicas.remove(connection, one.node_id, model, one.slot)
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
        """Drain a node: it gets no more work, and its replicas stop. It stays drained until it is resumed.

        A replica that others cannot stand in for stays until the reconciler has moved it, and the operation with it.
        """

        def work(connection: Connection) -> OperationId:
            node = find_node(connection, name_or_id)
            nodes.set_drained(connection, node.id, True, db.now(connection))
            here = replicas.on_node(connection, node.id)
            staying = _staying(connection, node.id)
            # Also what is being started: it would run on a node that is to be empty.
            open_ones = [one.action for one in operations.open_on(connection, node.id)]
            places = [(one.model.name, one.slot) for one in open_ones if isinstance(one, StartReplica)]
            places += [(replica.model, replica.slot) for replica, _ in here if replica.nonce not in staying]
            stops: NodeActions = [
                (node.id, StopReplica(model=model, slot=slot, drain_seconds=self._acceptance.pace.drain_seconds))
                for model, slot in dict.fromkeys(places)
            ]
            for _, stop in stops:
                assert isinstance(stop, StopReplica)
                replicas.set_leaving(connection, node.id, stop.model, stop.slot, True)
            details = OperationDetails(targets=(node.id,), is_steered=bool(here))
            operation = new_operation(connection, "drain", node.name, requester.author, details)
            return insert_operation(connection, operation, stops)

        accepted = await self._acceptance.accept(work, requester, ["drain", name_or_id])
        with suppress(Unavailable):  # the drain is stored; the next round of the poller does the same
            await self._freshen((name_or_id,))  # also stops idle processes of installs on LocalAI's workers
        return accepted


def _staying(connection: Connection, node_id: NodeId) -> set[str]:
    """The processes of a node that must be replaced elsewhere before they stop."""
    serving, now = nodes.serving(connection), db.now(connection)
    drained = {one.id for one in nodes.every(connection) if one.drained}
    by_model: dict[str, list[ServingReplica]] = {}
    for used in replicas.every_with_use(connection):
        if not used.leaving and used.replica.node_id in serving:
            by_model.setdefault(used.replica.model, []).append(_serving_replica(used, drained))
    staying: set[str] = set()
    for model, found in by_model.items():
        facts = ModelFacts(
            now=now, info=load_infos.get(connection, model), schedule=schedules.get(connection, model), replicas=found
        )
        staying |= {one.nonce for one in found if one.node_id == node_id and must_move(facts, one)}
    return staying


def _serving_replica(used: UsedReplica, drained: Collection[NodeId]) -> ServingReplica:
    return ServingReplica(
        node_id=used.replica.node_id,
        slot=used.replica.slot,
        created_at=used.created_at,
        last_used=used.last_used,
        nonce=used.replica.nonce,
        leaves_node=used.replica.node_id in drained,
    )


def _starts(intent: Intent, model: str) -> bool:
    return isinstance(intent.action, StartReplica) and intent.action.model.name == model


def _has(connection: Connection, node: Node, model: str) -> bool:
    """Whether a node has, or is about to have, files or a process of a model."""
    held = any(one.name == model for one in node.report.models)
    runs = any(one.model_id == model for one in node.report.replicas)
    # A replica that was just started is not in a report yet.
    runs = runs or any(one.node_id == node.id for one in replicas.of_model(connection, model))
    subjects = {one.subject for one in operations.open_on(connection, node.id)}
    about = {f"model:{model}", *(one for one in subjects if one.rpartition("#")[0] == f"replica:{model}")}
    return held or runs or bool(about & subjects)
