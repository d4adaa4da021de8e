"""The worker's side of registration and heartbeat, over HTTP.

The blocking client runs in threads, so that the event loop never waits for name resolution or a slow frontend. Every
call has one timeout for the whole exchange. Frontends are equal: an unreachable one is skipped, and the one that
answered is tried first the next time.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar
from urllib.parse import quote

from msgspec import Struct

from enginehouse.core.errors import Hopeless, Invalid, Malformed, NotFound, Unavailable, Upstream
from enginehouse.core.ids import NodeId
from enginehouse.core.node_api import ChallengeReply, HeartbeatReply, HeartbeatRequest, RegisterReply, RegisterRequest
from enginehouse.link.client import NOT_UNDERSTOOD, FrontendClient

LIMIT_SECONDS = 10.0  # one heartbeat interval: a slower call would miss the next one
ONE_OF_MANY_SECONDS = 3.0  # shorter if there are other frontends to try

T = TypeVar("T")


class _MessageReply(Struct):
    message: str = ""


class WorkerLink:
    """`ports.Link` over the clients of equal frontends, which carry the join token. A node that was approved registers
    by its key alone. A Go frontend issues no token per node: there the join token is the only one.
    """

    def __init__(self, *clients: FrontendClient) -> None:
        self._clients = list(clients)

    async def challenge(self, *, by_key: bool = False) -> str:
        """The challenge, or "" if the frontend has none, as LocalAI's.

        Any refusal counts as none. A frontend of ours that was only busy refuses the registration without a challenge,
        and the worker retries.
        """
        try:
            return (await self._post("/api/node/challenge", None, ChallengeReply, "" if by_key else None)).challenge
        except (NotFound, Hopeless, Invalid, Malformed):
            return ""
        except Unavailable as error:
            if error.code == NOT_UNDERSTOOD or isinstance(error, Upstream):
                return ""
            raise

    async def register(self, request: RegisterRequest, *, by_key: bool = False) -> RegisterReply:
        return await self._post("/api/node/register", request, RegisterReply, "" if by_key else None)

    async def heartbeat(self, node_id: NodeId, node_token: str, request: HeartbeatRequest) -> HeartbeatReply:
        path = f"/api/node/{quote(node_id, safe='')}/heartbeat"
        return await self._post(path, request, HeartbeatReply, node_token or None)

    async def deregister(self, node_id: NodeId, node_token: str) -> None:
        await self._post(f"/api/node/{quote(node_id, safe='')}/deregister", None, _MessageReply, node_token or None)

    def local_address(self) -> str:
        return self._clients[0].local_address()

    async def _post(self, path: str, body: Struct | None, kind: type[T], token: str | None) -> T:
        refused: Unavailable | None = None
        for _ in range(len(self._clients)):
            try:
                return await self._ask(self._clients[0], path, body, kind, token)
            except Unavailable as error:
                refused = refused or error
                self._clients.append(self._clients.pop(0))
        assert refused is not None
        raise refused

    async def _ask(self, client: FrontendClient, path: str, body: Struct | None, kind: type[T], token: str | None) -> T:
        limit = LIMIT_SECONDS if len(self._clients) == 1 else ONE_OF_MANY_SECONDS
        try:
            # The client's timeout is per read and write; this one covers the whole exchange, so a frontend that answers
            # byte by byte ends too.
            async with asyncio.timeout(limit + 1):
                return await asyncio.to_thread(
                    client.request, "POST", path, body, kind, token=token, timeout_seconds=limit
                )
        except TimeoutError as error:
            raise Unavailable(
                f"cannot get an answer from the frontend at {client.url} within {limit:.0f} s",
                code="frontend_unreachable",
            ) from error
