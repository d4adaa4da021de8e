"""Updates replica rows, and the digests in model rows, after an intent ended or a report arrived.

Every function runs in the transaction that stores its cause, so intents and replica rows always agree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from enginehouse.core.action import PullModel, RemoveBackend, RemoveModel, StartReplica, StopReplica
from enginehouse.core.changes import changed_models
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import Model, contradiction
from enginehouse.core.node import Node
from enginehouse.core.reconcile import RECONCILER
from enginehouse.core.replica import (
    LOCALAI_GRPC,
    Replica,
    RunningReplica,
    is_process,
    parse_process_key,
    process_key,
)
from enginehouse.core.report import Report
from enginehouse.core.schedule import without_kept
from enginehouse.store import intents, load_infos, models, nodes, operations, replicas, reservations, supersession
from enginehouse.store.db import Connection

log = logging.getLogger(__name__)

Refusal = Callable[[Node, str], str]  # why the address of a replica must not be used; "" if it may


def follow(connection: Connection, after: Intent, now: float) -> None:
    """Update the replica rows after an intent changed."""
    outcome, action = after.outcome, after.action
    if after.state == "succeeded" and outcome is not None:
        if isinstance(action, StartReplica) and outcome.address:
            replica = Replica(
                node_id=after.node_id,
                model=action.model.name,
                slot=action.slot,
                revision=action.model.revision,
                address=outcome.address,
                nonce=outcome.nonce,
                backend=action.directory,
                key=action.key,
                checks_key=outcome.checks_key,
                protocol=outcome.protocol,
                definition=_definition(action.model) if outcome.protocol == LOCALAI_GRPC else "",
            )
            replicas.put(connection, replica, now)
        elif isinstance(action, StopReplica):
            replicas.remove(connection, after.node_id, action.model, action.slot)
        elif isinstance(action, RemoveModel):
            replicas.remove_of_model(connection, after.node_id, action.model)
        if isinstance(action, PullModel | RemoveModel):
            _note_files(connection, after)
        _forget_stopped(connection, after.node_id, outcome.stopped)
        if isinstance(action, RemoveBackend):
            _stop_wanting(connection, after.node_id, action)


def _stop_wanting(connection: Connection, node_id: NodeId, action: RemoveBackend) -> None:
    """Whoever deleted the engine of a model does not want it loaded there again: that would bring the engine back."""
    for info in load_infos.every(connection):
        model = models.get(connection, info.model) if info.kept else None
        if model is not None and model.backend in (action.backend, action.directory, action.called):
            load_infos.change(connection, info.model, lambda found: without_kept(found, node_id))
            for load in operations.steered(connection, info.model):
                if load.author == RECONCILER and load.targets == (node_id,):
                    operations.end_steering(connection, load.id, "superseded", "its engine was deleted")
                    reservations.remove(connection, load.id)


def _note_files(connection: Connection, after: Intent) -> None:
    """Keep what a frontend pushed to, or removed from, one of LocalAI's workers: their listings do not say it."""
    node = nodes.get(connection, after.node_id, lock=True)
    if node is not None and node.is_localai:
        held = changed_models(node.report, after)
        nodes.set_report(connection, node.id, msgspec.structs.replace(node.report, models=held), after.updated_at)


def adopt_restarted(connection: Connection, node: Node, report: Report, refusal: Refusal, now: float) -> bool:
    """Add the rows of processes that the worker started again by itself, and return whether there were any.

    Such a process has the request, and so the key, of the one that ended. It counts only while that request is the
    newest one for the replica and its model is served. The process that was started for the request itself never
    counts: a report that is late may show it after it was stopped.
    """
    if not report.replicas:
        return False
    known = {(one.model, one.slot, one.nonce) for one, _ in replicas.on_node(connection, node.id)}
    is_any = False
    for one in report.replicas:
        if (one.model_id, one.replica_index, one.nonce) in known or not one.nonce:
            continue
        subject = f"replica:{process_key(one.model_id, one.replica_index)}"
        if supersession.generation_at(connection, node.id, subject) != one.generation:
            continue
        intent = intents.of_generation(connection, node.id, subject, one.generation)
        if intent is None or not _has_started_another(intent, one) or models.get(connection, one.model_id) is None:
            continue
        if why := refusal(node, one.address):
            log.warning("replica.refused node=%s model=%s reason=%r", node.id, one.model_id, why)
            continue
        outcome = Outcome(address=one.address, nonce=one.nonce, checks_key=one.checks_key, protocol=one.protocol)
        follow(connection, msgspec.structs.replace(intent, outcome=outcome), now)
        log.info("replica.restarted node=%s model=%s address=%s", node.id, one.model_id, one.address)
        is_any = True
    return is_any


def _has_started_another(intent: Intent, one: RunningReplica) -> bool:
    started = intent.outcome
    return (
        intent.state == "succeeded"
        and isinstance(intent.action, StartReplica)
        and started is not None
        and started.nonce not in ("", one.nonce)
    )


def agreeing(connection: Connection, action: PullModel, outcome: Outcome) -> Outcome:
    """Return the outcome of a pull, or a failure if the node found another digest than the nodes before.

    What the first one found is stored at once: the next outcome may be settled together with it.
    """
    model = models.get(connection, action.model.name, lock=True)
    other = contradiction(model, outcome.pinned) if model is not None else ""
    if not other:
        models.pin(connection, action.model.name, outcome.pinned)
        return outcome
    message = (
        f"cannot use {other} of {action.model.name}: its source gave this node other bytes than the nodes before, so "
        "it was changed there; add the model again to use the new file"
    )
    return Outcome(code="digest_mismatch", message=message)


def _definition(model: Model) -> str:
    """The model without its files, which no request needs."""
    first = model.files[:1]
    return msgspec.json.encode(msgspec.structs.replace(model, files=first)).decode()


def _forget_stopped(connection: Connection, node_id: NodeId, keys: Sequence[str]) -> None:
    """Remove the rows of processes that an upgrade or a delete stopped, so that no request is routed there."""
    for key in keys:
        try:
            model, slot = parse_process_key(key)
        except Invalid:
            continue  # a name of the worker's own, without a row
        replicas.remove(connection, node_id, model, slot)


def forget_gone_replicas(connection: Connection, rows: Sequence[tuple[Replica, float]], report: Report) -> bool:
    """Remove those of the rows of a node whose processes the worker no longer has. Returns whether there were any."""
    gone = [
        replica
        for replica, created_at in rows
        # A row newer than the report may belong to a process that started after the report was taken.
        if created_at <= report.mark and not any(is_process(one, replica) for one in report.replicas)
    ]
    for replica in gone:
        replicas.remove(connection, replica.node_id, replica.model, replica.slot)
    return bool(gone)
