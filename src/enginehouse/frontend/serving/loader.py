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
from functools import partial
from typing import assert_never

import msgspec

from enginehouse.core.action import Action, InstallBackend, PullModel, StartReplica, StopReplica, phrase, subject_of
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import Invalid, NotFound, Unavailable
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.intent import NODE_LEFT, Change, Intent
from enginehouse.core.loading import Done, GiveUp, LoadState, LoadStep, MakeRoom, Next, Wait, left_steps, next_step
from enginehouse.core.model import Model
from enginehouse.core.name import check_model_name
from enginehouse.core.node import Node
from enginehouse.core.operation import Operation, ReplacedReplica
from enginehouse.core.pace import USUAL, ServingPace
from enginehouse.core.placement import Needs, Reservation
from enginehouse.core.reconcile import RECONCILER, retry_seconds
from enginehouse.core.replica import Replica
from enginehouse.core.schedule import LoadInfo, with_kept
from enginehouse.frontend.acceptance import OperationDetails, Requester, insert_operation, new_operation, once
from enginehouse.frontend.fleet.nodes import find_node
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.builds import builds_for, install_for
from enginehouse.frontend.serving.load_ends import NO_FAILURE, ended_ago, failure_of, progress_of
from enginehouse.frontend.serving.models import reachable
from enginehouse.frontend.serving.rooms import needs_of, read_fleet, rooms_for
from enginehouse.frontend.serving.router import model_not_found
from enginehouse.frontend.watching.board import Board
from enginehouse.store import (
    db,
    leases,
    load_infos,
    models,
    nodes,
    operations,
    replicas,
    reservations,
    supersession,
)
from enginehouse.store import intents as store_intents
from enginehouse.store.db import Connection, Store

log = logging.getLogger(__name__)

PLACING = "placing"  # the lease of the frontend that reserves memory, so that two never promise the same
PLACING_SECONDS = 2.0


class Loader:
    def __init__(
        self,
        store: Store,
        board: Board,
        galleries: Galleries,
        *,
        owner: str,
        lease_seconds: float,
        has_carrier: bool = False,
        pace: ServingPace = USUAL,
    ) -> None:
        """`has_carrier`: this frontend can load models on LocalAI's workers."""
        self._has_carrier = has_carrier
        self._pace = pace
        self._store = store
        self._board = board
        self._galleries = galleries
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._on_step: list[Callable[[], None]] = []
        self._on_ended: list[Callable[[str, float, str], None]] = []

    def on_step(self, wake: Callable[[], None]) -> None:
        """Set the callback for a load that advanced: it wakes the dispatcher and the loader's own loop."""
        self._on_step.append(wake)

    def on_ended(self, tell: Callable[[str, float, str], None]) -> None:
        """Set the callback for a load that this frontend ended: its model, its seconds, and its error code or ""."""
        self._on_ended.append(tell)

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
            if wanted.alias:
                wanted = self._row(connection, wanted.alias)
            _keep(connection, wanted.name, only, author)
            running = [one for one in reachable(connection, wanted.name) if only in (None, one.node_id)]
            return running or self._open_or_new(connection, wanted, only, author)

        found = await self._store.transaction(once(work, Requester(author=author, key=key), ["load", model, node]))
        if isinstance(found, str):
            self._wake()
            await self._board.operations_changed([found])
        return found

    def begin(self, connection: Connection, model: Model, author: str) -> OperationId:
        """Begin or join a load anywhere, in the transaction of the caller, who wakes the loops after it."""
        _keep(connection, model.name, None, author)
        return self._open_or_new(connection, model, None, author)

    def begin_another(self, connection: Connection, model: Model, only: NodeId | None) -> OperationId:
        """Begin the load of one more replica, beside those that run or load."""
        return self._new(connection, model, only, RECONCILER)

    def begin_replacement(self, connection: Connection, model: Model, replaced: ReplacedReplica) -> OperationId:
        """Begin the load of a replica that takes the place of another one: on the same node, or elsewhere if that node
        gets no more work.
        """
        node = nodes.get(connection, replaced.node_id)
        only = replaced.node_id if node is not None and node.is_schedulable else None
        return self._new(connection, model, only, RECONCILER, replaced)

    async def ensure(self, model: str, dead: Collection[str], waiting_for: str = "") -> OperationId:
        """Join the running load of a model, begin one, or raise the error of one that just failed.

        Returns "" if there is a replica other than the processes (nonces) that the caller knows to be `dead`. A load
        that was cancelled or superseded is an error only for the requests that were `waiting_for` it.
        """

        def work(connection: Connection) -> tuple[OperationId, bool]:
            wanted = models.get(connection, model, lock=True)
            if wanted is None:
                raise model_not_found(model)
            if wanted.alias:
                raise _new_alias(wanted)
            if wanted.endpoint or any(one.nonce not in dead for one in reachable(connection, model)):
                return OperationId(""), False
            last = operations.last_of(connection, "load", model, targets=())
            if last is not None and last.is_steered:
                return last.id, False
            if last is not None and last.error_code:
                failure, pause_seconds = failure_of(connection, last, self._pace)
                is_told = last.id == waiting_for or last.error_code not in NO_FAILURE
                if is_told and ended_ago(connection, last) < pause_seconds:
                    raise failure
            load_infos.lock(connection, model)
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
        return self._new(connection, model, only, author)

    def _new(
        self,
        connection: Connection,
        model: Model,
        only: NodeId | None,
        author: str,
        replaced: ReplacedReplica | None = None,
    ) -> OperationId:
        operation = Operation(
            id=OperationId(str(uuid.uuid4())),
            kind="load",
            name=model.name,
            author=author,
            created_at=db.now(connection),
            targets=(only,) if only else (),
            is_steered=True,
            replaces=replaced,
        )
        operations.insert(connection, operation)
        return operation.id

    # Steering ----------------------------------------------------------------------------------

    async def step(self) -> None:
        """Take the next step of every load that this frontend may steer."""
        ended: list[tuple[str, float, str]] = []
        moved = await self._store.transaction(lambda connection: self._steer_all(connection, ended))
        for load in ended:
            for tell in self._on_ended:
                tell(*load)
        if moved:
            self._wake()
            await self._board.operations_changed(moved)

    def _steer_all(self, connection: Connection, ended: list[tuple[str, float, str]]) -> list[OperationId]:
        ended.clear()  # the transaction may be tried again
        now = db.now(connection)
        moved = []
        steered = operations.steered(connection)
        every = nodes.every(connection) if steered else []
        for operation in steered:
            lease = f"load:{operation.id}"
            if leases.acquire(connection, lease, self._owner, now, now + self._lease_seconds) and self._steer(
                connection, operation, every, now
            ):
                moved.append(operation.id)
                if not operations.is_steered(connection, operation.id):
                    code = operations.error_code_of(connection, operation.id)
                    ended.append((operation.name, now - operation.created_at, code))
                    leases.release(connection, lease, self._owner)
        if steered:
            leases.release(connection, PLACING, self._owner)
        return moved

    def _steer(self, connection: Connection, operation: Operation, every: Sequence[Node], now: float) -> bool:
        model = models.get(connection, operation.name)
        if model is None:
            self._end(connection, operation, "model_not_found", f"cannot load {operation.name}: the model was removed")
            _abandon(connection, operation, now)
            return True
        intents = operations.intents_of(connection, [operation.id])[operation.id]
        try:
            builds, _ = builds_for(self._galleries, model.backend, every, has_carrier=self._has_carrier)
        except Unavailable:
            return False  # a gallery that is not loaded here yet may have it
        except NotFound as error:
            self._end(connection, operation, error.code, error.message)
            return True
        if not leases.acquire(connection, PLACING, self._owner, now, now + PLACING_SECONDS):
            return False  # another frontend reserves memory at the moment
        fleet = read_fleet(connection, every, now)
        needs = needs_of(
            fleet,
            model,
            builds,
            only=operation.targets[0] if operation.targets else "",
            may_replace=operation.author != RECONCILER,
            replaces=operation.replaces,
        )
        state = LoadState(
            intents=intents,
            changes=_changing(connection, model, every, builds),
            reserved=next((one for one in fleet.reservations if one.operation_id == operation.id), None),
        )
        rooms = rooms_for(connection, fleet, model, operation.id, pace=self._pace)
        step = next_step(needs, rooms, state, new_key=secrets.token_urlsafe(32))
        reservations.extend(connection, operation.id, now + self._pace.reserved_seconds)
        if isinstance(step, Next) and isinstance(step.action, StartReplica) and needs.may_replace:
            served = replicas.ready_since(connection, model.name, operation.created_at)
            if served & {needs.only or step.node_id}:
                step = Done()  # another load was faster; a second start would end its process
        if not isinstance(step, Wait):
            _leave(connection, left_steps(intents, every), now)
        return self._take(connection, operation, step, needs, every)

    def _take(
        self, connection: Connection, operation: Operation, step: LoadStep, needs: Needs, every: Sequence[Node]
    ) -> bool:
        """Store a step; False if there is nothing to do."""
        now, name = db.now(connection), operation.name
        match step:
            case Wait():
                return False
            case Next():
                if models.get(connection, name, lock=True) is None:
                    return False  # deleted concurrently: the next step ends this load
                wanted = Reservation(
                    operation_id=operation.id,
                    node_id=step.node_id,
                    model=name,
                    slot=step.slot,
                    memory_bytes=needs.demand.memory_bytes,
                )
                if not reservations.put(connection, wanted, now, now + self._pace.reserved_seconds):
                    return False  # another load has the slot
                self._add(connection, operation, step.node_id, self._prepared(connection, step, every))
            case MakeRoom():
                for stop in step.actions:
                    # A replica that is replaced may be busy; others were idle when they were chosen.
                    seconds = self._pace.drain_seconds if stop.model == name else self._pace.evict_seconds
                    self._stop(connection, operation, step.node_id, stop, seconds)
            case Done():
                self._stop_replaced(connection, operation)
                load_infos.change(connection, name, partial(_after_success, revision=needs.model.revision))
                reservations.settle(connection, operation.id, now, now + self._pace.settled_seconds)
                operations.end_steering(connection, operation.id)
            case GiveUp():
                self._end(connection, operation, step.code, step.message)
            case _:
                assert_never(step)
        return True

    def _stop(
        self, connection: Connection, operation: Operation, node_id: NodeId, stop: StopReplica, drain_seconds: float
    ) -> None:
        replicas.set_leaving(connection, node_id, stop.model, stop.slot, True)
        self._add(connection, operation, node_id, msgspec.structs.replace(stop, drain_seconds=drain_seconds))

    def _stop_replaced(self, connection: Connection, operation: Operation) -> None:
        """The new replica is ready: no more requests for the one that it replaces."""
        old = operation.replaces
        known = replicas.of_model(connection, operation.name) if old is not None else []
        if old is not None and any((one.node_id, one.nonce) == (old.node_id, old.nonce) for one in known):
            stop = StopReplica(model=operation.name, slot=old.slot)
            self._stop(connection, operation, old.node_id, stop, self._pace.drain_seconds)

    def _add(self, connection: Connection, operation: Operation, node_id: NodeId, action: Action) -> None:
        identifier, now = IntentId(str(uuid.uuid4())), db.now(connection)
        supersession.add_intent(connection, operation.id, node_id, action, identifier, now)
        log.info("load.advanced model=%s node=%s action=%r", operation.name, node_id, phrase(action))

    def _end(self, connection: Connection, operation: Operation, code: str, message: str) -> None:
        reservations.remove(connection, operation.id)
        if code == "cancelled":
            load_infos.note_cancelled(connection, operation, self._pace.max_retry_seconds)
        elif code not in ("superseded", "model_not_found"):
            failed = partial(_after_failure, message=message, now=db.now(connection), pace=self._pace)
            load_infos.change(connection, operation.name, failed)
        operations.end_steering(connection, operation.id, code, message)
        log.warning("load.failed model=%s code=%s message=%r", operation.name, code, message)

    def _prepared(self, connection: Connection, step: Next, every: Sequence[Node]) -> Action:
        """The action of a step as its node needs it."""
        node = next((one for one in every if one.id == step.node_id), None)
        if isinstance(step.action, InstallBackend) and node is not None:
            return install_for(step.action, node, self._galleries.encoded)
        return _with_files(connection, step)

    # Views -------------------------------------------------------------------------------------

    async def load_status(self, model: str) -> dict[str, object] | None:
        """Return the same for the open load of a model; None if there is none."""
        found = await self._store.read(lambda connection: operations.steered(connection, model))
        return await self.loading(found[0].id) if found else None

    async def loading(self, operation_id: OperationId) -> dict[str, object]:
        """Return the `loading` object of a 503."""
        view = await self._board.view(operation_id)
        return progress_of(view)


def _keep(connection: Connection, model: str, only: NodeId | None, author: str) -> None:
    """Somebody asked for a load: it stays wanted."""
    load_infos.change(connection, model, lambda known: msgspec.structs.replace(with_kept(known, only), author=author))


def _after_success(known: LoadInfo, *, revision: str) -> LoadInfo:
    measured = known.memory_bytes if known.revision == revision else 0
    return msgspec.structs.replace(known, revision=revision, memory_bytes=measured, failures=0, retry_at=0.0, reason="")


def _after_failure(known: LoadInfo, *, message: str, now: float, pace: ServingPace) -> LoadInfo:
    failures = known.failures + 1
    retry_at = now + retry_seconds(failures, pace)
    return msgspec.structs.replace(known, failures=failures, retry_at=retry_at, reason=message)


def _leave(connection: Connection, left: Sequence[Intent], now: float) -> None:
    """Cancel the steps that a load no longer waits for, unless others than loads do: every load leaves that node.

    A start that was sent may have been done, so what runs there is stopped when the node is back.
    """
    message = "the node is drained or offline; the load goes on elsewhere"
    change = Change(kind="cancel", now=now, reason=NODE_LEFT, message=message)
    for intent in left:
        action = intent.action
        if isinstance(action, StartReplica) and intent.attempt:
            details = OperationDetails(targets=(intent.node_id,))
            stopping = new_operation(connection, "unload", action.model.name, RECONCILER, details)
            stop = StopReplica(model=action.model.name, slot=action.slot)
            insert_operation(connection, stopping, [(intent.node_id, stop)])
        elif all(one.kind == "load" for one in operations.of_intents(connection, [intent.id])):
            operations.apply(connection, intent, change)
            operations.note_ended(connection, [intent.id])


def _abandon(connection: Connection, ended: Operation, now: float) -> None:
    """Cancel the open steps of a load whose model was removed, unless another operation waits for them."""
    change = Change(kind="cancel", now=now, reason="model_deleted", message=f"{ended.name} was removed")
    for intent in operations.intents_of(connection, [ended.id])[ended.id]:
        others = [one for one in operations.of_intents(connection, [intent.id]) if one.id != ended.id]
        if intent.is_open and all(one.kind == "load" and not one.is_steered for one in others):
            operations.apply(connection, intent, change)
            operations.note_ended(connection, [intent.id])


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


def _new_alias(model: Model) -> Unavailable:
    """For requests that come before this frontend has read that the model is an alias."""
    error = Unavailable(
        f"cannot answer yet: {model.name} was just added; retry in a moment", code="model_loading", param="model"
    )
    error.retry_after_seconds = 1.0
    return error
