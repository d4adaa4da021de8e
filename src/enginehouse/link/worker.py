"""A worker's side of registration and heartbeat, over HTTP.

The blocking client runs in threads, so that the event loop never waits for name resolution or a slow
frontend. Every call has one limit for the whole exchange; what happens after it (again, later, elsewhere) is
the worker's decision.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar
from urllib.parse import quote

from msgspec import Struct

from enginehouse.core.errors import Unavailable
from enginehouse.core.wire import HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.link.client import FrontendClient

LIMIT_SECONDS = 10.0  # one heartbeat interval: a call that takes longer has missed the next one already

T = TypeVar("T")


class _Said(Struct):
    message: str = ""


class WorkerLink:
    """`ports.Link` on a `FrontendClient` whose own token is the join token."""

    def __init__(self, client: FrontendClient) -> None:
        self._client = client

    async def register(self, request: RegisterRequest) -> RegisterReply:
        return await self._post("/api/node/register", request, RegisterReply, None)

    async def heartbeat(self, node_id: str, node_token: str, request: HeartbeatRequest) -> HeartbeatReply:
        return await self._post(f"/api/node/{quote(node_id, safe='')}/heartbeat", request, HeartbeatReply, node_token)

    async def deregister(self, node_id: str, node_token: str) -> None:
        await self._post(f"/api/node/{quote(node_id, safe='')}/deregister", None, _Said, node_token)

    def local_address(self) -> str:
        return self._client.local_address()

    async def _post(self, path: str, body: Struct | None, kind: type[T], token: str | None) -> T:
        try:
            # The client's limit is per read and write; this one is for the whole, so a frontend that answers
            # byte by byte ends too.
            async with asyncio.timeout(LIMIT_SECONDS + 1):
                return await asyncio.to_thread(
                    self._client.request, "POST", path, body, kind, token=token, timeout_seconds=LIMIT_SECONDS
                )
        except TimeoutError as error:
            raise Unavailable(
                f"cannot get an answer from the frontend at {self._client.url} within {LIMIT_SECONDS:.0f} s",
                code="frontend_unreachable",
            ) from error
