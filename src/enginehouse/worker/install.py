"""Installs backends: built beside, checked, synced, swapped in at the end.

The old version is given up only after the new one is complete and in place, and then it is kept as the previous one;
whatever fails before that changes nothing and leaves nothing but verified parts of blobs. Nothing here stops
processes: whoever has to is called back between swap and clean-up. Callers hold the lock of the directory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved, check_resolved
from enginehouse.core.errors import Hopeless, Unavailable
from enginehouse.core.installation import (
    METADATA_FILE,
    RUN_FILE,
    Metadata,
    Version,
    check_directory,
    encode_metadata,
    metadata_for,
)
from enginehouse.core.reference import parse_uri
from enginehouse.fetch.origins import Origin
from enginehouse.host import disk
from enginehouse.worker.blobs import DEFAULT_CAP_BYTES, Blobs, Collected
from enginehouse.worker.building import Builder, Built, Report
from enginehouse.worker.copying import DirectoryEntries
from enginehouse.worker.packages import Packages, check_described
from enginehouse.worker.sharing import FileRecord, Manifests, Sharing
from enginehouse.worker.suppliers import Suppliers
from enginehouse.worker.threads import in_thread
from enginehouse.worker.trees import Trees, now
from enginehouse.worker.unpack import SPARE_BYTES, Unpacker

log = logging.getLogger(__name__)

Swapped = Callable[[], Awaitable[None]]  # called when the new tree is in place and the old one still on disk
__all__ = ["InstallWish", "Installed", "Installer", "Report", "Swapped"]


class InstallWish(Struct, frozen=True, kw_only=True):
    resolved: Resolved
    generation: int = 0
    force: bool = False
    upgrade: bool = False  # look whether there is something newer, even if what is asked for is installed


class Installed(Struct, frozen=True, kw_only=True):
    """What is in the directory now, and what it took."""

    digest: str
    changed: bool = True
    fetched_bytes: int = 0
    reused_bytes: int = 0
    written_bytes: int = 0
    shared_bytes: int = 0


class Storage(Struct, frozen=True, kw_only=True):
    """Where things are kept, and how much of them."""

    trees: Trees
    blobs: Blobs
    manifests: Manifests
    limits: ArchiveLimits = ArchiveLimits()
    cap_bytes: int = DEFAULT_CAP_BYTES


class _Made(Struct, frozen=True, kw_only=True):
    metadata: Metadata
    blobs: tuple[str, ...] = ()
    built: Built | None = None


class Installer:
    def __init__(self, storage: Storage, suppliers: Suppliers, packages: Packages) -> None:
        self._storage = storage
        self._trees = storage.trees
        self._suppliers = suppliers
        self._packages = packages
        self._builder = Builder(storage.blobs, storage.limits, suppliers.patience)

    async def install(self, wish: InstallWish, report: Report, swapped: Swapped) -> Installed:
        """Make `wish` true. What is already so costs a look and a note of the generation."""
        resolved = _checked(wish.resolved)
        try:
            self._trees.check_pointer(resolved)
            known = await in_thread(self._trees.metadata_of, resolved.directory)
            if known is not None and not wish.force and _is_wanted(known, resolved, wish.upgrade):
                return await self._keep(wish, known)
            return await self._replace(wish, known, report, swapped)
        except OSError as error:
            raise disk.storage_error(error, f"install {resolved.directory}") from error

    async def roll_back(self, directory: str, swapped: Swapped) -> Metadata:
        """Put the previous version back in place; without a network, and again to undo it."""
        try:
            metadata = await in_thread(self._trees.roll_back, check_directory(directory))
            await swapped()
            return metadata
        except OSError as error:
            raise disk.storage_error(error, f"roll {directory} back") from error

    async def remove(self, directory: str) -> None:
        """Remove a backend and the meta names that point to it; nothing there is fine."""
        try:
            await in_thread(self._trees.remove, directory)
            await in_thread(self._forget)
        except OSError as error:
            raise disk.storage_error(error, f"delete {directory}") from error

    def recover(self) -> None:
        """Before anything else: finish or undo what was under way. Blocks."""
        self._trees.recover()
        self._forget()

    def collect(self, cap_bytes: int | None = None) -> Collected:
        """Remove blobs that no version needs until the rest fits. Blocks."""
        self._forget()
        return self._storage.blobs.collect(
            self._protected(), self._storage.cap_bytes if cap_bytes is None else cap_bytes
        )

    async def _keep(self, wish: InstallWish, known: Metadata) -> Installed:
        await in_thread(self._trees.note, wish.resolved.directory, wish.generation)
        await in_thread(self._trees.point, wish.resolved)
        return Installed(digest=known.digest, changed=False)

    async def _replace(self, wish: InstallWish, known: Metadata | None, report: Report, swapped: Swapped) -> Installed:
        resolved, directory = wish.resolved, wish.resolved.directory
        staging = self._trees.staging_of(directory)
        report("resolving", "", 0, resolved.size_bytes)
        await in_thread(self._trees.make_directories)
        kind = parse_uri(resolved.uri).kind
        try:
            if kind == "package":
                made = await self._from_package(wish, staging, report)
            elif kind == "directory":
                made = await self._from_directory(wish, staging, report)
            else:
                artifact, origins = await self._suppliers.resolve(resolved)
                if known is not None and not wish.force and _is_same(known, artifact):
                    return await self._keep(wish, known)
                made = await self._from_artifact(wish, artifact, origins, report)
            await in_thread(self._stage, directory, made, resolved)
            await in_thread(self._trees.swap_in, directory)
            await in_thread(self._trees.point, resolved)
            await in_thread(self._trees.reach, directory, "swapped")
            await swapped()
            await in_thread(self._clean, directory)
        finally:
            await in_thread(self._trees.discard, directory)
        return _told(made)

    async def _from_artifact(
        self, wish: InstallWish, artifact: Artifact, origins: list[Origin], report: Report
    ) -> _Made:
        resolved, directory = wish.resolved, wish.resolved.directory
        missing = sum(
            layer.size_bytes - self._storage.blobs.held_bytes(layer)
            for layer in artifact.layers
            if not any(origin.local(layer) for origin in origins)
        )
        # A tree is at least as large as what it is packed into; more is found out on the way.
        await in_thread(self._make_room, directory, missing + max(artifact.size_bytes, resolved.size_bytes))
        await in_thread(self._begin, directory)
        sharing = await in_thread(self._relatives, directory)
        staging = self._trees.staging_of(directory)
        built = await self._builder.build(artifact, origins, staging, sharing, report)
        await in_thread(self._trees.reach, directory, "verified")
        await in_thread(_check_run_file, staging, resolved)
        metadata = msgspec.structs.replace(
            metadata_for(resolved, wish.generation, now()),
            digest=artifact.digest,
            index_digest=artifact.index_digest if artifact.index_digest != artifact.digest else "",
            platform=artifact.platform or resolved.platform,
            fetched_from=artifact.uri if artifact.uri.partition("@")[0] != resolved.uri.partition("@")[0] else "",
        )
        blobs = tuple(layer.digest for layer in artifact.layers)
        return _Made(metadata=metadata, blobs=blobs, built=built)

    async def _from_package(self, wish: InstallWish, staging: Path, report: Report) -> _Made:
        directory = wish.resolved.directory
        await in_thread(self._make_room, directory, wish.resolved.size_bytes)
        await in_thread(self._begin, directory)
        await self._packages.build(wish.resolved, staging, report)
        return _Made(metadata=metadata_for(wish.resolved, wish.generation, now()))

    async def _from_directory(self, wish: InstallWish, staging: Path, report: Report) -> _Made:
        directory = wish.resolved.directory
        await in_thread(self._begin, directory)
        sharing = await in_thread(self._relatives, directory)
        report("extracting", wish.resolved.uri, 0, 0)
        entries = DirectoryEntries(Path(parse_uri(wish.resolved.uri).path), self._storage.limits.total_bytes)
        records, written = await in_thread(self._copy, entries, staging, sharing)
        await in_thread(_check_run_file, staging, wish.resolved)
        metadata = metadata_for(wish.resolved, wish.generation, now())
        built = Built(
            records=records, fetched_bytes=0, reused_bytes=0, written_bytes=written, shared_bytes=sharing.shared_bytes
        )
        return _Made(metadata=msgspec.structs.replace(metadata, digest=entries.digest()), built=built)

    def _copy(self, entries: DirectoryEntries, staging: Path, sharing: Sharing) -> tuple[list[FileRecord], int]:
        with Unpacker(staging, sharing, self._storage.limits) as unpacker:
            unpacker.apply(entries, lambda: False)
            unpacker.finish()
        return list(unpacker.records.values()), unpacker.written_bytes

    def _begin(self, directory: str) -> None:
        staging = self._trees.staging_of(directory)
        disk.remove_tree(staging)
        self._trees.reach(directory, "fetching")
        staging.mkdir(mode=0o750)

    def _stage(self, directory: str, made: _Made, resolved: Resolved) -> None:
        """The tree is complete: everything about it on disk, and the disk told to keep it."""
        staging = self._trees.staging_of(directory)
        # Whatever an image has under that name is replaced, never written through.
        disk.remove_tree(staging / METADATA_FILE)
        (staging / METADATA_FILE).write_bytes(encode_metadata(made.metadata))
        (staging / METADATA_FILE).chmod(0o644)
        if made.built is not None:
            self._storage.manifests.write(staging, made.built.records)
        disk.sync_files(staging)
        version = Version(inode=staging.stat().st_ino, digest=made.metadata.digest, blobs=made.blobs)
        self._trees.reach_staged(directory, version, resolved)

    def _clean(self, directory: str) -> None:
        self._trees.retire(directory)
        self._trees.reach(directory, "cleaned")
        self.collect()

    def _relatives(self, directory: str) -> Sharing:
        """What a new tree may share files with: its own former versions first."""
        sharing = Sharing()
        own = {self._trees.path_of(directory), self._trees.previous_of(directory)}
        for tree in sorted(self._trees.every_tree(), key=lambda path: path not in own):
            sharing.add(tree, self._storage.manifests.read(tree))
        return sharing

    def _make_room(self, directory: str, needed_bytes: int) -> None:
        free = disk.free_bytes(self._trees.backends)
        if free < needed_bytes + SPARE_BYTES:
            # Blobs are only a convenience for the next version: rather than refuse, let go of them.
            self._storage.blobs.collect((), max(0, free - needed_bytes - SPARE_BYTES))
            free = disk.free_bytes(self._trees.backends)
        if free < needed_bytes + SPARE_BYTES:
            raise Unavailable(
                f"cannot install {directory}: it needs {needed_bytes // 2**20 + 1} MiB and "
                f"{free // 2**20} MiB are free; free some, it goes on by itself",
                code="insufficient_disk",
            )

    def _protected(self) -> set[str]:
        names = {path.name for path in self._trees.every_tree()}
        return {digest for name in names for one in self._trees.record(name).versions for digest in one.blobs}

    def _forget(self) -> None:
        self._storage.manifests.prune(self._trees.every_tree())


def _checked(resolved: Resolved) -> Resolved:
    """The bus is not trusted: names, source and digest are checked before anything is touched."""
    check_resolved(resolved)
    check_directory(resolved.directory)
    if resolved.meta:
        check_directory(resolved.meta)
    if parse_uri(resolved.uri).kind == "package":
        check_described(resolved)
    return resolved


def _is_wanted(known: Metadata, resolved: Resolved, upgrade: bool) -> bool:
    """Whether what is installed is what is asked for, as far as can be told without asking anybody."""
    if resolved.digest:
        return resolved.digest in (known.digest, known.index_digest)
    return not upgrade and known.uri == resolved.uri and parse_uri(resolved.uri).kind != "directory"


def _is_same(known: Metadata, artifact: Artifact) -> bool:
    # LocalAI records the digest of the index, we that of the platform's manifest.
    return bool(known.digest) and known.digest in (artifact.digest, artifact.index_digest)


def _check_run_file(staging: Path, resolved: Resolved) -> None:
    run_file = staging / RUN_FILE
    if run_file.is_symlink() or not run_file.is_file() or not run_file.stat().st_size:
        raise Hopeless(
            f"cannot install {resolved.directory}: {resolved.uri} has no {RUN_FILE}; it is not the image of a backend",
            code="unsupported",
        )
    if not run_file.stat().st_mode & 0o111:
        run_file.chmod(0o700)  # as LocalAI does before it starts one


def _told(made: _Made) -> Installed:
    built = made.built
    if built is None:
        return Installed(digest=made.metadata.digest)
    return Installed(
        digest=made.metadata.digest,
        fetched_bytes=built.fetched_bytes,
        reused_bytes=built.reused_bytes,
        written_bytes=built.written_bytes,
        shared_bytes=built.shared_bytes,
    )
