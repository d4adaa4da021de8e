"""Blobs by their digest: fetched once, kept for the next version, collected under a cap.

Complete ones are named by their hex digest, partial ones end in `.part` and have a journal. Every use hashes the bytes
again, so a damaged blob is found out and fetched anew instead of being trusted. Who wants a blob that another fetches
waits for it as long as that one moves, and else fetches it beside: a registry that hangs holds up only its own images.
Collecting never takes what is in use or what the caller protects: the blobs of installed and previous versions.
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
STILL_SECONDS = 1.0  # without a byte, and whoever waits for that fetch goes on alone: nothing hung may cost others more
_LOOK_SECONDS = 0.1  # how often one who waits looks whether the other still moves


class Collected(Struct, frozen=True, kw_only=True):
    removed: int
    freed_bytes: int
    kept_bytes: int


class Use:
    """One build's way to its blobs. Those it does not hold, because the one who does stands still, are `apart`: fetched
    under names of its own, which end with it.
    """

    def __init__(self, path_of: Callable[[str], Path]) -> None:
        self._path_of = path_of
        self._suffix = f".{uuid.uuid4().hex[:8]}"
        self._moved_at: float | None = None
        self.apart: set[str] = set()

    def moved(self) -> None:
        """Bytes have come, or are waited for from now on."""
        self._moved_at = asyncio.get_running_loop().time()

    def fetched(self) -> None:
        """Nothing is waited for any more: what is left is work of this machine, which ends by itself."""
        self._moved_at = None

    @property
    def is_still(self) -> bool:
        return self._moved_at is not None and asyncio.get_running_loop().time() - self._moved_at > STILL_SECONDS

    def name_of(self, digest: str) -> str:
        """What a collector calls the partial blob."""
        return digest + (self._suffix if digest in self.apart else "")

    def partial_of(self, digest: str) -> Path:
        path = self._path_of(digest)
        return path.with_name(path.name + (self._suffix if digest in self.apart else "") + PART)

    def promote(self, layer: Layer) -> None:
        """A partial blob whose digest was checked gets its name. Blocks."""
        partial = self.partial_of(layer.digest)
        with contextlib.suppress(FileNotFoundError):
            partial.rename(self._path_of(layer.digest))
        journal_of(partial).unlink(missing_ok=True)

    def discard(self, layer: Layer) -> None:
        """Bytes that turned out not to be what their name says. Blocks."""
        partial = self.partial_of(layer.digest)
        for path in (self._path_of(layer.digest), partial, journal_of(partial)):
            path.unlink(missing_ok=True)

    def end(self) -> None:
        """What was fetched beside and did not become a blob is of use to nobody."""
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
            raise Hopeless(f"cannot use {digest[:80]!r} as a digest: only sha256 is understood", code="unsupported")
        return self._directory / digest.removeprefix("sha256:")

    def partial_of(self, digest: str) -> Path:
        return self.path_of(digest).with_name(self.path_of(digest).name + PART)

    def has(self, layer: Layer) -> bool:
        """Whether the whole blob is here; its content is checked when it is used."""
        try:
            return self.path_of(layer.digest).stat().st_size == layer.size_bytes
        except OSError:
            return False

    def held_bytes(self, layer: Layer) -> int:
        """How much of a blob need not be fetched: by its size or by its journal alone, so for plans."""
        if self.has(layer):
            return layer.size_bytes
        return journalled_bytes(self.partial_of(layer.digest), layer.size_bytes)

    @contextlib.asynccontextmanager
    async def use(self, layers: Iterable[Layer]) -> AsyncIterator[Use]:
        """While inside, nobody collects these blobs, and as long as it moves nobody else fetches them: of ten who ask
        at once, one fetches and nine find them here."""
        # Always in one order, so that two who want the same blobs never wait for each other crosswise.
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
        """Take the lock of a blob, unless its holder stands still."""
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
        """Used now: the least recently used go first."""
        with contextlib.suppress(OSError):
            os.utime(self.path_of(layer.digest))

    def collect(self, protected: Iterable[str], cap_bytes: int) -> Collected:
        """Remove the least recently used until the rest fits into the cap. Blocks."""
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
        """Give back at least so many bytes, if there are as many. Blocks.

        Each of `requests` is what would rather be kept, the last one what must be: it is used in a moment.
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
