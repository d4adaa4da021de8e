"""Blobs by their digest: fetched once, kept for the next version, collected under a cap.

Complete ones are named by their hex digest, partial ones end in `.part` and have a journal. Every use hashes the bytes
again, so a damaged blob is found out and fetched anew instead of being trusted. Collecting never takes what is in use
or what the caller protects: the blobs of installed and previous versions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

from msgspec import Struct

from enginehouse.core.artifact import Layer
from enginehouse.core.errors import Hopeless
from enginehouse.worker.partial import journal_of, journalled_bytes

PART = ".part"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DEFAULT_CAP_BYTES = 20 * 1024**3


class Collected(Struct, frozen=True, kw_only=True):
    removed: int
    freed_bytes: int
    kept_bytes: int


class Blobs:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._locks: dict[str, asyncio.Lock] = {}
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
    async def use(self, layers: Iterable[Layer]) -> AsyncIterator[None]:
        """While inside, nobody else fetches these blobs and nobody collects them: of ten who ask at once, one fetches
        and nine find them here."""
        # Always in one order, so that two who want the same blobs never wait for each other crosswise.
        digests = sorted({layer.digest for layer in layers})
        self._in_use.update(digests)
        try:
            async with contextlib.AsyncExitStack() as held:
                for digest in digests:
                    await held.enter_async_context(self._locks.setdefault(digest, asyncio.Lock()))
                self._directory.mkdir(mode=0o750, parents=True, exist_ok=True)
                yield
        finally:
            self._in_use.subtract(digests)
            for digest in digests:
                if not self._in_use[digest]:
                    del self._in_use[digest]
                    self._locks.pop(digest, None)

    def promote(self, layer: Layer) -> None:
        """A partial blob whose digest was checked gets its name. Blocks."""
        partial = self.partial_of(layer.digest)
        with contextlib.suppress(FileNotFoundError):
            partial.rename(self.path_of(layer.digest))
        journal_of(partial).unlink(missing_ok=True)

    def discard(self, layer: Layer) -> None:
        """Bytes that turned out not to be what their name says. Blocks."""
        partial = self.partial_of(layer.digest)
        for path in (self.path_of(layer.digest), partial, journal_of(partial)):
            path.unlink(missing_ok=True)

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

    def make_room(self, wanted_bytes: int, wishes: Sequence[Iterable[str]]) -> None:
        """Give back at least so many bytes, if there are as many. Blocks.

        Each of `wishes` is what would rather be kept, the last one what must be: it is used in a moment.
        """
        held = sum(size for _, size, _ in self._entries())
        goal = max(0, held - wanted_bytes)
        for protected in wishes:
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
