"""Installs backends: build in staging, verify, swap in, sync.

The old version is replaced only after the new one is verified, in place and synced; it is then kept as the previous
version. A failure before that leaves the old version in place, and only verified parts of blobs are kept. Success is
reported only after the sync. The installer stops no processes: it calls `swapped` between the swap and the sync, and
the caller stops them there. Callers hold the lock of the directory.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.artifact.blobs.store import DEFAULT_CAP_BYTES, BlobStore, Collected
from enginehouse.artifact.images.build import Builder, Built
from enginehouse.artifact.images.contents import SPARE_BYTES
from enginehouse.artifact.images.directories import DirectoryEntries
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import FileRecord, How, Manifests, Sharing
from enginehouse.artifact.origins import Suppliers
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Artifact
from enginehouse.core.backend import Resolved, change_note, check_resolved, is_version
from enginehouse.core.errors import Unavailable
from enginehouse.core.installation import (
    METADATA_FILE,
    Metadata,
    Version,
    check_directory,
    described_by,
    encode_metadata,
    is_wanted,
    is_wanted_exactly,
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
Swapped = Callable[[], Awaitable[None]]  # called after the swap and before the sync; the old tree still exists


class InstallRequest(Struct, frozen=True, kw_only=True):
    resolved: Resolved
    generation: int = 0
    force: bool = False
    keep: bool = False  # any installed version is sufficient
    upgrade: bool = False  # check the source for a newer version even if the requested one is installed


class Installed(Struct, frozen=True, kw_only=True):
    """The installed version, and the statistics of the install."""

    digest: str
    changed: bool = True
    note: str = ""  # what changed, in words
    fetched_bytes: int = 0
    reused_bytes: int = 0
    written_bytes: int = 0
    shared_bytes: int = 0
    dropped: str = ""  # names of significant file attributes that were not kept
    sharing: How = "copy"  # how identical files of other versions were shared


class Storage(Struct, frozen=True, kw_only=True):
    """The storage of one backends directory and its limits."""

    trees: Trees
    blobs: BlobStore
    manifests: Manifests
    limits: ArchiveLimits = ArchiveLimits()
    cap_bytes: int = DEFAULT_CAP_BYTES
    may_link: bool = False  # engines cannot write to a tree


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
        """Install what `request` asks for. Idempotent: an installed version only has its generation updated."""
        resolved = _checked(request.resolved)
        try:
            self._trees.pointers.check(resolved)
            # An interrupted earlier install is finished or undone first.
            await in_thread(self._swap.settle, resolved.directory)
            known = await in_thread(self._trees.metadata_of, resolved.directory)
            if (
                known is not None
                and not request.force
                and (request.keep or is_wanted(known, resolved, request.upgrade))
            ):
                return await self._keep(request, known, known)
            if await self._return(request, known, swapped):
                now_at = await in_thread(self._trees.metadata_of, resolved.directory)
                return Installed(digest=resolved.digest, note=_note(known, now_at))
            # Only now: a tree that is here already was checked when it was built.
            _check_source(resolved)
            return await self._replace(request, known, report, swapped)
        except OSError as error:
            raise disk.storage_error(error, f"install {resolved.directory}") from error

    async def _return(self, request: InstallRequest, known: Metadata | None, swapped: Swapped) -> bool:
        """Swap the previous version back in if it is the requested one: nothing is fetched. The replaced version
        becomes the previous one.
        """
        directory = request.resolved.directory
        previous = await in_thread(self._trees.previous_metadata, directory)
        if request.force or known is None or previous is None or not is_wanted_exactly(previous, request.resolved):
            return False
        generation = max(known.generation, previous.generation, request.generation)
        fresh = msgspec.structs.replace(previous, generation=generation)
        try:
            await in_thread(self._swap.return_to, directory, fresh)
        finally:
            # One step swaps the trees. A cancellation that comes meanwhile takes effect after the rest is done.
            if await in_thread(self._is_current, directory, fresh):
                await swapped()
                await in_thread(self._trees.pointers.point, request.resolved)
        return True

    def _is_current(self, directory: str, wanted: Metadata) -> bool:
        found = self._trees.metadata_of(directory)
        return found is not None and (found.digest, found.generation) == (wanted.digest, wanted.generation)

    async def roll_back(self, directory: str, swapped: Swapped) -> Metadata:
        """Swap the previous version back in, without network access. A second call undoes the first."""
        try:
            metadata = await in_thread(self._swap.roll_back, check_directory(directory))
            await swapped()
            return metadata
        except OSError as error:
            raise disk.storage_error(error, f"roll {directory} back") from error

    async def remove(self, directory: str) -> None:
        """Remove a backend and the meta names that point to it. Idempotent."""
        try:
            gone = await in_thread(self._swap.remove, directory)
            await in_thread(self._storage.manifests.forget, gone)
        except OSError as error:
            raise disk.storage_error(error, f"delete {directory}") from error

    def recover(self) -> None:
        """Finish or undo interrupted installs. Called before anything else. Blocks."""
        self._swap.recover()
        self._forget()
        if not self._storage.may_link:
            try:
                copied = self._separation.separate()
            except OSError as error:
                log.warning("files.not_separated error=%s", error)
            else:
                if copied:
                    log.info("files.separated count=%d reason=%r", copied, "engines can write to their trees")

    def collect(self, cap_bytes: int | None = None) -> Collected:
        """Remove blobs that no version needs until the rest fits into the cap. Blocks."""
        self._forget()
        return self._storage.blobs.collect(
            self._protected(), self._storage.cap_bytes if cap_bytes is None else cap_bytes
        )

    async def _keep(self, request: InstallRequest, known: Metadata, seen: Metadata) -> Installed:
        """Keep the installed version, and update its metadata to what the source reports."""
        fresh = msgspec.structs.replace(seen, generation=max(known.generation, request.generation))
        if fresh != known:
            await in_thread(self._trees.note, request.resolved.directory, fresh)
        resolved = (
            msgspec.structs.replace(request.resolved, version=known.version) if request.keep else request.resolved
        )
        await in_thread(self._trees.pointers.point, resolved)
        return Installed(digest=fresh.digest, changed=False, note=_note(fresh, fresh))

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
                    # A swap would replace the previous version by a second copy of this one.
                    return await self._keep(request, known, msgspec.structs.replace(known, uri=resolved.uri))
            else:
                artifact, origins = await self._suppliers.resolve(resolved)
                if known is not None and not request.force and is_version(known.digest, artifact):
                    return await self._keep(request, known, described_by(known, artifact))
                made = await self._from_artifact(request, artifact, origins, report)
            await self._switch(directory, made, resolved, swapped)
        finally:
            await in_thread(self._swap.discard, directory)
        return Installed(
            digest=made.metadata.digest,
            note=_note(None if request.force and _is_same(known, made.metadata) else known, made.metadata),
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
            # After the swap only the disk can fail. A cancellation takes effect after the install is finished.
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
        # A lower bound: a tree is at least as large as its compressed layers. The build checks the rest as it goes.
        needed = missing + max(artifact.size_bytes, resolved.size_bytes)
        await in_thread(self._make_room, directory, needed, set(own))
        await in_thread(self._begin, directory)
        sharing = await in_thread(self._relatives, directory)
        staging = self._trees.staging_of(directory)
        built = await self._builder.build(artifact, origins, staging, sharing, report)
        if built.dropped:
            log.warning("install.attributes_dropped directory=%s attributes=%r", directory, built.dropped)
        await in_thread(self._trees.reach, directory, "verified")
        await in_thread(check_run_file, staging, resolved)
        metadata = described_by(metadata_for(resolved, request.generation, now()), artifact)
        sources = [_without_digest(uri) for uri in (artifact.uri, *built.sources)]
        mirror = next((uri for uri in reversed(sources) if uri != _without_digest(resolved.uri)), "")
        return _Made(metadata=msgspec.structs.replace(metadata, fetched_from=mirror), blobs=tuple(own), built=built)

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
        """Write the metadata, the manifest and the record of a complete tree in staging."""
        staging = self._trees.staging_of(directory)
        # An entry of that name in the image is replaced; a link is never followed.
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
        """The trees a new tree may share files with; other versions of the same backend come first."""
        if self._storage.may_link:
            self._separation.expect_links()
        sharing = Sharing(may_link=self._storage.may_link)
        own = {self._trees.path_of(directory), self._trees.previous_of(directory)}
        for tree, inode in sorted(self._trees.lasting_trees(), key=lambda found: found[0] not in own):
            sharing.add(tree, self._storage.manifests.read(tree), inode)
        return sharing

    def _make_room(self, directory: str, needed_bytes: int, own: set[str]) -> None:
        """Free disk space for an install. Blobs only speed up the next install, so they are removed before it fails."""
        free, wanted = disk.free_bytes(self._trees.backends), needed_bytes + SPARE_BYTES
        if free < wanted:
            self._storage.blobs.make_room(wanted - free, (self._protected() | own, own))
            free = disk.free_bytes(self._trees.backends)
        if free < wanted:
            raise Unavailable(
                f"cannot install {directory}: it needs {needed_bytes // 2**20 + 1} MiB, "
                f"{free // 2**20} MiB free; free some space, it is retried automatically",
                code="insufficient_disk",
            )

    def _protected(self) -> set[str]:
        names = {path.name for path in self._trees.every_tree()}
        return {digest for name in names for one in self._trees.record(name).versions for digest in one.blobs}

    def _forget(self) -> None:
        self._storage.manifests.prune(self._trees.every_tree())


def _note(before: Metadata | None, after: Metadata | None) -> str:
    was = (before.version, before.digest) if before is not None else None
    return change_note(was, (after.version, after.digest)) if after is not None else ""


def _is_same(known: Metadata | None, made: Metadata) -> bool:
    return known is not None and (known.version, known.digest) == (made.version, made.digest)


def _checked(resolved: Resolved) -> Resolved:
    """The bus is not trusted: names are checked before any change."""
    check_resolved(resolved)
    check_directory(resolved.directory)
    if resolved.meta:
        check_directory(resolved.meta)
    return resolved


def _check_source(resolved: Resolved) -> None:
    """A digest of packages covers everything that determines their files, so a wrong one is refused."""
    if parse_uri(resolved.uri).kind == "package":
        check_described(resolved)


def _without_digest(uri: str) -> str:
    return uri.partition("@sha256:")[0]
