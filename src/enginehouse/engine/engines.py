"""`ports.Engine` for every kind of engine: chooses the client by the protocol of the process.

To the rest of the program every engine speaks OpenAI's HTTP API. `openai` passes bytes, `localai` translates to gRPC.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from enginehouse.core.replica import EngineProtocol
from enginehouse.engine.openai.client import HttpEngine
from enginehouse.ports import Engine, EngineCall, EngineResponse, EngineTarget

FetchMedia = Callable[[str], Awaitable[bytes]]


class Engines:
    """All engines of a program. Belongs to one event loop."""

    def __init__(self, fetch_media: FetchMedia | None = None) -> None:
        """`fetch_media` gets pictures that a request names by URL, for engines that take bytes."""
        self._fetch_media = fetch_media
        self._by_protocol: dict[EngineProtocol, Engine] = {"openai-http": HttpEngine()}

    def _of(self, protocol: EngineProtocol) -> Engine:
        known = self._by_protocol.get(protocol)
        if known is None:
            # Here, because importing protobuf takes a twentieth of a frontend's start, and not all have such engines.
            from enginehouse.engine.localai.client import LocalaiEngine

            known = self._by_protocol[protocol] = LocalaiEngine(self._fetch_media)
        return known

    async def send(self, call: EngineCall, *, connect_seconds: float, head_seconds: float) -> EngineResponse:
        engine = self._of(call.protocol)
        return await engine.send(call, connect_seconds=connect_seconds, head_seconds=head_seconds)

    async def is_ready(self, target: EngineTarget) -> bool:
        return await self._of(target.protocol).is_ready(target)

    async def checks_key(self, target: EngineTarget) -> bool:
        return await self._of(target.protocol).checks_key(target)

    async def load(self, target: EngineTarget, options: Mapping[str, object], *, limit_seconds: float) -> None:
        await self._of(target.protocol).load(target, options, limit_seconds=limit_seconds)

    async def free(self, target: EngineTarget, *, limit_seconds: float) -> bool:
        return await self._of(target.protocol).free(target, limit_seconds=limit_seconds)

    def forget(self, address: str) -> None:
        for engine in self._by_protocol.values():
            engine.forget(address)

    async def close(self) -> None:
        for engine in self._by_protocol.values():
            await engine.close()
