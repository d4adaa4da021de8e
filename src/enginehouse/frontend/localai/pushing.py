"""Pushes the files of a model to the file server of a LocalAI worker: what is there is not sent again, and a push that
was cut off goes on where it was, by whichever frontend.

The worker says how far a file is, so nothing is remembered here. It verifies the declared digest before a file counts
as whole. Of a file whose digest nobody knows, the bytes are hashed on their way and compared with what the worker has
in the end; nothing says whose bytes are there, so only the push that sent them goes on with them.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from msgspec import Struct

from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable, Upstream
from enginehouse.core.model import Model, ModelFile, PinnedFile
from enginehouse.core.name import model_directory
from enginehouse.core.progress import Phase, format_bytes
from enginehouse.fetch.worker_files import PutAnswer, RemoteFile, SentPart, WorkerPlace, file_key, refusal
from enginehouse.frontend.localai.file_sources import ReadableFile
from enginehouse.host.blocking import in_thread

PART_BYTES = 16 * 1024**3  # LocalAI's workers take 50 GiB per request
TRIES = 4  # without a byte more on the worker
PAUSE_SECONDS = 0.5  # doubled with every failure in a row
# Not worth another try within this push.
_FOR_LATER = frozenset({"insufficient_disk", "upload_elsewhere"})

ReportPush = Callable[[Phase, str, int, int], Awaitable[None]]  # phase, file, bytes done, bytes in total


class FileServers(Protocol):
    """The file servers of workers (`fetch.worker_files`)."""

    async def head(self, place: WorkerPlace, key: str, size_bytes: int) -> RemoteFile | None: ...

    async def put(self, place: WorkerPlace, key: str, part: SentPart, body: AsyncIterator[bytes]) -> PutAnswer: ...

    async def last_lines(self, place: WorkerPlace, process_key: str, count: int) -> list[str]: ...


class SourceFiles(Protocol):
    async def open(self, file: ModelFile) -> ReadableFile: ...


class PushedModel(Struct, frozen=True, kw_only=True):
    """The files of a model on a worker: its directory there, and the digests of files for which the model has none."""

    directory: str
    pins: tuple[PinnedFile, ...] = ()


class _Placed(Struct, frozen=True):
    path: str
    sha256: str
    size_bytes: int


class Pusher:
    def __init__(self, servers: FileServers, sources: SourceFiles, *, part_bytes: int = PART_BYTES) -> None:
        self._servers = servers
        self._sources = sources
        self._part_bytes = part_bytes
        self.sent_bytes: dict[str, int] = {}  # since the start, by name of the node; also what had to be sent again

    async def push(self, place: WorkerPlace, model: Model, free_bytes: int | None, report: ReportPush) -> PushedModel:
        """Make sure that the worker has all files of a model, whole and verified. `free_bytes` is None if unknown."""
        if not model.files:
            raise Hopeless(f"cannot push {model.name}: its description names no files", code="unsupported")
        placed: dict[str, _Placed] = {}
        done = 0
        for file in model.files:
            pushed = _Push(self, place, model, file, done)
            placed[file.name] = await pushed.run(free_bytes, report)
            done += placed[file.name].size_bytes
        first = model.files[0]
        directory = placed[first.name].path.removesuffix(f"/{first.name}")
        if not directory or directory == placed[first.name].path:
            raise Upstream(f"cannot use {first.name} on {place.name}: its worker gave no path of the file")
        unknown = [file.name for file in model.files if not file.sha256]
        pins = tuple(PinnedFile(name, placed[name].sha256, placed[name].size_bytes) for name in unknown)
        return PushedModel(directory=directory, pins=pins)

    def count(self, node: str, sent_bytes: int) -> None:
        self.sent_bytes[node] = self.sent_bytes.get(node, 0) + sent_bytes

    @property
    def servers(self) -> FileServers:
        return self._servers

    @property
    def sources(self) -> SourceFiles:
        return self._sources

    @property
    def part_bytes(self) -> int:
        return self._part_bytes


class _Push:
    """The push of one file."""

    def __init__(self, pusher: Pusher, place: WorkerPlace, model: Model, file: ModelFile, before: int) -> None:
        self._pusher = pusher
        self._place = place
        self._model = model
        self._file = file
        self._before = before  # bytes of the files before this one
        self._key = file_key(model_directory(model.name), file.name)
        # Of a file whose digest is not known: of the bytes so far, how many, and whether the worker took the last.
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._is_sent = False

    async def run(self, free_bytes: int | None, report: ReportPush) -> _Placed:
        file, servers = self._file, self._pusher.servers
        source: ReadableFile | None = None
        tries, reached = 0, -1
        error: EnginehouseError | None = None
        while tries < TRIES:
            if error is not None:
                await asyncio.sleep(PAUSE_SECONDS * 2.0 ** (tries - 1))
            try:
                there = await servers.head(self._place, self._key, file.size_bytes)
                if there is not None and self._is_whole(there):
                    return _Placed(there.path, there.sha256, there.size_bytes)
                if source is None:
                    source = await self._pusher.sources.open(file)
                    self._check_room(await source.size(), there, free_bytes)
                part = self._next_part(there, await source.size())
                tries, reached = (0 if part.start > reached else tries), max(reached, part.start)
                answer = await servers.put(self._place, self._key, part, self._body(source, part, report))
                error = self._judge(answer, part)
            except Unavailable as found:
                if found.code in _FOR_LATER:
                    raise
                error = found
            tries += 1
        raise error or Upstream(f"cannot place {file.name} on {self._place.name}: its worker has other bytes than sent")

    def _is_whole(self, there: RemoteFile) -> bool:
        if self._file.sha256:
            return there.sha256 == self._file.sha256
        # Nothing is known of the file before all its bytes have passed here.
        return self._is_sent and there.sha256 == self._digest.hexdigest()

    def _next_part(self, there: RemoteFile | None, size_bytes: int) -> SentPart:
        file = self._file
        if file.size_bytes and size_bytes != file.size_bytes:
            raise Hopeless(
                f"cannot use {file.name}: its source gives {size_bytes} bytes instead of {file.size_bytes}; the file "
                "was changed there since it was added. Add the model again to use the new file",
                code="digest_mismatch",
            )
        is_ours = there is not None and bool(file.sha256) and there.target == file.sha256
        start = there.size_bytes if there is not None and is_ours else 0
        if there is not None and 0 < self._hashed == there.size_bytes < size_bytes:
            start = self._hashed  # the part before this one was accepted just now
        if start >= size_bytes:
            # All bytes are there, but the worker ended before it verified them; only a whole upload replaces them.
            return SentPart(start=0, end=size_bytes, total=size_bytes, sha256=file.sha256, has_range=False)
        end = min(size_bytes, start + self._pusher.part_bytes)
        return SentPart(start=start, end=end, total=size_bytes, sha256=file.sha256)

    async def _body(self, source: ReadableFile, part: SentPart, report: ReportPush) -> AsyncIterator[bytes]:
        if part.start == 0:
            self._digest, self._hashed, self._is_sent = hashlib.sha256(), 0, False
        total = max(self._model.size_bytes, self._before + part.total)
        done = self._before + part.start
        await report("downloading", self._file.name, done, total)
        async for piece in source.read(part.start, part.end):
            if not self._file.sha256:
                await in_thread(self._digest.update, piece)
                self._hashed += len(piece)
            yield piece
            done += len(piece)
            self._pusher.count(self._place.name, len(piece))
            await report("downloading", self._file.name, done, total)

    def _judge(self, answer: PutAnswer, part: SentPart) -> EnginehouseError | None:
        """The reason to try again, if there is one. Raises what no repetition heals."""
        file = self._file
        if answer.status in (200, 308):
            self._is_sent = answer.status == 200
            return None
        if answer.status == 400 and "mismatch" in answer.text and part.start == 0 and part.end == part.total:
            raise Hopeless(
                f"cannot use {file.name}: its source gives other bytes than sha256 {file.sha256[:12]}…; the file was "
                "changed there since it was added. Add the model again to use the new file",
                code="digest_mismatch",
            )
        found = refusal(self._place, answer)
        if not isinstance(found, Unavailable) or found.code in _FOR_LATER:
            raise found
        self._hashed = 0  # bytes of an unknown file are not continued after a failure
        return found

    def _check_room(self, size_bytes: int, there: RemoteFile | None, free_bytes: int | None) -> None:
        is_ours = there is not None and bool(self._file.sha256) and there.target == self._file.sha256
        missing = size_bytes - (there.size_bytes if there is not None and is_ours else 0)
        if free_bytes is not None and missing > free_bytes:
            raise Unavailable(
                f"cannot push {self._file.name} to {self._place.name}: it needs {format_bytes(missing)} and "
                f"{format_bytes(free_bytes)} are free there; make room, it is retried automatically",
                code="insufficient_disk",
            )
