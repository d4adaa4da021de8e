"""From an artifact to a tree: fetch, verify, inflate and write at the same time.

One thread unpacks, in the order of the layers, what the event loop puts on disk; a layer's blob counts as verified,
and keeps its name, only when its digest was checked at its end. Nothing unpacked may be shown before `build` returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.core.progress import Phase
from enginehouse.fetch.origins import Origin
from enginehouse.fetch.patience import Patience
from enginehouse.worker.blobs import Blobs
from enginehouse.worker.fetching import Fetch, Target
from enginehouse.worker.inflate import Inflating
from enginehouse.worker.partial import Following, Partial
from enginehouse.worker.sharing import FileRecord, Sharing
from enginehouse.worker.tar import TarStream
from enginehouse.worker.threads import in_own_thread, in_thread
from enginehouse.worker.unpack import Unpacker
from enginehouse.worker.unzip import unzip

Report = Callable[[Phase, str, int, int], None]  # phase, file, bytes done, bytes in all


class Built(Struct, frozen=True, kw_only=True):
    records: list[FileRecord]
    fetched_bytes: int
    reused_bytes: int
    written_bytes: int
    shared_bytes: int


class Builder:
    """Makes trees from artifacts through one store of blobs."""

    def __init__(self, blobs: Blobs, limits: ArchiveLimits, patience: Patience) -> None:
        self._blobs = blobs
        self._limits = limits
        self._patience = patience

    async def build(
        self, artifact: Artifact, origins: Sequence[Origin], tree: Path, sharing: Sharing, report: Report
    ) -> Built:
        """Fill the empty directory `tree`. Of several origins, one that sends something else gives way to the next."""
        async with self._blobs.use(artifact.layers):
            for turn in range(len(origins)):
                try:
                    return await self._attempt(artifact, origins[turn:], tree, sharing, report)
                except Hopeless as error:
                    if error.code != "digest_mismatch" or turn == len(origins) - 1:
                        raise
                    await in_thread(_empty, tree)
        raise Hopeless(f"cannot install {artifact.uri}: there is no place to fetch it from", code="invalid_uri")

    async def _attempt(
        self, artifact: Artifact, origins: Sequence[Origin], tree: Path, sharing: Sharing, report: Report
    ) -> Built:
        async with contextlib.AsyncExitStack() as opened:
            followings: list[Following] = []
            targets: list[Target] = []
            for layer in artifact.layers:
                following, target = await in_thread(self._open, layer, origins)
                opened.callback(following.close)
                followings.append(following)
                if target is not None:
                    opened.callback(target.partial.close)
                    targets.append(target)
            return await self._pull(artifact, _Pull(followings, targets, origins), tree, sharing, report)

    def _open(self, layer: Layer, origins: Sequence[Origin]) -> tuple[Following, Target | None]:
        """Where the bytes of a layer are or will be. Blocks."""
        for origin in origins:
            local = origin.local(layer)
            if local is not None:
                following = Following(local.path, local.offset_bytes, layer.size_bytes)
                following.complete()
                return following, None
        if self._blobs.has(layer):
            self._blobs.touch(layer)
            following = Following(self._blobs.path_of(layer.digest), 0, layer.size_bytes)
            following.complete()
            return following, None
        partial = Partial(self._blobs.partial_of(layer.digest), layer.size_bytes)
        following = Following(partial.path, 0, layer.size_bytes)
        return following, Target(layer=layer, partial=partial, following=following, lock=asyncio.Lock())

    async def _pull(self, artifact: Artifact, pull: _Pull, tree: Path, sharing: Sharing, report: Report) -> Built:
        held = artifact.size_bytes - sum(target.partial.size_bytes for target in pull.targets)
        resumed = sum(target.partial.done_bytes for target in pull.targets)
        stopped = threading.Event()

        def heard() -> None:
            done = held + sum(target.partial.done_bytes for target in pull.targets)
            phase: Phase = "downloading" if done < artifact.size_bytes else "extracting"
            report(phase, artifact.uri, done, artifact.size_bytes)

        def stop() -> None:
            stopped.set()
            for following in pull.followings:
                following.fail(Unavailable("cannot go on unpacking: it was cancelled", code="cancelled"))

        async def fetch() -> None:
            try:
                await Fetch(pull.targets, pull.origins, self._patience).run(heard)
            except* EnginehouseError as group:
                error = _first(group)
                for following in pull.followings:
                    following.fail(error)

        heard()
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(fetch())
            try:
                unpacked = await in_own_thread(
                    lambda: self._unpack(artifact, pull.followings, tree, sharing, stopped.is_set), stop
                )
            finally:
                fetching.cancel()  # it has ended, or what it brings is no longer wanted
        return Built(
            records=list(unpacked.records.values()),
            fetched_bytes=artifact.size_bytes - held - resumed,
            reused_bytes=held + resumed,
            written_bytes=unpacked.written_bytes,
            shared_bytes=sharing.shared_bytes,
        )

    def _unpack(
        self,
        artifact: Artifact,
        followings: Sequence[Following],
        tree: Path,
        sharing: Sharing,
        is_stopped: Callable[[], bool],
    ) -> Unpacker:
        left = self._limits.total_bytes
        with Unpacker(tree, sharing, self._limits) as unpacker:
            for layer, following in zip(artifact.layers, followings, strict=True):
                try:
                    left -= self._apply(layer, following, unpacker, left, is_stopped)
                except Hopeless as error:
                    if error.code == "digest_mismatch":
                        self._blobs.discard(layer)
                    raise
                self._blobs.promote(layer)
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
                # Bytes that were changed on their way look like a bad archive: the digest tells which it is.
                failure = error
                inflating.skip()
            inflating.check()
            if failure is not None:
                raise failure
            return inflating.plain_bytes


class _Pull(Struct, frozen=True):
    followings: Sequence[Following]
    targets: Sequence[Target]
    origins: Sequence[Origin]


def _first(group: BaseExceptionGroup[EnginehouseError]) -> EnginehouseError:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("a group has at least one exception")


def _empty(tree: Path) -> None:
    for path in tree.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
