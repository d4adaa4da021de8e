"""What requests that wait for a load are told of it: how far it is, or why it ended.

Reads only. A load that failed is no reason to refuse requests for long: how long depends on its cause.
"""

from __future__ import annotations

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.intent import OPEN
from enginehouse.core.operation import Operation
from enginehouse.core.pace import ServingPace
from enginehouse.core.views import OperationView
from enginehouse.store import db, operations
from enginehouse.store.db import Connection

# How long requests get the error of a failed load after a temporary cause: a node that was away may be back by the time
# that it is read.
SHORT_COOL_DOWN_SECONDS = 1.0
_TEMPORARY = frozenset({"insufficient_capacity", "worker_restarted", "upstream_error"})
# A load that ended so did not fail, and is no reason to refuse the next request.
NO_FAILURE = frozenset({"cancelled", "superseded"})
_STATES = {"install_backend": "installing", "pull_model": "staging", "start_replica": "loading"}
_NO_BYTES: dict[str, object] = {"bytes_sent": 0, "total_bytes": 0, "file_index": 0, "total_files": 0}


def progress_of(view: OperationView) -> dict[str, object]:
    """The `loading` object of a 503."""
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


def ended_ago(connection: Connection, operation: Operation) -> float:
    """Return the seconds since the last change of an ended load."""
    intents = operations.intents_of(connection, [operation.id])[operation.id]
    return db.now(connection) - max([operation.created_at, *(intent.updated_at for intent in intents)])


def failure_of(connection: Connection, operation: Operation, pace: ServingPace) -> tuple[EnginehouseError, float]:
    """Return the error of a load that ended without a replica, and for how many seconds requests get it.

    The time is short if the cause is temporary or the worker reported that it can heal.
    """
    if operation.error_code in NO_FAILURE:
        ended = Unavailable(
            f"cannot answer yet: the load of {operation.name} was {operation.error_code}; retry the request",
            code=operation.error_code,
            param="model",
        )
        ended.retry_after_seconds = SHORT_COOL_DOWN_SECONDS
        return ended, pace.cool_down_seconds
    intents = operations.intents_of(connection, [operation.id])[operation.id]
    causes = [one.outcome for one in intents if one.state == "failed" and one.reason == operation.error_code]
    heals = bool(causes) and all(outcome is not None and outcome.can_heal for outcome in causes)
    error: EnginehouseError
    if heals or operation.error_code in _TEMPORARY:
        error = Unavailable(operation.error_message, code=operation.error_code)
        error.retry_after_seconds = SHORT_COOL_DOWN_SECONDS
    else:
        error = Hopeless(operation.error_message, code=operation.error_code)
        error.retry_after_seconds = pace.cool_down_seconds
    return error, error.retry_after_seconds
