"""Updates replica rows, and the digests in model rows, after an intent ended or a report arrived.

Every function runs in the transaction that stores its cause, so intents and replica rows always agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from enginehouse.core.action import PullModel, RemoveModel, StartReplica, StopReplica
from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId
from enginehouse.core.intent import Intent, Outcome
from enginehouse.core.model import Model, contradiction
from enginehouse.core.replica import LOCALAI_GRPC, Replica, parse_process_key
from enginehouse.core.report import Report
from enginehouse.store import models, replicas
from enginehouse.store.db import Connection


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
        elif isinstance(action, PullModel) and outcome.pinned:
            models.pin(connection, action.model.name, outcome.pinned)
        elif isinstance(action, StopReplica):
            replicas.remove(connection, after.node_id, action.model, action.slot)
        elif isinstance(action, RemoveModel):
            replicas.remove_of_model(connection, after.node_id, action.model)
        _forget_stopped(connection, after.node_id, outcome.stopped)


def agreeing(connection: Connection, action: PullModel, outcome: Outcome) -> Outcome:
    """Return the outcome of a pull, or a failure if the node found another digest than the nodes before."""
    model = models.get(connection, action.model.name, lock=True)
    other = contradiction(model, outcome.pinned) if model is not None else ""
    if not other:
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


def forget_gone_replicas(connection: Connection, node_id: NodeId, report: Report) -> bool:
    """Remove the rows of processes that the worker no longer has. Returns whether there were any."""
    running = {(one.model_id, one.replica_index, one.nonce) for one in report.replicas}
    gone = [
        replica
        for replica, created_at in replicas.on_node(connection, node_id)
        # A row newer than the report may belong to a process that started after the report was taken.
        if (replica.model, replica.slot, replica.nonce) not in running and created_at <= report.mark
    ]
    for replica in gone:
        replicas.remove(connection, node_id, replica.model, replica.slot)
    return bool(gone)
