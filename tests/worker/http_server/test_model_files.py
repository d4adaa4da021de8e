"""Files of models for other nodes: by digest, with a ticket for that file, few at a time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.worker.http_server import door
from tests.worker.http_server.door import TOKEN, Door, opened
from tests.worker.world import until

from enginehouse.core.ticket import FILE_LIFE_SECONDS, LOGS, TOLERANCE_SECONDS, for_file, make_ticket, ticket_key
from enginehouse.worker.http_server import model_files
from enginehouse.worker.http_server.model_files import ModelFileAnswers
from enginehouse.worker.models.peers import PATH

CONTENT = b"bytes of a model " * 300_000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
OTHER = hashlib.sha256(b"another file").hexdigest()
KEY = ticket_key("token-of-this-node")
NOW = 5_000_000.0


class Shelf:
    """What the worker has: one file in place, one that is coming."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def path_by_digest(self, sha256: str) -> Path | None:
        return self.path if sha256 == DIGEST else None

    def moved(self, sha256: str) -> int | None:
        return 7 if sha256 == OTHER else None


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Door]:
    place = tmp_path / "model.gguf"
    place.write_bytes(CONTENT)
    async with opened(tmp_path / "worker") as made:
        made.server._model_files = ModelFileAnswers(Shelf(place))
        made.server.joined(door.node("token-of-this-node"))
        made.server.heard(NOW, is_bus_away=False)
        yield made


def ticket(sha256: str = DIGEST, now: float = NOW, key: str = KEY) -> str:
    return make_ticket(key, for_file(sha256), now)


async def test_a_ticket_opens_its_file_whole_and_in_ranges(server: Door) -> None:
    path = f"{PATH}{DIGEST}"
    assert (await server.ask("GET", path, token=ticket())).body == CONTENT
    part = await server.ask("GET", path, headers={"Range": "bytes=1000-1999"}, token=ticket())
    assert (part.status, part.body) == (206, CONTENT[1000:2000])
    assert part.headers["Content-Range"] == f"bytes 1000-1999/{len(CONTENT)}"
    rest = await server.ask("GET", path, headers={"Range": f"bytes={len(CONTENT) - 5}-"}, token=ticket())
    assert rest.body == CONTENT[-5:]
    head = await server.ask("HEAD", path, token=ticket())
    assert (head.status, head.headers["Content-Length"]) == (200, str(len(CONTENT)))


@pytest.mark.parametrize("asked", [f"bytes={len(CONTENT)}-", "bytes=5-4", "bytes=-5", "lines=1-2", "bytes=1-2,4-5"])
async def test_a_range_that_is_none_is_refused(server: Door, asked: str) -> None:
    assert (await server.ask("GET", f"{PATH}{DIGEST}", headers={"Range": asked}, token=ticket())).status == 416


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda: ticket(OTHER), lambda: make_ticket(KEY, LOGS, NOW), lambda: ticket(key=ticket_key("another node"))),
        *(lambda: ticket(now=NOW - FILE_LIFE_SECONDS - TOLERANCE_SECONDS - 2), lambda: TOKEN, lambda: ""),
        *(lambda: "token-of-this-node", lambda: ticket(now=NOW + 2 * TOLERANCE_SECONDS)),
    ],
)
async def test_no_other_credential_opens_a_file(server: Door, wrong: Callable[[], str]) -> None:
    for method in ("GET", "HEAD"):
        assert (await server.ask(method, f"{PATH}{DIGEST}", token=wrong())).status == 401


async def test_a_ticket_for_a_file_opens_nothing_else(server: Door) -> None:
    for path in ("/v1/backend-logs", "/v1/files/models/x", "/v1/files-list/models"):
        assert (await server.ask("GET", path, token=ticket())).status == 401


async def test_a_file_that_is_coming_says_so_and_one_that_is_not_there_does_too(server: Door) -> None:
    coming = await server.ask("HEAD", f"{PATH}{OTHER}", token=ticket(OTHER))
    assert (coming.status, coming.headers["x-moved"]) == (202, "7")
    absent = "0" * 64
    assert (await server.ask("GET", f"{PATH}{absent}", token=ticket(absent))).status == 404
    for path in ("..%2f..%2fetc%2fpasswd", DIGEST.upper(), DIGEST + "0", ""):
        assert (await server.ask("GET", f"{PATH}{path}", token=ticket())).status == 404
    assert (await server.ask("PUT", f"{PATH}{DIGEST}", b"x", token=ticket())).status == 405


async def test_more_transfers_than_the_limit_wait_and_a_slow_reader_loses_its_place(
    server: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "MAX_TRANSFERS", 1)
    monkeypatch.setattr(model_files, "TRANSFER_SECONDS", 1.0)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(f"GET {PATH}{DIGEST} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ticket()}\r\n\r\n".encode())
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        refused = await server.ask("GET", f"{PATH}{DIGEST}", token=ticket())
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1")
        assert (await server.ask("HEAD", f"{PATH}{DIGEST}", token=ticket())).status == 503
        await until(lambda: server.server._model_files._transfers == 0)
        assert (await server.ask("HEAD", f"{PATH}{DIGEST}", token=ticket())).status == 200
        writer.close()


async def test_a_link_is_never_followed_out_of_the_directory(server: Door, tmp_path: Path) -> None:
    shelf = server.server._model_files._files
    assert isinstance(shelf, Shelf)
    link = tmp_path / "link"
    link.symlink_to("/etc/passwd")
    shelf.path = link
    assert (await server.ask("GET", f"{PATH}{DIGEST}", token=ticket())).status == 500
