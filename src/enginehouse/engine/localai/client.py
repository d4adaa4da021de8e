"""`ports.Engine` for engines that speak LocalAI's gRPC protocol: requests of OpenAI's API are translated to its calls.

One long-lived connection per engine carries all calls. A process serves exactly one model, which is loaded after its
start. A request is sent once. Closing a response early cancels its calls, which tells the engine to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, cast

from google.protobuf.message import DecodeError, Message
from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound, Upstream
from enginehouse.engine.localai import backend_pb2, generic
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.responses import StreamedResponse, WholeResponse
from enginehouse.engine.localai.status import GrpcError
from enginehouse.engine.localai.stream import GrpcStream
from enginehouse.ports import EngineCall, EngineResponse, EngineTarget

READY_SECONDS = 1.0
KEY_SECONDS = 2.0
WRONG_KEY = "not-the-key-of-any-replica"
UNAUTHENTICATED = 16
_REFUSALS = frozenset({7, UNAUTHENTICATED})  # PERMISSION_DENIED, UNAUTHENTICATED
_HEALTHY = b"OK"
# A stream may take as long as its client reads. The limit only ends calls that everybody has forgotten.
STREAM_SECONDS = 24 * 3600.0


class CallLimits(Struct, frozen=True):
    """`head_seconds` is the limit for a whole answer, and for the first message of a stream."""

    connect_seconds: float
    head_seconds: float


class LocalaiEngine:
    """A client for all engines of a program. Belongs to one event loop."""

    def __init__(self) -> None:
        self._client = GrpcClient()

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        limits = CallLimits(connect_seconds=connect_seconds, head_seconds=head_seconds)
        if call.path.startswith(generic.PREFIX):
            return await self._send_generic(call, limits)
        raise NotFound(f"cannot answer {call.path}: the engine of this model has no such call", code="unsupported")

    async def _send_generic(self, call: EngineCall, limits: CallLimits) -> EngineResponse:
        wanted = generic.read_call(call.path, call.body, call.served.identity if call.served is not None else "")
        first, *rest = wanted.requests
        stream = await self._client.start(_grpc_call(call, wanted.method, first, limits, is_last=not rest))
        with ExitStack() as unless_answered:
            unless_answered.callback(stream.cancel)
            for message in rest:
                await stream.send(message)
            await stream.end()
            messages = await _first_messages(stream, call.address, limits.head_seconds)
            unless_answered.pop_all()
        if wanted.is_stream:
            return StreamedResponse(generic.events(wanted, messages, stream), stream.cancel)
        stream.cancel()
        if not messages:
            raise Upstream(f"cannot read the answer of the engine at {call.address}: it has no message")
        return WholeResponse(200, generic.write_answer(wanted, messages[0]))

    async def is_ready(self, target: EngineTarget) -> bool:
        """Whether `Health` answers OK. An engine that is busy with a long call may answer later than the limit."""
        try:
            answer = await self._unary(target, "Health", backend_pb2.HealthMessage(), READY_SECONDS)
            return backend_pb2.Reply.FromString(answer).message == _HEALTHY
        except (EnginehouseError, DecodeError):
            return False

    async def checks_key(self, target: EngineTarget) -> bool:
        return await self._refuses(target.address, "") and await self._refuses(target.address, WRONG_KEY)

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        try:
            request = backend_pb2.ModelOptions(**cast(dict[str, Any], options))
        except (TypeError, ValueError) as error:
            raise Hopeless(f"the model's configuration has an invalid value: {error}", code="invalid_model") from error
        try:
            answer = await self._unary(target, "LoadModel", request, limit_seconds)
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

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        try:
            answer = await self._unary(target, "Free", backend_pb2.HealthMessage(), limit_seconds)
            return backend_pb2.Result.FromString(answer).success
        except (EnginehouseError, DecodeError):
            return False  # many engines have no such call

    async def close(self) -> None:
        await self._client.close()

    async def _refuses(self, address: str, key: str) -> bool:
        target = EngineTarget(address=address, key=key)
        try:
            await self._unary(target, "Health", backend_pb2.HealthMessage(), KEY_SECONDS)
        except GrpcError as error:
            return error.status in _REFUSALS
        except EnginehouseError:
            return False
        return False

    async def _unary(self, target: EngineTarget, method: str, message: Message, limit_seconds: float) -> bytes:
        call = GrpcCall(
            address=target.address,
            method=method,
            key=target.key,
            message=message.SerializeToString(),
            connect_seconds=limit_seconds,
            deadline_seconds=limit_seconds,
        )
        return await self._client.unary(call)


def _refused_load(error: GrpcError, limit_seconds: float) -> Hopeless:
    if error.code == "upstream_timeout":
        return _stalled(limit_seconds)
    if error.status in _REFUSALS:
        return Hopeless("the engine refuses its own key", code="load_failed")
    return Hopeless(f"the engine refused the model: {error.detail or error.message}", code="load_failed")


def _stalled(limit_seconds: float) -> Hopeless:
    return Hopeless(f"the engine did not load it within {limit_seconds:.0f} s", code="stalled")


def _grpc_call(call: EngineCall, method: str, message: bytes, limits: CallLimits, *, is_last: bool) -> GrpcCall:
    return GrpcCall(
        address=call.address,
        method=method,
        key=call.key,
        message=message,
        connect_seconds=limits.connect_seconds,
        deadline_seconds=STREAM_SECONDS,
        ends=is_last,
    )


async def _first_messages(stream: GrpcStream, address: str, limit_seconds: float) -> list[bytes]:
    try:
        async with asyncio.timeout(limit_seconds):
            return await stream.next_messages()
    except TimeoutError as error:
        raise Upstream(
            f"cannot get an answer from the engine at {address} within {limit_seconds:g} s", code="upstream_timeout"
        ) from error
