"""The logs of the frontend and of NATS over HTTP: for admins, bounded, followed until the frontend stops."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.whole_frontend import Site, site

from enginehouse.api.serving import serve


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as made:
        yield made


async def test_the_last_lines_are_read_by_admins_only(here: Site, tmp_path: Path) -> None:
    (tmp_path / "frontend.log").write_text("one\ntwo token=abcdefgh\n")
    answer = await here.ask("GET", "/api/logs/frontend?lines=1", token=here.tokens["admin"])
    assert (answer.status, [line["text"] for line in answer.json]) == (200, ["two token=[hidden]"])
    for role in ("viewer", "user", "join", ""):
        assert (await here.ask("GET", "/api/logs/frontend", token=here.tokens[role])).status in (401, 403)


async def test_what_is_not_kept_here_and_what_there_is_not_are_said(here: Site) -> None:
    missing = await here.ask("GET", "/api/logs/nats", token=here.tokens["admin"])
    assert (missing.status, "where it runs" in missing.error["message"]) == (404, True)
    unknown = await here.ask("GET", "/api/logs/..%2Fadmin.token", token=here.tokens["admin"])
    assert unknown.status == 404
    other = await here.ask("GET", "/api/logs/other", token=here.tokens["admin"])
    assert (other.status, "there are frontend, nats" in other.error["message"]) == (404, True)
    assert (await here.ask("GET", "/api/logs/frontend?lines=x", token=here.tokens["admin"])).status in (404, 422)


async def test_a_follower_gets_lines_as_they_come_and_ends_with_the_frontend(here: Site, tmp_path: Path) -> None:
    log = tmp_path / "frontend.log"
    log.write_text("first\n")
    listener = socket.create_server(("127.0.0.1", 0))
    app = here.app(is_loopback=False)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(
            serve(app, listener, {}, on_notice=here.wakes.note_stop, on_stop=lambda: None, linger_seconds=0.0)
        )
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        head = "GET /api/logs/frontend?follow=1 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        writer.write(f"{head}authorization: Bearer {here.tokens['admin']}\r\n\r\n".encode())
        await reader.readuntil(b'"first"')
        with log.open("a") as file:
            file.write("second\n")
        await reader.readuntil(b'"second"')
        began = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        await reader.read()
        assert asyncio.get_running_loop().time() - began < 5
        writer.close()
