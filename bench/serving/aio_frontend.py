"""The same frontend with grpc.aio as its gRPC client, for comparison in bench/serve.py; never part of the product.

python bench/serving/aio_frontend.py --data DIR frontend …
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from enginehouse.cli.main import main
from enginehouse.engine.localai import client
from enginehouse.engine.localai.channel import SERVICE_PATH, GrpcCall


class AioStream:
    """One message at a time, which is all that grpc.aio gives."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages = call.__aiter__()

    async def next_messages(self) -> list[bytes]:
        try:
            return [await self._messages.__anext__()]
        except StopAsyncIteration:
            return []

    def cancel(self) -> None:
        self._call.cancel()


class AioClient:
    def __init__(self) -> None:
        self._channels: dict[str, Any] = {}

    def _channel(self, address: str) -> Any:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address)
        return self._channels[address]

    async def start(self, call: GrpcCall) -> AioStream:
        method = self._channel(call.address).unary_stream(SERVICE_PATH + call.method)
        return AioStream(method(call.message, timeout=call.deadline_seconds))

    async def unary(self, call: GrpcCall) -> bytes:
        method = self._channel(call.address).unary_unary(SERVICE_PATH + call.method)
        answer: bytes = await method(call.message, timeout=call.deadline_seconds)
        return answer

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


if __name__ == "__main__":
    setattr(client, "GrpcClient", AioClient)  # noqa: B010  # not a name that the module exports
    main()
