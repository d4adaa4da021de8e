"""Pushes to a strict file server: only what is missing is sent, and a push ends whole, verified or with a reason."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.ports import free_port
from tests.standin.control import Control
from tests.standin.files import FileServer

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable, Upstream
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.progress import Phase
from enginehouse.fetch.worker_files import WorkerFileServers, WorkerPlace
from enginehouse.frontend.localai import pushing
from enginehouse.frontend.localai.file_sources import ReadableFile
from enginehouse.frontend.localai.pushing import PushedModel, Pusher

CONTENT = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
TOKEN = "a token"
Reported = list[tuple[str, str, int, int]]


class Shelf:
    """Files of a source, by name; `cuts` are the bytes after which the next reads break off."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.cuts: list[int] = []
        self.reads: list[tuple[int, int]] = []

    async def open(self, file: ModelFile) -> ReadableFile:
        if file.name not in self.files:
            raise Hopeless(f"cannot find {file.name}", code="not_found")
        return ShelvedFile(self, self.files[file.name])


class ShelvedFile:
    def __init__(self, shelf: Shelf, content: bytes) -> None:
        self._shelf = shelf
        self._content = content

    async def size(self) -> int:
        return len(self._content)

    async def read(self, start: int, end: int) -> AsyncIterator[bytes]:
        self._shelf.reads.append((start, end))
        cut = self._shelf.cuts.pop(0) if self._shelf.cuts else None
        stop = end if cut is None else min(end, start + cut)
        for at in range(start, stop, 10_000):
            yield self._content[at : min(stop, at + 10_000)]
        if cut is not None and stop < end:
            raise Upstream("cannot read the source: the connection was cut off")


class Place:
    def __init__(self, directory: Path, place: WorkerPlace, servers: WorkerFileServers) -> None:
        self.control = Control(directory)
        self.directory = directory
        self.place = place
        self.servers = servers
        self.reported: Reported = []
        self.counted: list[dict[str, int]] = []  # of each push

    async def push(
        self, shelf: Shelf, *files: ModelFile, part_bytes: int = 2**30, free_bytes: int | None = None
    ) -> PushedModel:
        async def report(phase: Phase, file: str, done: int, total: int) -> None:
            self.reported.append((phase, file, done, total))

        pusher = Pusher(self.servers, shelf, part_bytes=part_bytes)
        self.counted.append(pusher.sent_bytes)
        return await pusher.push(self.place, Model(name="m", backend="b", files=files), free_bytes, report)

    async def refusal(self, shelf: Shelf, *files: ModelFile, **more: Any) -> EnginehouseError:
        with pytest.raises(EnginehouseError) as caught:
            await self.push(shelf, *files, **more)
        return caught.value

    def requests(self, method: str) -> list[tuple[int, int]]:
        """Status and received bytes."""
        found = self.control.requests("http")
        return [(one["status"], one.get("received", 0)) for one in found if one["method"] == method]

    def path(self, name: str) -> Path:
        return self.directory / "models" / "m" / name


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Place]:
    (directory / "models").mkdir()
    server = FileServer(directory / "models", TOKEN, Control(directory))
    runner = web.ServerRunner(web.Server(server.answer))
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    servers = WorkerFileServers(stall_seconds=2.0)
    try:
        yield Place(directory, WorkerPlace(name="go", address=f"127.0.0.1:{port}", token=TOKEN), servers)
    finally:
        await servers.close()
        await runner.cleanup()


@pytest.fixture
async def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr(pushing, "PAUSE_SECONDS", 0.01)
    async with opened(tmp_path) as made:
        yield made
    assert made.control.requests("violation") == []


def file_of(name: str = "f", content: bytes = CONTENT) -> ModelFile:
    return ModelFile(name, f"https://example.org/{name}", hashlib.sha256(content).hexdigest(), len(content))


async def test_a_file_is_sent_once_and_its_directory_is_the_worker_s(place: Place) -> None:
    shelf = Shelf(f=CONTENT, **{"sub/g h.bin": b"second"})
    files = (file_of(), file_of("sub/g h.bin", b"second"))
    pushed = await place.push(shelf, *files)
    assert pushed == PushedModel(directory=str(place.directory / "models" / "m"))
    assert (place.path("f").read_bytes(), place.path("sub/g h.bin").read_bytes()) == (CONTENT, b"second")
    assert place.requests("PUT") == [(200, len(CONTENT)), (200, 6)]
    total = len(CONTENT) + 6
    assert place.reported[-1] == ("downloading", "sub/g h.bin", total, total)
    assert [one[2] for one in place.reported] == sorted(one[2] for one in place.reported)
    await place.push(shelf, *files)
    assert len(place.requests("PUT")) == 2
    assert place.counted == [{"go": total}, {}]


async def test_parts_follow_each_other(place: Place) -> None:
    await place.push(Shelf(f=CONTENT), file_of(), part_bytes=100_000)
    assert place.requests("PUT") == [(308, 100_000), (308, 100_000), (200, 56_000)]
    assert place.path("f").read_bytes() == CONTENT


@pytest.mark.parametrize("has_digest", [True, False], ids=["known", "unknown"])
async def test_a_source_that_breaks_off_is_asked_again(place: Place, has_digest: bool) -> None:
    shelf = Shelf(f=CONTENT)
    shelf.cuts = [90_000, 70_000]
    file = file_of() if has_digest else ModelFile("f", "https://example.org/f", "")
    pushed = await place.push(shelf, file)
    assert place.path("f").read_bytes() == CONTENT
    assert [start for start, _ in shelf.reads] == [0, 90_000, 160_000]
    assert [(pin.name, pin.sha256, pin.size_bytes) for pin in pushed.pins] == (
        [] if has_digest else [("f", DIGEST, len(CONTENT))]
    )


async def test_an_unknown_file_is_sent_in_parts_too(place: Place) -> None:
    pushed = await place.push(Shelf(f=CONTENT), ModelFile("f", "https://example.org/f", ""), part_bytes=100_000)
    assert pushed.pins[0].sha256 == DIGEST
    assert place.requests("PUT") == [(308, 100_000), (308, 100_000), (200, 56_000)]


async def test_bytes_of_an_unknown_file_that_others_sent_are_sent_again(place: Place) -> None:
    unknown = ModelFile("f", "https://example.org/f", "")
    for there in (CONTENT[:5000], CONTENT):
        place.path("f").parent.mkdir(exist_ok=True)
        place.path("f").write_bytes(there)
        shelf = Shelf(f=CONTENT)
        assert (await place.push(shelf, unknown)).pins[0].sha256 == DIGEST
        assert shelf.reads[0][0] == 0


async def test_what_another_frontend_has_sent_is_continued_and_other_bytes_are_replaced(place: Place) -> None:
    for there, target, start in ((CONTENT[:5000], DIGEST, 5000), (b"other", "0" * 64, 0), (b"other", "", 0)):
        place.path("f").parent.mkdir(exist_ok=True)
        place.path("f").write_bytes(there)
        if target:
            place.path("f.sha256.target").write_text(target)
        shelf = Shelf(f=CONTENT)
        await place.push(shelf, file_of())
        assert place.path("f").read_bytes() == CONTENT
        assert shelf.reads[0][0] == start


async def test_a_file_that_was_complete_but_never_verified_is_replaced_as_a_whole(place: Place) -> None:
    """A worker that was killed while it hashed: a range cannot follow the last byte."""
    place.path("f").parent.mkdir()
    place.path("f").write_bytes(CONTENT)
    place.path("f.sha256.target").write_text(DIGEST)
    await place.push(Shelf(f=CONTENT), file_of())
    assert place.path("f").read_bytes() == CONTENT
    (put,) = [one for one in place.control.requests("http") if one["method"] == "PUT"]
    assert "Content-Range" not in put["headers"]


async def test_an_empty_file_has_no_range(place: Place) -> None:
    pushed = await place.push(Shelf(f=b""), ModelFile("f", "https://example.org/f", hashlib.sha256(b"").hexdigest()))
    assert place.path("f").read_bytes() == b""
    assert pushed.directory


@pytest.mark.parametrize(
    ("faults", "code", "heals", "tries"),
    [
        ({"token": "another"}, "unauthenticated", False, 1),
        ({"broken": 500}, "upstream_error", True, pushing.TRIES),
        ({"cut": True}, "node_unreachable", True, 0),
        ({"quota_bytes": 1000}, "insufficient_disk", True, 1),
    ],
)
async def test_a_refusal_is_named_and_repeated_only_if_that_may_help(
    place: Place, faults: dict[str, object], code: str, heals: bool, tries: int
) -> None:
    place.control.set(**faults)
    error = await place.refusal(Shelf(f=CONTENT), file_of())
    assert (error.code, isinstance(error, Unavailable)) == (code, heals)
    assert "go" in error.message
    heads = [one for one in place.control.requests("http") if one["method"] == "HEAD"]
    assert len(heads) == tries


async def test_other_bytes_than_announced_are_final(place: Place) -> None:
    error = await place.refusal(Shelf(f=CONTENT[::-1]), file_of())
    assert (error.code, isinstance(error, Hopeless)) == ("digest_mismatch", True)
    assert place.requests("PUT") == [(400, len(CONTENT))]
    longer = await place.refusal(Shelf(f=CONTENT + b"x"), file_of())
    assert (longer.code, len(place.requests("PUT"))) == ("digest_mismatch", 1)


async def test_a_resumed_file_that_is_not_the_announced_one_is_sent_whole_before_the_source_is_blamed(
    place: Place,
) -> None:
    place.path("f").parent.mkdir()
    place.path("f").write_bytes(b"x" * 5000)
    place.path("f.sha256.target").write_text(DIGEST)
    await place.push(Shelf(f=CONTENT), file_of())
    assert place.path("f").read_bytes() == CONTENT
    assert [status for status, _ in place.requests("PUT")] == [400, 200]


async def test_a_disk_without_room_is_not_filled(place: Place) -> None:
    error = await place.refusal(Shelf(f=CONTENT), file_of(), free_bytes=len(CONTENT) - 1)
    assert error.code == "insufficient_disk"
    assert place.requests("PUT") == []
    await place.push(Shelf(f=CONTENT), file_of(), free_bytes=len(CONTENT))


async def test_a_server_that_takes_no_byte_is_given_up(place: Place) -> None:
    ended = asyncio.Event()

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HEAD"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
        else:
            await ended.wait()
            writer.transport.abort()

    server = await asyncio.start_server(deaf, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    servers = WorkerFileServers(stall_seconds=0.2)
    place.place, place.servers = WorkerPlace(name="go", address=f"127.0.0.1:{port}", token=TOKEN), servers
    try:
        large = b"x" * 30_000_000  # more than sockets buffer
        error = await place.refusal(Shelf(f=large), file_of("f", large))
        assert error.code == "stalled"
    finally:
        ended.set()
        await servers.close()
        server.close()
