"""Calls to a process of LocalAI's protocol that are not requests of a client: health, key, load and release of a model.

A process serves exactly one model, which is loaded after its start. What an engine says about a failed load is kept,
because it names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from google.protobuf.message import DecodeError, Message

from enginehouse.core.errors import EnginehouseError, Hopeless, Upstream
from enginehouse.engine.localai import backend_pb2
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.status import PERMISSION_DENIED, UNAUTHENTICATED, GrpcError
from enginehouse.ports import EngineTarget

READY_SECONDS = 1.0
KEY_SECONDS = 2.0
WRONG_KEY = "not-the-key-of-any-replica"
_REFUSALS = frozenset({PERMISSION_DENIED, UNAUTHENTICATED})
_HEALTHY = b"OK"


async def is_ready(client: GrpcClient, target: EngineTarget) -> bool:
    """Whether `Health` answers OK. An engine that is busy with a long call may answer later than the limit."""
    try:
        answer = await _unary(client, target, "Health", backend_pb2.HealthMessage(), READY_SECONDS)
        return backend_pb2.Reply.FromString(answer).message == _HEALTHY
    except (EnginehouseError, DecodeError):
        return False


async def checks_key(client: GrpcClient, target: EngineTarget) -> bool:
    return await _refuses(client, target.address, "") and await _refuses(client, target.address, WRONG_KEY)


async def load(
    client: GrpcClient, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float
) -> None:
    try:
        request = backend_pb2.ModelOptions(**cast(dict[str, Any], options))
    except (TypeError, ValueError) as error:
        raise Hopeless(f"the model's configuration has an invalid value: {error}", code="invalid_model") from error
    try:
        answer = await _unary(client, target, "LoadModel", request, limit_seconds)
        result = backend_pb2.Result.FromString(answer)
    except GrpcError as error:
        raise _refused_load(error, limit_seconds) from error
    except DecodeError as error:
        raise Hopeless("the engine answered with a message that cannot be read", code="load_failed") from error
    except Upstream as error:
        if error.code == "upstream_timeout":
            raise _stalled(limit_seconds) from error
        raise
    if not result.success:
        reason = result.message or "it gave no reason"
        raise Hopeless(f"the engine refused the model: {reason}", code="load_failed")


async def free(client: GrpcClient, target: EngineTarget, *, limit_seconds: float) -> bool:
    try:
        answer = await _unary(client, target, "Free", backend_pb2.HealthMessage(), limit_seconds)
        return backend_pb2.Result.FromString(answer).success
    except (EnginehouseError, DecodeError):
        return False  # many engines have no such call


async def _refuses(client: GrpcClient, address: str, key: str) -> bool:
    target = EngineTarget(address=address, key=key)
    try:
        await _unary(client, target, "Health", backend_pb2.HealthMessage(), KEY_SECONDS)
    except GrpcError as error:
        return error.status in _REFUSALS
    except EnginehouseError:
        return False
    return False


async def _unary(
    client: GrpcClient, target: EngineTarget, method: str, message: Message, limit_seconds: float
) -> bytes:
    call = GrpcCall(
        address=target.address,
        method=method,
        key=target.key,
        message=message.SerializeToString(),
        connect_seconds=limit_seconds,
        deadline_seconds=limit_seconds,
    )
    return await client.unary(call)


def _refused_load(error: GrpcError, limit_seconds: float) -> Hopeless:
    if error.code == "upstream_timeout":
        return _stalled(limit_seconds)
    if error.status in _REFUSALS:
        return Hopeless("the engine refuses its own key", code="load_failed")
    return Hopeless(f"the engine refused the model: {error.detail or error.message}", code="load_failed")


def _stalled(limit_seconds: float) -> Hopeless:
    return Hopeless(f"the engine did not load it within {limit_seconds:.0f} s", code="stalled")
