"""`ports.Engine` for engines that speak LocalAI's gRPC protocol: health, key, load and release of a model.

One long-lived connection per engine carries all calls. A process serves exactly one model, which is loaded after its
start. What an engine says about a failed load is kept, because it names the cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from google.protobuf.message import Message

from enginehouse.core.errors import EnginehouseError, Hopeless, Upstream
from enginehouse.engine.localai import backend_pb2 as messages
from enginehouse.engine.localai.channel import GrpcCall, GrpcClient
from enginehouse.engine.localai.status import GrpcError
from enginehouse.ports import EngineTarget

READY_SECONDS = 1.0
KEY_SECONDS = 2.0
WRONG_KEY = "not-the-key-of-any-replica"
UNAUTHENTICATED = 16
_REFUSALS = frozenset({7, UNAUTHENTICATED})  # PERMISSION_DENIED, UNAUTHENTICATED
_HEALTHY = b"OK"


class LocalaiEngine:
    """A client for all engines of a program. Belongs to one event loop."""

    def __init__(self) -> None:
        self._client = GrpcClient()

    async def is_ready(self, target: EngineTarget) -> bool:
        """Whether `Health` answers OK. An engine that is busy with a long call may answer later than the limit."""
        try:
            answer = await self._unary(target, "Health", messages.HealthMessage(), READY_SECONDS)
            return messages.Reply.FromString(answer).message == _HEALTHY
        except (EnginehouseError, ValueError):
            return False

    async def checks_key(self, target: EngineTarget) -> bool:
        return await self._refuses(target.address, "") and await self._refuses(target.address, WRONG_KEY)

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        try:
            request = messages.ModelOptions(**cast(dict[str, Any], options))
        except (TypeError, ValueError) as error:
            raise Hopeless(f"the model's configuration has an invalid value: {error}", code="invalid_model") from error
        try:
            answer = await self._unary(target, "LoadModel", request, limit_seconds)
            result = messages.Result.FromString(answer)
        except GrpcError as error:
            if error.status in _REFUSALS:
                raise Hopeless("the engine refuses its own key", code="load_failed") from error
            raise Hopeless(f"the engine refused the model: {error.detail or error.message}", code="load_failed") from error
        except ValueError as error:
            raise Hopeless("the engine answered with a message that cannot be read", code="load_failed") from error
        except Upstream as error:
            if error.code == "upstream_timeout":
                limit = f"the engine did not load it within {limit_seconds:.0f} s"
                raise Hopeless(limit, code="stalled") from error
            raise
        if not result.success:
            reason = result.message or "it gave no reason"
            raise Hopeless(f"the engine refused the model: {reason}", code="load_failed")

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        try:
            answer = await self._unary(target, "Free", messages.HealthMessage(), limit_seconds)
            return messages.Result.FromString(answer).success
        except (EnginehouseError, ValueError):
            return False  # many engines have no such call

    async def close(self) -> None:
        await self._client.close()

    async def _refuses(self, address: str, key: str) -> bool:
        target = EngineTarget(address=address, key=key)
        try:
            await self._unary(target, "Health", messages.HealthMessage(), KEY_SECONDS)
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
