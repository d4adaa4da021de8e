"""The blob store: blobs by digest, downloaded once, kept for later versions, collected above a cap.

Complete blobs are named by their hex digest; partial ones end in `.part` and have a journal. Every use hashes the
content again, so a damaged blob is detected and downloaded again. A build that needs a blob of another download waits
while that one makes progress; if it stalls, the build downloads a copy of its own, so a hanging registry delays only
its own images. Collection spares blobs in use and those that the caller protects (installed and previous versions).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.partial import journal_of, journalled_bytes
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import Hopeless

PART = ".part"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DEFAULT_CAP_BYTES = 20 * 1024**3
STILL_SECONDS = 1.0  # without a byte; then waiting builds download on their own, so a hang costs them no more
_LOOK_SECONDS = 0.1  # interval at which a waiting build checks the progress of the other


class Collected(Struct, frozen=True, kw_only=True):
    removed: int
    freed_bytes: int
    kept_bytes: int


class Use:
    """The access of one build to its blobs.

    Blobs that a stalled build has locked are `apart`: under private names, which are removed at the end of this use.
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of
        self._suffix = f".{uuid.uuid4().hex[:8]}"
        self._moved_at: float | None = None
        self.apart: set[str] = set()

    def moved(self) -> None:
        """Record progress: bytes have arrived, or the download starts now."""
        self._moved_at = asyncio.get_running_loop().time()

    def fetched(self) -> None:
        """Record the end of the download. The remaining work is local, cannot stall, and never counts as still."""
        self._moved_at = None

    @property
    def is_still(self) -> bool:
        return self._moved_at is not None and asyncio.get_running_loop().time() - self._moved_at > STILL_SECONDS

    def name_of(self, digest: str) -> str:
        """The name of the partial blob as `collect` derives it from the file."""
        return digest + (self._suffix if digest in self.apart else "")

    def partial_of(self, digest: str) -> Path:
        path = self._path_of(digest)
        return path.with_name(path.name + (self._suffix if digest in self.apart else "") + PART)

    def promote(self, layer: Layer) -> None:
        """Rename a partial blob to its digest, after the digest is checked. Blocks."""
        partial = self.partial_of(layer.digest)
        with contextlib.suppress(FileNotFoundError):
            partial.rename(self._path_of(layer.digest))
        journal_of(partial).unlink(missing_ok=True)

    def discard(self, layer: Layer) -> None:
        """Remove a blob whose content does not match its digest. Blocks."""
        partial = self.partial_of(layer.digest)
        for path in (self._path_of(layer.digest), partial, journal_of(partial)):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove private downloads that were not promoted."""
        for digest in self.apart:
            partial = self.partial_of(digest)
            for path in (partial, journal_of(partial)):
                path.unlink(missing_ok=True)


class BlobStore:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, asyncio.Lock] = {}
        self._holders: dict[str, Use] = {}
        self._in_use: Counter[str] = Counter()

    def path_of(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise Hopeless(f"cannot use {digest[:80]!r} as a digest: only sha256 is supported", code="unsupported")
        return self._directory / digest.removeprefix("sha256:")

    def partial_of(self, digest: str) -> Path:
        return self.path_of(digest).with_name(self.path_of(digest).name + PART)

    def has(self, layer: Layer) -> bool:
        """Whether the store has the whole blob, by its size. The content is checked on use."""
        try:
            return self.path_of(layer.digest).stat().st_size == layer.size_bytes
        except OSError:
            return False

    def held_bytes(self, layer: Layer) -> int:
        """Bytes of a blob that need no download. An estimate for plans, by file size or journal only."""
        if self.has(layer):
            return layer.size_bytes
        return journalled_bytes(self.partial_of(layer.digest), layer.size_bytes)

    @contextlib.asynccontextmanager
    async def use(self, layers: Iterable[Layer]) -> AsyncIterator[Use]:
        """Protect these blobs from collection, and lock them against a second download while this one makes progress.

        Of ten simultaneous builds, one downloads and nine find the blobs in the store.
        """
        # Locks are taken in sorted order, so that two builds with common blobs cannot deadlock.
        digests = sorted({layer.digest for layer in layers})
        use = Use(self.path_of)
        self._in_use.update(digests)
        try:
            async with contextlib.AsyncExitStack() as held:
                for digest in digests:
                    await self._hold(digest, use, held)
                self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
                yield use
        finally:
            use.end()
            self._forget([*digests, *(use.name_of(digest) for digest in use.apart)])

    async def _hold(self, digest: str, use: Use, held: contextlib.AsyncExitStack) -> None:
        """Take the lock of a blob, or mark the blob as `apart` if the holder has stalled."""
        lock = self._locks.setdefault(digest, asyncio.Lock())
        while True:
            if lock.locked() and digest in self._holders and self._holders[digest].is_still:
                use.apart.add(digest)
                self._in_use.update([use.name_of(digest)])
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await lock.acquire()
                break
        held.callback(lock.release)
        self._holders[digest] = use

    def _forget(self, names: Iterable[str]) -> None:
        names = list(names)
        self._in_use.subtract(names)
        for name in names:
            if not self._in_use[name]:
                del self._in_use[name]
                self._locks.pop(name, None)
                self._holders.pop(name, None)

    def touch(self, layer: Layer) -> None:
        """Update the time of last use; `collect` removes the least recently used blobs first."""
        with contextlib.suppress(OSError):
            os.utime(self.path_of(layer.digest))

    def collect(self, protected: Iterable[str], cap_bytes: int) -> Collected:
        """Remove the least recently used blobs until the rest fits into the cap. Blocks."""
        kept = set(protected) | set(self._in_use)
        found = sorted(self._entries(), key=lambda entry: entry[0])
        total = sum(size for _, size, _ in found)
        removed = freed = 0
        for _, size, path in found:
            digest = "sha256:" + path.name.removesuffix(PART)
            if total - freed <= cap_bytes:
                break
            if digest in kept:
                continue
            path.unlink(missing_ok=True)
            journal_of(path).unlink(missing_ok=True)
            removed += 1
            freed += size
        return Collected(removed=removed, freed_bytes=freed, kept_bytes=total - freed)

    def make_room(self, wanted_bytes: int, requests: Sequence[Iterable[str]]) -> None:
        """Free at least `wanted_bytes`, if possible. Blocks.

        Each of `requests` is a set of protected digests, tried in order from the most generous to the strictest: the
        last one is needed by the coming installation and always kept.
        """
        held = sum(size for _, size, _ in self._entries())
        goal = max(0, held - wanted_bytes)
        for protected in requests:
            if self.collect(protected, goal).kept_bytes <= goal:
                return

    def _entries(self) -> list[tuple[int, int, Path]]:
        entries: list[tuple[int, int, Path]] = []
        if not self._directory.is_dir():
            return entries
        for path in self._directory.iterdir():
            if path.name.endswith(".journal"):
                if not path.with_name(path.name.removesuffix(".journal")).exists():
                    path.unlink(missing_ok=True)
                continue
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_blocks * 512, path))
        return entries
