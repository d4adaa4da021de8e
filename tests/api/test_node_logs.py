"""Logs of engines through the frontend: from a real worker's server, with a ticket, only from the node itself."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nacl.signing import SigningKey
from tests.api.whole_frontend import Site, site
from tests.frontend.world import signed
from tests.worker.http_server import door
from tests.worker.http_server.door import Door
from tests.worker.world import until

from enginehouse.api.serving import serve
from enginehouse.store import db


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Door]:
    async with door.opened(tmp_path / "worker") as made:
        path = tmp_path / "engine.log"
        path.write_text("first\nsecond\n")
        made.logs.began("org/m#0", path)
        made.logs.look()
        yield made


async def join(here: Site, worker: Door, http_host: str = "127.0.0.1") -> None:
    key = SigningKey(hashlib.sha256(b"attic").digest())
    nodes = here.frontend.nodes
    asked = signed(
        "attic",
        key,
        challenge=await nodes.challenge(),
        address=f"127.0.0.1:{door.BASE_PORT}",
        http_address=f"{http_host}:{worker.port}",
    )
    registered = await nodes.register(asked)
    if not registered.node.approved:
        await nodes.approve("attic")
    worker.server.joined(door.node(registered.token))
    worker.server.heard(await here.frontend.store.transaction(db.now), is_bus_away=False)


async def test_an_operator_reads_the_last_lines_of_an_engine(here: Site, worker: Door) -> None:
    await join(here, worker)
    answer = await here.ask("GET", "/api/nodes/attic/logs/org/m", token=here.tokens["admin"])
    assert (answer.status, [line["text"] for line in answer.json]) == (200, ["first", "second"])
    answer = await here.ask("GET", "/api/nodes/attic/logs/org/m?lines=1", token=here.tokens["admin"])
    assert [line["text"] for line in answer.json] == ["second"]
    assert (await here.ask("GET", "/api/nodes/attic/logs/org/m?lines=x", token=here.tokens["admin"])).status == 422
    assert (await here.ask("GET", "/api/nodes/attic/logs/org/m", token=here.tokens["join"])).status in (401, 403)
    assert (await here.ask("GET", "/api/nodes/nobody/logs/org/m", token=here.tokens["admin"])).status == 404


async def test_an_admin_reads_the_log_of_a_worker_and_a_viewer_does_not(
    here: Site, worker: Door, tmp_path: Path
) -> None:
    await join(here, worker)
    (tmp_path / "worker" / "worker.log").write_text("one\ntwo\n")
    answer = await here.ask("GET", "/api/nodes/attic/worker-log?lines=1", token=here.tokens["admin"])
    assert (answer.status, [line["text"] for line in answer.json]) == (200, ["two"])
    assert (await here.ask("GET", "/api/nodes/attic/worker-log", token=here.tokens["viewer"])).status == 403
    assert (await here.ask("GET", "/api/nodes/nobody/worker-log", token=here.tokens["admin"])).status == 404


async def test_a_worker_of_an_older_version_keeps_no_log_for_others(here: Site, worker: Door) -> None:
    await join(here, worker)
    worker.server._logs._program_log = None
    answer = await here.ask("GET", "/api/nodes/attic/worker-log", token=here.tokens["admin"])
    assert (answer.status, "upgrade the worker" in answer.error["message"]) == (404, True)


async def test_a_follower_gets_lines_as_they_come_until_it_leaves(here: Site, worker: Door, tmp_path: Path) -> None:
    await join(here, worker)
    listener = socket.create_server(("127.0.0.1", 0))
    app = here.app(is_loopback=False)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(serve(app, listener, {}, on_notice=lambda: None, on_stop=lambda: None, linger_seconds=0.0))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = "GET /api/nodes/attic/logs/org/m?follow=1&lines=1 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        writer.write(f"{head}authorization: Bearer {here.tokens['admin']}\r\n\r\n".encode())
        assert b"text/event-stream" in await reader.readuntil(b"\r\n\r\n")
        seen = await reader.readuntil(b'"second"')
        assert b'"first"' not in seen
        with (tmp_path / "engine.log").open("ab") as log:
            log.write(b"third\n")
        worker.logs.look()
        await reader.readuntil(b'"third"')
        assert worker.server._logs._followers == 1
        writer.close()
        await until(lambda: worker.server._logs._followers == 0)
        os.kill(os.getpid(), signal.SIGTERM)


async def test_the_token_before_is_tried_where_the_worker_has_not_got_the_new_one(here: Site, worker: Door) -> None:
    await join(here, worker)
    node, _ = await here.frontend.nodes.get("attic")
    token = worker.server._options.token.current
    await here.frontend.nodes.rotate_token(node.id, token)
    answer = await here.ask("GET", "/api/nodes/attic/logs/org/m", token=here.tokens["admin"])
    assert answer.status == 200


async def test_a_worker_that_names_another_machine_or_is_gone_is_not_asked(here: Site, worker: Door) -> None:
    await join(here, worker, http_host="127.0.0.2")
    answer = await here.ask("GET", "/api/nodes/attic/logs/org/m", token=here.tokens["admin"])
    assert (answer.status, "approved address" in answer.error["message"]) == (503, True)
    await join(here, worker)
    await worker.server.close()
    answer = await here.ask("GET", "/api/nodes/attic/logs/org/m", token=here.tokens["admin"])
    assert (answer.status, "does not answer" in answer.error["message"]) == (503, True)
