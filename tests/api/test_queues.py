"""Requests that wait for a full replica, as clients see them: an answer later, or a refusal before the first byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import msgspec
from tests.api.inference import CHAT, Client, Seen, World, plain, serving

from enginehouse.api.openai import OpenAI
from enginehouse.frontend.fleet.tokens import Caller
from enginehouse.frontend.serving.prefixes import Prefixes
from enginehouse.frontend.serving.queues import RequestQueues
from enginehouse.frontend.serving.route_rows import RouteRows
from enginehouse.frontend.serving.router import Router, RouterParts


class NarrowSite:
    """The real routes over a replica that answers one request at a time, and only when it is told to."""

    def __init__(self, world: World, go_on: asyncio.Semaphore, queues: RequestQueues) -> None:
        self.engine_requests = world.requests
        self.go_on = go_on
        parts = RouterParts(rows=RouteRows(), prefixes=Prefixes(lambda: 0.0), queues=queues)
        never = cast(Any, None)  # neither the store nor the loader is asked for a known route
        self.router = Router(never, never, wait_seconds=1.0, memory_seconds=1e9, parts=parts)
        route = msgspec.structs.replace(world.routing.routes[0], limit=1)
        self.router._routes = {"tiny": [route]}
        self.router._known = {route.id: route}
        self.router._looked_at = 0.0
        self.seen = Seen()
        self._api = OpenAI(self.router, world.engine, self.seen, head_seconds=5)

    async def ask(self, client: Client, token: str = "") -> None:
        client.scope["enginehouse.caller"] = Caller("user", "somebody", token_id=token)
        await self._api.at("/v1/chat/completions")(client.scope, client.receive, client.send)

    async def until_queued(self, number: int) -> None:
        async with asyncio.timeout(5):
            for _ in range(10_000_000):
                if self.router.in_flight and self.router.queues.lengths().get("tiny", 0) == number:
                    return
                await asyncio.sleep(0)


@asynccontextmanager
async def narrow(queues: RequestQueues) -> AsyncIterator[NarrowSite]:
    go_on = asyncio.Semaphore(0)

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.acquire()
        writer.write(plain(b"{}"))
        await writer.drain()

    async with serving(script) as world:
        yield NarrowSite(world, go_on, queues)


async def test_a_request_that_waited_is_answered_and_reaches_its_engine_only_then() -> None:
    async with narrow(RequestQueues()) as at:
        first, second = Client(CHAT), Client(CHAT)
        async with asyncio.TaskGroup() as group:
            group.create_task(at.ask(first))
            await at.until_queued(0)
            group.create_task(at.ask(second))
            await at.until_queued(1)
            assert second.sent == []
            at.go_on.release()
            at.go_on.release()
        assert (first.status, second.status) == (200, 200)
        assert len(at.engine_requests) == 2
        assert at.router.in_flight == 0


async def test_refusals_say_when_to_come_back_and_come_before_the_first_byte() -> None:
    async with narrow(RequestQueues(length=1, wait_seconds=0.05)) as at:
        first, late, full = Client(CHAT), Client(CHAT), Client(CHAT)
        async with asyncio.TaskGroup() as group:
            group.create_task(at.ask(first, "a"))
            await at.until_queued(0)
            waiting = group.create_task(at.ask(late, "a"))
            await at.until_queued(1)
            await at.ask(full, "a")
            await waiting
            at.go_on.release()
        assert (full.status, full.error["code"], full.headers[b"retry-after"]) == (429, "rate_limited", b"2")
        assert (late.status, late.error["code"], late.headers[b"retry-after"]) == (503, "resource_exhausted", b"10")
        assert all(str(one.error["message"]).startswith("cannot answer") for one in (full, late))
        assert len(at.engine_requests) == 1
        assert sorted(str(one["model"]) for one in at.seen.requests) == ["tiny"] * 3, "it is known, and has a label"


async def test_a_client_that_leaves_while_it_waits_takes_no_place() -> None:
    async with narrow(RequestQueues()) as at:
        first, leaving, third = Client(CHAT), Client(CHAT), Client(CHAT)
        async with asyncio.TaskGroup() as group:
            group.create_task(at.ask(first))
            await at.until_queued(0)
            group.create_task(at.ask(leaving))
            await at.until_queued(1)
            group.create_task(at.ask(third))
            await at.until_queued(2)
            leaving.left.set()
            await at.until_queued(1)
            at.go_on.release()
            at.go_on.release()
        assert (first.status, third.status, leaving.sent) == (200, 200, [])
        assert len(at.engine_requests) == 2
