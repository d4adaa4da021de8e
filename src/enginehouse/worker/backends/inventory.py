"""Lists installed backends, in a thread.

Concurrent callers share scans: one scan of the directories answers every call made before it began, so a burst of
commands on a slow disk costs two scans. Results are not cached beyond that, so an answer is never older than its call.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from enginehouse.core.backend import InstalledBackend
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.trees import Trees


class Inventory:
    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._turn = asyncio.Lock()
        self._begun = 0
        self._seen = 0
        self._latest: tuple[InstalledBackend, ...] = ()

    async def list_installed(self) -> tuple[InstalledBackend, ...]:
        wanted = self._begun + 1  # the first scan that begins after this call
        async with self._turn:
            if self._seen < wanted:
                self._begun += 1
                scan = self._begun
                self._latest = await in_thread(self._trees.list_installed)
                self._seen = scan
            return self._latest

    async def aliases(self) -> Mapping[str, tuple[str, ...]]:
        installed = await self.list_installed()
        return await in_thread(self._read_aliases, [backend.name for backend in installed if not backend.is_meta])

    async def inode_of(self, directory: str) -> int | None:
        return await in_thread(self._trees.inode_of, directory)

    def _read_aliases(self, directories: list[str]) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, list[str]] = defaultdict(list)
        for directory in directories:
            metadata = self._trees.metadata_of(directory)
            if metadata is not None and metadata.alias:
                found[metadata.alias].append(directory)
        return {alias: tuple(names) for alias, names in found.items()}
