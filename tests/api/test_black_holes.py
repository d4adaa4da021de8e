"""F-064: a node whose packets are dropped without a word. The request moves to another replica within the time for a
connection, and nothing piles up. Engines of both protocols.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import psutil
from tests.api.inference import CHAT, Client, answering, plain, serving
from tests.api.test_localai_engines import Stubs, stubs

from enginehouse.api.openai import CONNECT_SECONDS

AT_ONCE = 20


@contextmanager
def black_hole() -> Iterator[str]:
    """An address where connections are neither accepted nor refused: a listener whose queue is full drops packets."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_a_request_leaves_a_silent_node_of_an_http_engine_in_time() -> None:
    with black_hole() as hole:
        async with serving(answering(plain(b"{}")), before=(int(hole.rpartition(":")[2]),)) as world:
            began = time.monotonic()
            client = await world.ask(Client(CHAT))
            assert client.status == 200
            assert time.monotonic() - began < CONNECT_SECONDS + 1.0
            assert [route.slot for route in world.routing.dropped] == [0]


async def _answered(world: Stubs, client: Client) -> None:
    await world.api.at("/v1/chat/completions")(client.scope, client.receive, client.send)


async def test_requests_leave_a_silent_node_of_a_grpc_engine_in_time_and_nothing_piles_up(tmp_path: Path) -> None:
    with black_hole() as hole:
        async with stubs(tmp_path) as world:
            await world.add()
            (working,) = world.routing.routes
            silent = msgspec.structs.replace(working, address=hole, slot=7)
            world.routing.routes.insert(0, silent)
            assert (await world.ask()).status == 200
            world.routing.dropped.clear()
            before = psutil.Process().num_fds()
            began = time.monotonic()
            clients = [Client(b'{"model":"m","messages":[{"role":"user","content":"Go"}]}') for _ in range(AT_ONCE)]
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(_answered(world, client))
            assert time.monotonic() - began < CONNECT_SECONDS + 3.0
            assert {client.status for client in clients} == {200}
            assert silent in world.routing.dropped
            assert world.routing.held == 0
            assert psutil.Process().num_fds() <= before + 1
