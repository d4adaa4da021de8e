"""Logs of engines over HTTP: LocalAI's shapes, by time, live, without secrets, and for nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import pytest
from tests.worker.http_server import door
from tests.worker.http_server.door import TOKEN, Door, opened

from enginehouse.core.log_line import REDACTED, redacted
from enginehouse.core.ticket import LIFE_SECONDS, TOLERANCE_SECONDS, make_ticket, ticket_key
from enginehouse.worker.engines.logs import MAX_LINES, EngineLogs


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path) as made:
        yield made


def write(files: Door, tmp_path: Path, key: str, text: str) -> None:
    path = tmp_path / f"{key.replace('#', '-')}.log"
    if not files.logs.lines(key):
        files.logs.began(key, path, ("the-key-of-the-replica",))
    with path.open("a") as log:
        log.write(text)
    files.logs.look()


async def test_lines_have_localai_s_shape_and_replicas_are_merged_by_time(files: Door, tmp_path: Path) -> None:
    write(files, tmp_path, "m#0", "first\n")
    write(files, tmp_path, "m#1", "second\n")
    write(files, tmp_path, "m#0", "third\nhalf a li")
    write(files, tmp_path, "other#0", "something else\n")
    assert (await files.ask("GET", "/v1/backend-logs")).json == ["m", "other"]
    lines = (await files.ask("GET", "/v1/backend-logs/m")).json
    assert [line["text"] for line in lines] == ["first", "second", "third"]
    assert {frozenset(line) for line in lines} == {frozenset({"timestamp", "stream", "text"})}
    assert {line["stream"] for line in lines} <= {"stdout", "stderr"}
    assert lines == sorted(lines, key=lambda line: line["timestamp"])
    one = (await files.ask("GET", "/v1/backend-logs/m%231")).json
    assert [line["text"] for line in one] == ["second"]
    last = (await files.ask("GET", "/v1/backend-logs/m?lines=1")).json
    assert [line["text"] for line in last] == ["third"]


async def test_a_socket_gets_what_was_there_and_then_every_line(files: Door, tmp_path: Path) -> None:
    write(files, tmp_path, "m#0", "before\n")
    url = f"http://127.0.0.1:{files.port}/v1/backend-logs/m/ws"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with asyncio.timeout(10), aiohttp.ClientSession() as session:
        async with session.ws_connect(url, headers=headers) as socket:
            first = await socket.receive_json()
            assert (first["type"], [line["text"] for line in first["lines"]]) == ("initial", ["before"])
            write(files, tmp_path, "m#0", "after\n")
            then = await socket.receive_json()
            assert (then["type"], then["line"]["text"]) == ("line", "after")


async def test_a_follower_gets_events_until_the_server_ends(files: Door, tmp_path: Path) -> None:
    write(files, tmp_path, "m#0", "before\n")
    url = f"http://127.0.0.1:{files.port}/v1/backend-logs/m?follow=1"
    async with asyncio.timeout(10), aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        async with session.get(url) as answer:
            assert answer.content_type == "text/event-stream"
            assert b"before" in await answer.content.readuntil(b"\n\n")
            write(files, tmp_path, "m#0", "after\n")
            assert b"after" in await answer.content.readuntil(b"\n\n")
            began = time.monotonic()
            await files.server.close()
            await answer.content.read()
            assert time.monotonic() - began < 5


async def test_a_ticket_of_this_node_opens_its_logs_for_a_while_and_no_files(files: Door) -> None:
    files.server.joined(door.node("token-of-this-node"))
    files.server.heard(1000.0, is_bus_away=False)
    key = ticket_key("token-of-this-node")
    good = make_ticket(key, "logs", 1000.0)
    assert (await files.ask("GET", "/v1/backend-logs", token=good)).status == 200
    assert (await files.ask("GET", "/v1/files/models/a", token=good)).status == 401
    expired = make_ticket(key, "logs", 1000.0 - LIFE_SECONDS - TOLERANCE_SECONDS - 5)
    far = make_ticket(key, "logs", 1000.0 + TOLERANCE_SECONDS + 60)
    foreign = make_ticket(ticket_key("token-of-another-node"), "logs", 1000.0)
    other = make_ticket(key, "files", 1000.0)
    for ticket in (expired, far, foreign, other, good[:-1], "ehticket..", "ehticket.x.y", TOKEN, "", key):
        assert (await files.ask("GET", "/v1/backend-logs", token=ticket)).status == 401, ticket
    files.server.joined(door.node("the-next-token"))
    assert (await files.ask("GET", "/v1/backend-logs", token=good)).status == 200, "its frontend may not know yet"


async def test_the_log_of_the_worker_itself_needs_a_ticket_for_it(files: Door, tmp_path: Path) -> None:
    (tmp_path / "worker.log").write_text(f"2026-01-01T00:00:00 INFO a\nb {TOKEN}\n")
    assert (await files.ask("GET", "/v1/worker-log")).status == 401, "the join token opens no logs of programs"
    files.server.joined(door.node("token-of-this-node"))
    files.server.heard(1000.0, is_bus_away=False)
    key = ticket_key("token-of-this-node")
    assert (await files.ask("GET", "/v1/worker-log", token=make_ticket(key, "logs", 1000.0))).status == 401
    good = make_ticket(key, "program-log", 1000.0)
    lines = (await files.ask("GET", "/v1/worker-log?lines=5", token=good)).json
    assert [line["text"] for line in lines] == ["INFO a", f"b {REDACTED}"]
    assert (await files.ask("GET", "/v1/backend-logs", token=good)).status == 401


async def test_secrets_never_leave_the_worker(files: Door, tmp_path: Path) -> None:
    write(files, tmp_path, "m#0", f"key the-key-of-the-replica token {TOKEN}\n")
    (line,) = (await files.ask("GET", "/v1/backend-logs/m")).json
    assert line["text"] == f"key {REDACTED} token {REDACTED}"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "Authorization: Bearer abc.def-123",
            "proxy http://me:hunter22@host/",
            "api_key=abcdefgh",
            "HF hf_abcdefghij",
        ),
        *('{"password": "hunter22"}', "postgres://u:hunter22@db/x", "token: abcdefghij", "--api-key sk-abcdefghij"),
    ],
)
def test_what_looks_like_a_secret_is_hidden(text: str) -> None:
    shown = redacted(text, ())
    assert REDACTED in shown
    for secret in ("abc.def", "hunter22", "abcdefgh"):
        assert secret not in shown


def test_a_plain_line_stays_as_it_is() -> None:
    for text in ("loaded 12 layers in 3.4 s", "GET http://127.0.0.1:80/x 200", "n_tokens = 512, token 5"):
        assert redacted(text, ()) == text


def test_rings_are_bounded_survive_their_process_and_follow_truncation(tmp_path: Path) -> None:
    logs, path = EngineLogs(), tmp_path / "log"
    logs.began("m#0", path)
    path.write_text("".join(f"line {number}\n" for number in range(3 * MAX_LINES)))
    logs.look()
    assert len(logs.lines("m")) == MAX_LINES
    assert logs.lines("m")[-1].text == f"line {3 * MAX_LINES - 1}"
    path.write_text("short\n")
    logs.look()
    assert logs.lines("m")[-1].text == "short"
    path.unlink()
    logs.look()
    assert logs.lines("m")[-1].text == "short"
    path.write_bytes(b"x" * 5_000_000 + b"\nend\n")
    logs.look()
    assert logs.lines("m")[-1].text == "end"
    assert max(len(line.text) for line in logs.lines("m")) <= 4096


def test_lines_keep_their_order_when_the_clock_steps_back_or_hits_a_whole_second(tmp_path: Path) -> None:
    times = [datetime(2026, 1, 1, 0, 0, 5, micros, UTC) for micros in (0, 1, 0, 2)]
    logs, path = EngineLogs(clock=lambda: times.pop(0)), tmp_path / "log"
    logs.began("m#0", path)
    path.write_text("a\nb\nc\nd\n")
    logs.look()
    assert [line.text for line in logs.lines("m")] == ["a", "b", "c", "d"]
