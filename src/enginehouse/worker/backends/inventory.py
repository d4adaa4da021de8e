"""What is installed, looked at off the loop.

However many ask at once, one look at the directories answers all who asked before it began: a burst of commands on a
slow disk costs two looks. Nothing is remembered beyond that, so an answer is never older than its question.
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
        wanted = self._begun + 1  # the first look that begins after this question
        async with self._turn:
            if self._seen < wanted:
                self._begun += 1
                look = self._begun
                self._latest = await in_thread(self._trees.list_installed)
                self._seen = look
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
