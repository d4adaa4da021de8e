"""Installs backends: built beside, checked, swapped in, synced.

The old version is given up only after the new one is verified, in place and on disk, and then it is kept as the
previous one; whatever fails before that leaves the old version in place and nothing but verified parts of blobs beside
it. Success is told only after the sync. Nothing here stops processes: whoever has to is called back between the swap
and the sync. Callers hold the lock of the directory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.artifact.blobs.store import DEFAULT_CAP_BYTES, BlobStore, Collected
from enginehouse.artifact.images.build import Builder, Built
from enginehouse.artifact.images.directories import DirectoryEntries
from enginehouse.artifact.images.layers import SPARE_BYTES, Unpacker
from enginehouse.artifact.images.sharing import FileRecord, How, Manifests, Sharing
from enginehouse.artifact.suppliers import Suppliers
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved, check_resolved
from enginehouse.core.errors import Unavailable
from enginehouse.core.installation import (
    METADATA_FILE,
    Metadata,
    Version,
    check_directory,
    described_by,
    encode_metadata,
    is_same,
    is_wanted,
    metadata_for,
)
from enginehouse.core.progress import ReportProgress
from enginehouse.core.reference import parse_uri
from enginehouse.fetch.origins import Origin
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.inspection import check_run_file, now
from enginehouse.worker.backends.python_packages import Packages, check_described
from enginehouse.worker.backends.swap import Swap
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.backends.unsharing import Separation

log = logging.getLogger(__name__)
Swapped = Callable[[], Awaitable[None]]  # called when the new tree is in place, not yet synced, the old one still there


class InstallRequest(Struct, frozen=True, kw_only=True):
    resolved: Resolved
    generation: int = 0
    force: bool = False
    keep: bool = False  # whatever version is installed will do
    upgrade: bool = False  # look whether there is something newer, even if what is asked for is installed


class Installed(Struct, frozen=True, kw_only=True):
    """What is in the directory now, and what it took."""

    digest: str
    changed: bool = True
    fetched_bytes: int = 0
    reused_bytes: int = 0
    written_bytes: int = 0
    shared_bytes: int = 0
    dropped: str = ""  # attributes of files that mean something and are not kept, named
    sharing: How = "copy"  # how files of other versions are used here, where something could be


class Storage(Struct, frozen=True, kw_only=True):
    """Where things are kept, and how much of them."""

    trees: Trees
    blobs: BlobStore
    manifests: Manifests
    limits: ArchiveLimits = ArchiveLimits()
    cap_bytes: int = DEFAULT_CAP_BYTES
    may_link: bool = False  # no engine can write to a tree


class _Made(Struct, frozen=True, kw_only=True):
    metadata: Metadata
    blobs: tuple[str, ...] = ()
    built: Built = Built()


class Installer:
    def __init__(self, storage: Storage, suppliers: Suppliers, packages: Packages) -> None:
        self._storage = storage
        self._trees = storage.trees
        self._swap = Swap(storage.trees)
        self._separation = Separation(storage.trees, storage.manifests)
        self._suppliers = suppliers
        self._packages = packages
        self._builder = Builder(storage.blobs, storage.limits, suppliers.patience)

    async def install(self, request: InstallRequest, report: ReportProgress, swapped: Swapped) -> Installed:
        """Make `request` true. What is already so costs a look and a note of the generation."""
        resolved = _checked(request.resolved)
        try:
            self._trees.pointers.check(resolved)
            # What an earlier install left is not to be built on before it is finished or undone.
            await in_thread(self._swap.settle, resolved.directory)
            known = await in_thread(self._trees.metadata_of, resolved.directory)
            if (
                known is not None
                and not request.force
                and (request.keep or is_wanted(known, resolved, request.upgrade))
            ):
                return await self._keep(request, known, known)
            return await self._replace(request, known, report, swapped)
        except OSError as error:
            raise disk.storage_error(error, f"install {resolved.directory}") from error

    async def roll_back(self, directory: str, swapped: Swapped) -> Metadata:
        """Put the previous version back in place; without a network, and again to undo it."""
        try:
            metadata = await in_thread(self._swap.roll_back, check_directory(directory))
            await swapped()
            return metadata
        except OSError as error:
            raise disk.storage_error(error, f"roll {directory} back") from error

    async def remove(self, directory: str) -> None:
        """Remove a backend and the meta names that point to it; nothing there is fine."""
        try:
            gone = await in_thread(self._swap.remove, directory)
            await in_thread(self._storage.manifests.forget, gone)
        except OSError as error:
            raise disk.storage_error(error, f"delete {directory}") from error

    def recover(self) -> None:
        """Before anything else: finish or undo what was under way. Blocks."""
        self._swap.recover()
        self._forget()
        if not self._storage.may_link:
            try:
                copied = self._separation.separate()
            except OSError as error:
                log.warning("files.not_separated: versions still share files by hard links: %s", error)
            else:
                if copied:
                    log.info("files.separated count=%d: engines can write to their trees here", copied)

    def collect(self, cap_bytes: int | None = None) -> Collected:
        """Remove blobs that no version needs until the rest fits. Blocks."""
        self._forget()
        return self._storage.blobs.collect(
            self._protected(), self._storage.cap_bytes if cap_bytes is None else cap_bytes
        )

    async def _keep(self, request: InstallRequest, known: Metadata, seen: Metadata) -> Installed:
        """What is there is what is asked for; what is written about it may be less than what was seen."""
        fresh = msgspec.structs.replace(seen, generation=max(known.generation, request.generation))
        if fresh != known:
            await in_thread(self._trees.note, request.resolved.directory, fresh)
        resolved = (
            msgspec.structs.replace(request.resolved, version=known.version) if request.keep else request.resolved
        )
        await in_thread(self._trees.pointers.point, resolved)
        return Installed(digest=fresh.digest, changed=False)

    async def _replace(
        self, request: InstallRequest, known: Metadata | None, report: ReportProgress, swapped: Swapped
    ) -> Installed:
        resolved, directory = request.resolved, request.resolved.directory
        kind = parse_uri(resolved.uri).kind
        report("resolving", "", 0, resolved.size_bytes if kind == "package" else 0)
        await in_thread(self._trees.make_directories)
        try:
            if kind == "package":
                made = await self._from_package(request, report)
            elif kind == "directory":
                made = await self._from_directory(request, report)
                if known is not None and not request.force and known.digest == made.metadata.digest:
                    # The version before is worth more than a second copy of this one.
                    return await self._keep(request, known, msgspec.structs.replace(known, uri=resolved.uri))
            else:
                artifact, origins = await self._suppliers.resolve(resolved)
                if known is not None and not request.force and is_same(known, artifact):
                    return await self._keep(request, known, described_by(known, artifact))
                made = await self._from_artifact(request, artifact, origins, report)
            await self._switch(directory, made, resolved, swapped)
        finally:
            await in_thread(self._swap.discard, directory)
        return Installed(
            digest=made.metadata.digest,
            fetched_bytes=made.built.fetched_bytes,
            reused_bytes=made.built.reused_bytes,
            written_bytes=made.built.written_bytes,
            shared_bytes=made.built.shared_bytes,
            sharing=made.built.sharing,
            dropped=made.built.dropped,
        )

    async def _switch(self, directory: str, made: _Made, resolved: Resolved, swapped: Swapped) -> None:
        is_refused = False
        try:
            await in_thread(self._put_in_place, directory, made, resolved)
        except OSError:
            is_refused = True
            if await in_thread(self._swap.is_in_place, directory):
                await in_thread(self._swap.undo, directory)
            raise
        finally:
            # Past the swap only the disk can refuse: whoever cancels now hears of it when all is in order.
            if not is_refused and await in_thread(self._swap.is_in_place, directory):
                await swapped()
                await in_thread(self._finish, directory)

    def _put_in_place(self, directory: str, made: _Made, resolved: Resolved) -> None:
        self._stage(directory, made, resolved)
        self._swap.swap_in(directory)
        self._trees.pointers.point(resolved)

    async def _from_artifact(
        self, request: InstallRequest, artifact: Artifact, origins: list[Origin], report: ReportProgress
    ) -> _Made:
        resolved, directory = request.resolved, request.resolved.directory
        own = {layer.digest: layer for layer in artifact.layers}
        missing = sum(
            layer.size_bytes - self._storage.blobs.held_bytes(layer)
            for layer in own.values()
            if not any(origin.local(layer) for origin in origins)
        )
        # A tree is at least as large as what it is packed into; more is found out on the way.
        needed = missing + max(artifact.size_bytes, resolved.size_bytes)
        await in_thread(self._make_room, directory, needed, set(own))
        await in_thread(self._begin, directory)
        sharing = await in_thread(self._relatives, directory)
        staging = self._trees.staging_of(directory)
        built = await self._builder.build(artifact, origins, staging, sharing, report)
        if built.dropped:
            log.warning("install.attributes_dropped directory=%s: %s", directory, built.dropped)
        await in_thread(self._trees.reach, directory, "verified")
        await in_thread(check_run_file, staging, resolved)
        metadata = described_by(metadata_for(resolved, request.generation, now()), artifact)
        places = [_place(uri) for uri in (artifact.uri, *built.sources)]
        elsewhere = next((place for place in reversed(places) if place != _place(resolved.uri)), "")
        return _Made(metadata=msgspec.structs.replace(metadata, fetched_from=elsewhere), blobs=tuple(own), built=built)

    async def _from_package(self, request: InstallRequest, report: ReportProgress) -> _Made:
        directory = request.resolved.directory
        await in_thread(self._make_room, directory, request.resolved.size_bytes, set())
        await in_thread(self._begin, directory)
        await self._packages.build(request.resolved, self._trees.staging_of(directory), report)
        return _Made(metadata=metadata_for(request.resolved, request.generation, now()))

    async def _from_directory(self, request: InstallRequest, report: ReportProgress) -> _Made:
        directory, staging = request.resolved.directory, self._trees.staging_of(request.resolved.directory)
        await in_thread(self._begin, directory)
        sharing = await in_thread(self._relatives, directory)
        report("extracting", request.resolved.uri, 0, 0)
        entries = DirectoryEntries(Path(parse_uri(request.resolved.uri).path), self._storage.limits.total_bytes)
        records, written = await in_thread(self._copy, entries, staging, sharing)
        await in_thread(check_run_file, staging, request.resolved)
        described = msgspec.structs.replace(request.resolved, digest=entries.digest())
        built = Built(records=records, written_bytes=written, shared_bytes=sharing.shared_bytes, sharing=sharing.how)
        return _Made(metadata=metadata_for(described, request.generation, now()), built=built)

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
        """The tree is complete, and so is what is known of it."""
        staging = self._trees.staging_of(directory)
        # Whatever an image has under that name is replaced, never written through.
        disk.remove_tree(staging / METADATA_FILE)
        (staging / METADATA_FILE).write_bytes(encode_metadata(made.metadata))
        (staging / METADATA_FILE).chmod(0o644)
        if made.built.records:
            self._storage.manifests.write(staging, made.built.records)
        version = Version(inode=staging.stat().st_ino, digest=made.metadata.digest, blobs=made.blobs)
        self._trees.reach_staged(directory, version, resolved)

    def _finish(self, directory: str) -> None:
        self._swap.finish(directory)
        self.collect()

    def _relatives(self, directory: str) -> Sharing:
        """What a new tree may share files with: its own former versions first."""
        if self._storage.may_link:
            self._separation.expect_links()
        sharing = Sharing(may_link=self._storage.may_link)
        own = {self._trees.path_of(directory), self._trees.previous_of(directory)}
        for tree, inode in sorted(self._trees.lasting_trees(), key=lambda found: found[0] not in own):
            sharing.add(tree, self._storage.manifests.read(tree), inode)
        return sharing

    def _make_room(self, directory: str, needed_bytes: int, own: set[str]) -> None:
        """Blobs are only a convenience for the next version: rather than refuse, let go of them."""
        free, wanted = disk.free_bytes(self._trees.backends), needed_bytes + SPARE_BYTES
        if free < wanted:
            self._storage.blobs.make_room(wanted - free, (self._protected() | own, own))
            free = disk.free_bytes(self._trees.backends)
        if free < wanted:
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


def _place(uri: str) -> str:
    return uri.partition("@sha256:")[0]
