"""Build of a tree from an artifact: download, verify, decompress and write at the same time.

The event loop downloads blobs, and one thread unpacks them in the order of the layers. A blob is verified, and gets its
final name, only after its digest is checked at its end. The tree must not be used before `build` has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.download import Download, Fetch
from enginehouse.artifact.blobs.partial import Following, Partial
from enginehouse.artifact.blobs.store import BlobStore, Use
from enginehouse.artifact.images.inflate import Inflating
from enginehouse.artifact.images.layers import Unpacker, cancelled
from enginehouse.artifact.images.sharing import FileRecord, How, Sharing
from enginehouse.artifact.images.tar import TarStream
from enginehouse.artifact.images.zip import unzip
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless
from enginehouse.core.progress import Phase, ReportProgress
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.origins import Origin
from enginehouse.host import disk
from enginehouse.host.blocking import in_own_thread, in_thread


class Built(Struct, frozen=True, kw_only=True):
    records: list[FileRecord] = []
    fetched_bytes: int = 0
    reused_bytes: int = 0
    written_bytes: int = 0
    shared_bytes: int = 0
    sharing: How = "copy"
    dropped: str = ""  # file attributes with an effect that are not preserved
    sources: tuple[str, ...] = ()  # the origins that delivered bytes


class Builder:
    """Builds trees from artifacts, with one blob store."""

    def __init__(self, blobs: BlobStore, limits: ArchiveLimits, patience: RetryPolicy) -> None:
        self._blobs = blobs
        self._limits = limits
        self._patience = patience

    async def build(
        self, artifact: Artifact, origins: Sequence[Origin], tree: Path, sharing: Sharing, report: ReportProgress
    ) -> Built:
        """Fill the empty directory `tree`. An origin with content of another digest is replaced by the next."""
        steady = _steady(report)
        async with self._blobs.use(artifact.layers) as use:
            left = list(origins)
            while True:
                pull = _Pull(artifact=artifact, origins=left, tree=tree, sharing=sharing, use=use)
                try:
                    return await self._attempt(pull, steady)
                except Hopeless as error:
                    if error.code != "digest_mismatch":
                        raise
                    # A damaged local copy is not the origin's fault. It is removed by now, so the origin is kept.
                    if pull.spoilt not in pull.kept:
                        left = left[1:]
                    if not left:
                        raise
                await in_thread(_empty, tree)

    async def _attempt(self, pull: _Pull, report: ReportProgress) -> Built:
        async with contextlib.AsyncExitStack() as opened:
            await in_thread(self._open, pull, opened)
            return await self._pull(pull, report)

    def _open(self, pull: _Pull, opened: contextlib.AsyncExitStack) -> None:
        """Open a reader per layer and a download per missing blob (one for a layer that occurs twice). Blocks."""
        for layer in pull.artifact.layers:
            target = pull.targets.get(layer.digest)
            complete = None if target is not None else self._complete(layer, pull)
            if complete is None and target is None:
                partial = Partial(pull.use.partial_of(layer.digest), layer.size_bytes)
                opened.callback(partial.close)
                if partial.resumed_bytes:
                    pull.kept.add(layer.digest)
                target = Download(layer=layer, partial=partial, followings=[], lock=asyncio.Lock())
                pull.targets[layer.digest] = target
            path, offset = complete or (pull.use.partial_of(layer.digest), 0)
            following = Following(path, offset, layer.size_bytes)
            opened.callback(following.close)
            pull.followings.append(following)
            if complete is not None:
                following.complete()
            elif target is not None:
                target.followings.append(following)

    def _complete(self, layer: Layer, pull: _Pull) -> tuple[Path, int] | None:
        for origin in pull.origins:
            local = origin.local(layer)
            if local is not None:
                return local.path, local.offset_bytes
        if not self._blobs.has(layer):
            return None
        self._blobs.touch(layer)
        pull.kept.add(layer.digest)
        return self._blobs.path_of(layer.digest), 0

    async def _pull(self, pull: _Pull, report: ReportProgress) -> Built:
        uri, total = pull.artifact.uri, pull.artifact.size_bytes
        partials = [target.partial for target in pull.targets.values()]
        held = total - sum(partial.size_bytes for partial in partials)
        shared_before = pull.sharing.shared_bytes
        fetch = Fetch(list(pull.targets.values()), pull.origins, self._patience)
        stopped = threading.Event()

        def heard() -> None:
            pull.use.moved()
            done = held + sum(partial.done_bytes for partial in partials)
            report("downloading" if done < total else "extracting", uri, done, total)

        def fail(error: EnginehouseError | OSError) -> None:
            for following in pull.followings:
                following.fail(error)

        def stop() -> None:
            stopped.set()
            fail(cancelled())

        async def run() -> None:
            try:
                await fetch.run(heard)
            except* (EnginehouseError, OSError) as group:
                # The readers raise it, so that the error has a single path to the caller.
                fail(_first(group))
            finally:
                pull.use.fetched()

        heard()
        failure: EnginehouseError | OSError | None = None
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(run())
            try:
                unpacked = await in_own_thread(lambda: self._unpack(pull, stopped.is_set), stop)
            except (EnginehouseError, OSError) as error:
                failure = error
            finally:
                fetching.cancel()  # it has ended, or its result is not needed any more
        if failure is not None:
            raise failure
        resumed = sum(partial.resumed_bytes for partial in partials)
        return Built(
            records=list(unpacked.records.values()),
            fetched_bytes=total - held - resumed,
            reused_bytes=held + resumed,
            written_bytes=unpacked.written_bytes,
            shared_bytes=pull.sharing.shared_bytes - shared_before,
            sharing=pull.sharing.how,
            dropped=str(unpacked.dropped),
            sources=tuple(fetch.sources),
        )

    def _unpack(self, pull: _Pull, is_stopped: Callable[[], bool]) -> Unpacker:
        left = self._limits.total_bytes
        with Unpacker(pull.tree, pull.sharing, self._limits) as unpacker:
            for layer, following in zip(pull.artifact.layers, pull.followings, strict=True):
                try:
                    left -= self._apply(layer, following, unpacker, left, is_stopped)
                except Hopeless as error:
                    if error.code == "digest_mismatch":
                        pull.spoilt = layer.digest
                        pull.use.discard(layer)
                    raise
                pull.use.promote(layer)
            unpacker.finish()
        return unpacker

    def _apply(
        self, layer: Layer, source: Following, unpacker: Unpacker, allowed_bytes: int, is_stopped: Callable[[], bool]
    ) -> int:
        if layer.form == "zip":
            return unzip(layer, source, unpacker, self._limits, is_stopped)
        with Inflating(layer, source, self._limits, allowed_bytes) as inflating:
            failure: Hopeless | None = None
            try:
                unpacker.apply(TarStream(inflating.next_buffer), is_stopped)
            except Hopeless as error:
                if error.code != "unsafe_archive":
                    raise
                # Corrupted bytes look like an invalid archive; the digest decides which of the two it is.
                failure = error
                inflating.skip()
            inflating.check()
            if failure is not None:
                raise failure
            return inflating.plain_bytes


class _Pull(Struct, kw_only=True):
    """One attempt of a build. `kept` are the digests with bytes from before the attempt."""

    artifact: Artifact
    origins: Sequence[Origin]
    tree: Path
    sharing: Sharing
    use: Use
    followings: list[Following] = []
    targets: dict[str, Download] = {}
    kept: set[str] = set()
    spoilt: str = ""  # digest of the blob whose content did not match


def _steady(report: ReportProgress) -> ReportProgress:
    """Make progress monotonic: bytes and phases never go back, also when a blob is downloaded again."""
    most, is_over = 0, False

    def steady(phase: Phase, file: str, done: int, total: int) -> None:
        nonlocal most, is_over
        most, is_over = max(most, done), is_over or phase == "extracting"
        report("extracting" if is_over else phase, file, most, total)

    return steady


def _first(group: BaseExceptionGroup[EnginehouseError | OSError]) -> EnginehouseError | OSError:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")


def _empty(tree: Path) -> None:
    for path in tree.iterdir():
        disk.remove_tree(path)
