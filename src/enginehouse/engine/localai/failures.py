"""Errors of LocalAI's engines as ours.

Engines use status codes loosely, and some say what they mean in the text only. A replica that does not serve the model
of the request has done nothing for it, so its error has the code that makes a router try another replica.
"""

from __future__ import annotations

from enginehouse.core.errors import EnginehouseError, Invalid, Malformed, TooLarge, Unavailable, Upstream
from enginehouse.engine.localai import status

NOT_LOADED = "not_loaded"
ANOTHER_MODEL = "another_model"
MAX_MESSAGE = 500
_CONTEXT = ("exceeds the available context size", "context length", "context size", "context window")


def wrong_replica(code: int, message: str) -> str:
    """Why a replica cannot serve the model: `NOT_LOADED` (load again), `ANOTHER_MODEL` (the route is stale), or ""."""
    lowered = message.lower()
    if code == status.NOT_FOUND and "model identity mismatch" in lowered:
        return ANOTHER_MODEL
    if code == status.FAILED_PRECONDITION or "model not loaded" in lowered:
        return NOT_LOADED
    return ""


def is_unimplemented(code: int, message: str) -> bool:
    return code == status.UNIMPLEMENTED or (code == status.UNKNOWN and "unimplemented" in message.lower())


def failure_of(code: int, message: str, *, model: str, task: str) -> EnginehouseError:
    """The error for a gRPC status other than OK. `task` completes "its engine cannot …"."""
    said = " ".join(message.split())[:MAX_MESSAGE] or f"status {code} and no reason"
    match wrong_replica(code, message):
        case "another_model":
            return Unavailable(
                f"cannot use this replica of {model}: another model runs there", code="replica_unreachable"
            )
        case "not_loaded":
            return Unavailable(f"cannot use this replica of {model}: no model is loaded", code="replica_unreachable")
    if is_unimplemented(code, message):
        return Invalid(f"cannot {task} with {model}: its engine does not support it", code="unsupported", param="model")
    lowered = message.lower()
    if code in (status.INVALID_ARGUMENT, status.OUT_OF_RANGE, status.INTERNAL, status.UNKNOWN) and any(
        one in lowered for one in _CONTEXT
    ):
        return Malformed(f"cannot {task}: the request is too long for {model}: {said}", code="context_length_exceeded")
    if code in (status.INVALID_ARGUMENT, status.OUT_OF_RANGE):
        return Malformed(f"cannot {task}: the engine refused the request: {said}", code="invalid_request")
    if code == status.RESOURCE_EXHAUSTED:
        if "larger than max" in lowered or "message" in lowered:
            return TooLarge(f"cannot {task}: the request or its answer is too large for the engine: {said}")
        return Unavailable(f"cannot {task} now: the engine of {model} has no room: {said}. Ask again soon")
    if code == status.DEADLINE_EXCEEDED:
        return Upstream(f"cannot {task}: the engine did not answer in time", code="upstream_timeout")
    return Upstream(f"cannot {task}: the engine failed: {said}")
