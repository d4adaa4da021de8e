"""Loads models: steers the operation that leads to a ready replica.

A load advances step by step, under one lease per model, slot and target. `core.loading.next_step` chooses the step, a
pure function of rows, so any frontend can take it. Concurrent requests share one load, on however many frontends: a
request locks the model's row, and joins a load that is open.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import assert_never

import msgspec

from enginehouse.core.action import Action, PullModel, StartReplica, phrase, subject_of
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, NotFound, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import OPEN, Intent
from enginehouse.core.loading import Done, GiveUp, Next, Wait, next_step
from enginehouse.core.model import Model
from enginehouse.core.name import check_model_name
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation
from enginehouse.core.replica import Replica, process_key
from enginehouse.frontend.acceptance import Requester, once
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.serving.models import reachable
from enginehouse.frontend.serving.router import model_not_found
from enginehouse.frontend.watching.board import Board
from enginehouse.store import db, leases, models, nodes, operations, replicas, supersession
from enginehouse.store import intents as store_intents
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

COOL_DOWN_SECONDS = 10.0  # after a failed load, requests get its error instead of a new load; the same as in LocalAI
# The same after a temporary cause: a node that was away may be back by the time the error is read.
SHORT_COOL_DOWN_SECONDS = 1.0
_TEMPORARY = frozenset({"insufficient_capacity", "worker_restarted", "upstream_error"})
# A load that ended so did not fail, and is no reason to refuse the next request.
_NO_FAILURE = frozenset({"cancelled", "superseded"})
_STATES = {"install_backend": "installing", "pull_model": "staging", "start_replica": "loading"}
_NO_BYTES: dict[str, object] = {"bytes_sent": 0, "total_bytes": 0, "file_index": 0, "total_files": 0}


class Loader:
    def __init__(self, store: Store, board: Board, galleries: Galleries, *, owner: str, lease_seconds: float) -> None:
        self._store = store
        self._board = board
        self._galleries = galleries
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._on_step: list[Callable[[], None]] = []

    def on_step(self, wake: Callable[[], None]) -> None:
        """Set the callback for a load that advanced: it wakes the dispatcher and the loader's own loop."""
        self._on_step.append(wake)

    def _wake(self) -> None:
        for call in self._on_step:
            call()

    # Requests ----------------------------------------------------------------------------------

    async def request(self, model: str, node: str | None, author: str, key: str = "") -> OperationId | list[Replica]:
        """Request a load, on the named node or anywhere. Returns the operation's id, or the replicas that already run.

        With an idempotency `key`, the same request is the same load, even after the load has ended.
        """

        def work(connection: Connection) -> OperationId | list[Replica]:
            wanted = self._row(connection, model)
            only = find_node(connection, node).id if node else None
            if wanted.endpoint:
                raise Invalid(
                    f"cannot load {wanted.name}: it runs elsewhere, at {wanted.endpoint}, and is always ready here",
                    code="unsupported",
                    param="model",
                )
            running = [one for one in reachable(connection, wanted.name) if only in (None, one.node_id)]
            return running or self._open_or_new(connection, wanted, only, author)

        found = await self._store.transaction(once(work, Requester(author=author, key=key), ["load", model, node]))
        if isinstance(found, str):
            self._wake()
            await self._board.operations_changed([found])
        return found

    def begin(self, connection: Connection, model: Model, author: str) -> OperationId:
        """Begin or join a load anywhere, in the transaction of the caller, who wakes the loops after it."""
        return self._open_or_new(connection, model, None, author)

    async def ensure(self, model: str, dead: Collection[str], waiting_for: str = "") -> OperationId:
        """Join the running load of a model, begin one, or raise the error of one that just failed.

        Returns "" if there is a replica other than the processes (nonces) that the caller knows to be `dead`. A load
        that was cancelled or superseded is an error only for the requests that were `waiting_for` it.
        """

        def work(connection: Connection) -> tuple[OperationId, bool]:
            wanted = models.get(connection, model, lock=True)
            if wanted is None:
                raise model_not_found(model)
            if wanted.endpoint or any(one.nonce not in dead for one in reachable(connection, model)):
                return OperationId(""), False
            last = operations.last_of(connection, "load", model, targets=())
            if last is not None and last.is_steered:
                return last.id, False
            if last is not None and last.error_code:
                failure, pause_seconds = _failure_of(connection, last)
                is_told = last.id == waiting_for or last.error_code not in _NO_FAILURE
                if is_told and _ended_ago(connection, last) < pause_seconds:
                    raise failure
            return self._open_or_new(connection, wanted, None, "loader"), True

        operation_id, is_new = await self._store.transaction(work)
        if is_new:
            self._wake()
            await self._board.operations_changed([operation_id])
        return operation_id

    def _row(self, connection: Connection, name: str) -> Model:
        """Return the model's row, locked; inserted from the gallery on the first request."""
        known = models.get(connection, name, lock=True)
        if known is not None:
            return known
        offered = self._galleries.model(check_model_name(name))
        if offered is None:
            raise model_not_found(name)
        models.insert(connection, offered, db.now(connection))
        return offered

    def _open_or_new(self, connection: Connection, model: Model, only: NodeId | None, author: str) -> OperationId:
        targets = (only,) if only else ()
        for operation in operations.steered(connection, model.name):
            # A load without a target does not serve a request for one node.
            if operation.targets == targets:
                return operation.id
        operation = Operation(
            id=OperationId(str(uuid.uuid4())),
            kind="load",
            name=model.name,
            author=author,
            created_at=db.now(connection),
            targets=targets,
            is_steered=True,
        )
        operations.insert(connection, operation)
        return operation.id

    # Steering ----------------------------------------------------------------------------------

    async def step(self) -> None:
        """Take the next step of every load that this frontend may steer."""
        moved = await self._store.transaction(self._steer_all)
        if moved:
            self._wake()
            await self._board.operations_changed(moved)

    def _steer_all(self, connection: Connection) -> list[OperationId]:
        now = db.now(connection)
        moved = []
        steered = operations.steered(connection)
        every = nodes.every(connection) if steered else []
        for operation in steered:
            lease = f"load:{process_key(operation.name, 0)}:{','.join(operation.targets)}"
            if leases.acquire(connection, lease, self._owner, now, now + self._lease_seconds) and self._steer(
                connection, operation, every, now
            ):
                moved.append(operation.id)
                if not operations.is_steered(connection, operation.id):
                    leases.release(connection, lease, self._owner)
        return moved

    def _steer(self, connection: Connection, operation: Operation, every: Sequence[Node], now: float) -> bool:
        model = models.get(connection, operation.name)
        if model is None:
            message = f"cannot load {operation.name}: the model was removed"
            operations.end_steering(connection, operation.id, "model_not_found", message)
            return True
        intents = operations.intents_of(connection, [operation.id])[operation.id]
        try:
            builds, _ = self._galleries.resolve_each(model.backend, every)
        except Unavailable:
            return False  # a gallery that is not loaded here yet may have it
        except NotFound as error:
            operations.end_steering(connection, operation.id, error.code, error.message)
            return True
        only = operation.targets[0] if operation.targets else ""
        changes = _changing(connection, model, every, builds)
        step = next_step(model, intents, every, builds, only=only, new_key=secrets.token_urlsafe(32), changes=changes)
        if isinstance(step, Next) and isinstance(step.action, StartReplica):
            served = replicas.ready_since(connection, model.name, operation.created_at)
            if served & {only or step.node_id}:
                step = Done()  # another load was faster; a second start would end its process
        match step:
            case Wait():
                return False
            case Next():
                if models.get(connection, model.name, lock=True) is None:
                    return False  # deleted concurrently: the next step ends this load
                action = _with_files(connection, step)
                supersession.add_intent(
                    connection, operation.id, step.node_id, action, IntentId(str(uuid.uuid4())), now
                )
                log.info("load.advanced model=%s node=%s action=%r", model.name, step.node_id, phrase(step.action))
            case Done():
                operations.end_steering(connection, operation.id)
            case GiveUp():
                operations.end_steering(connection, operation.id, step.code, step.message)
                log.warning("load.failed model=%s code=%s message=%r", model.name, step.code, step.message)
            case _:
                assert_never(step)
        return True

    # Views -------------------------------------------------------------------------------------

    async def loading(self, operation_id: OperationId) -> dict[str, object]:
        """Return the `loading` object of a 503."""
        view = await self._board.view(operation_id)
        rows = view.nodes if isinstance(view.nodes, list) else []
        # Steps run concurrently; the first open one is shown.
        current = next((row for row in rows if row.state in OPEN), rows[-1] if rows else None)
        if current is None:
            return {"model": view.name, "state": "pending", "progress": 0.0, **_NO_BYTES}
        return {
            "model": view.name,
            "state": _STATES.get(current.kind, "pending"),
            "node": current.node_name,
            "progress": current.percentage,
            **_NO_BYTES,
            "bytes_sent": current.current_bytes if isinstance(current.current_bytes, int) else 0,
            "total_bytes": current.total_bytes if isinstance(current.total_bytes, int) else 0,
        }


def _changing(
    connection: Connection, model: Model, every: Sequence[Node], builds: Mapping[NodeId, Resolved]
) -> list[Intent]:
    """Return the intents about the model's backend and files that are open or ended after the last reports, on the
    nodes that could run it.
    """
    able = [node for node in every if node.id in builds and node.is_target]
    subjects = {f"backend:{build.directory}" for build in builds.values()}
    return store_intents.changing(connection, able, {*subjects, subject_of(PullModel(model=model))})


def _with_files(connection: Connection, step: Next) -> Action:
    """Add the generation of the model's files to a start, so that the start does not restore files removed later."""
    if not isinstance(step.action, StartReplica):
        return step.action
    newest = supersession.generation_at(connection, step.node_id, subject_of(PullModel(model=step.action.model)))
    return msgspec.structs.replace(step.action, files=newest)


def _ended_ago(connection: Connection, operation: Operation) -> float:
    """Return the seconds since the last change of an ended load."""
    intents = operations.intents_of(connection, [operation.id])[operation.id]
    return db.now(connection) - max([operation.created_at, *(intent.updated_at for intent in intents)])


def _failure_of(connection: Connection, operation: Operation) -> tuple[EnginehouseError, float]:
    """Return the error of a load that ended without a replica, and for how many seconds requests get it.

    The time is short if the cause is temporary or the worker reported that it can heal.
    """
    if operation.error_code in _NO_FAILURE:
        ended = Unavailable(
            f"cannot answer yet: the load of {operation.name} was {operation.error_code}; retry the request",
            code=operation.error_code,
            param="model",
        )
        ended.retry_after_seconds = SHORT_COOL_DOWN_SECONDS
        return ended, COOL_DOWN_SECONDS
    intents = operations.intents_of(connection, [operation.id])[operation.id]
    causes = [one.outcome for one in intents if one.state == "failed" and one.reason == operation.error_code]
    heals = bool(causes) and all(outcome is not None and outcome.can_heal for outcome in causes)
    error: EnginehouseError
    if heals or operation.error_code in _TEMPORARY:
        error = Unavailable(operation.error_message, code=operation.error_code)
        error.retry_after_seconds = SHORT_COOL_DOWN_SECONDS
    else:
        error = Hopeless(operation.error_message, code=operation.error_code)
        error.retry_after_seconds = COOL_DOWN_SECONDS
    return error, error.retry_after_seconds
