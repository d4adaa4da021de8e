"""The disk of one machine: what survives a kill, what survives a power cut, and what was seen working on it.

A tree is there as a whole or not at all. One that was put in place and not synced yet is gone after a power cut, and
the one before is back; a kill of the worker loses nothing that was written. The journal's lines are synced one by one,
so only the line being written can be torn.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from random import Random
from typing import cast

from msgspec import Struct
from msgspec.structs import replace
from tests.sim.invariants import WorkerChecks
from tests.sim.trace import Trace

from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.model import HeldModel
from enginehouse.core.wire import Command
from enginehouse.worker.commands import Work
from enginehouse.worker.journal import Journal

WORK: ContextVar[Work | None] = ContextVar("work", default=None)  # what the current task was asked to do


class DiskWeather(Struct):
    full_rate: float = 0.0


class Tree(Struct, frozen=True):
    digest: str
    generation: int
    inode: int
    meta: str = ""


class Disk:
    def __init__(self, name: str, trace: Trace, checks: WorkerChecks, weather: DiskWeather, chance: Random) -> None:
        self.name = name
        self.trace = trace
        self.checks = checks
        self.weather = weather
        self.chance = chance
        self.trees: dict[str, Tree] = {}
        self._synced: dict[str, Tree] = {}
        self.models: dict[str, HeldModel] = {}
        self.journal = b""
        self._inodes = 0

    # Trees ----------------------------------------------------------------------------------------

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        found: list[InstalledBackend] = []
        for directory, tree in sorted(self.trees.items()):
            found.append(
                InstalledBackend(
                    name=directory, is_system=False, is_meta=False, digest=tree.digest, generation=tree.generation
                )
            )
            if tree.meta:
                found.append(
                    InstalledBackend(name=tree.meta, is_system=False, is_meta=True, meta_backend_for=directory)
                )
        return tuple(found)

    def inode_of(self, directory: str) -> int | None:
        tree = self.trees.get(directory)
        return None if tree is None else tree.inode

    def metadata_of(self, directory: str) -> None:
        """No alias is ever installed here."""

    def forget_generations(self) -> None:
        self.trees = {directory: replace(tree, generation=0) for directory, tree in self.trees.items()}
        self._synced = {directory: replace(tree, generation=0) for directory, tree in self._synced.items()}
        self.checks.forgotten()

    def note_generation(self, directory: str, generation: int) -> None:
        self.check_room()
        tree = self.trees[directory]
        self._synced[directory] = self.trees[directory] = replace(tree, generation=max(tree.generation, generation))
        self.trace.note(self.name, f"disk: {directory} is wanted by generation {generation} as well")
        self.checks.took_effect(f"backend:{directory}", self.trees[directory].digest)

    def swap(self, resolved: Resolved, generation: int) -> int:
        """Usable from now on, and safe after `sync`."""
        self.check_room()
        self._inodes += 1
        self.trees[resolved.directory] = Tree(resolved.digest, generation, self._inodes, resolved.meta)
        self.trace.note(self.name, f"disk: {resolved.directory} is {resolved.digest[7:13]} by generation {generation}")
        self.checks.took_effect(f"backend:{resolved.directory}", resolved.digest)
        return self._inodes

    def sync(self, directory: str) -> None:
        self._synced[directory] = self.trees[directory]

    def remove(self, directory: str) -> None:
        self.trees.pop(directory, None)
        self._synced.pop(directory, None)
        self.trace.note(self.name, f"disk: {directory} is gone")
        self.checks.took_effect(f"backend:{directory}", "")

    def check_room(self) -> None:
        if self.weather.full_rate and self.chance.random() < self.weather.full_rate:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # Misfortune -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """The worker is gone; the kernel has every byte that it wrote."""
        self.checks.stopped()
        if self.chance.random() < 0.3:
            self.journal += b'{"subject":"backend:al'

    def power_cut(self) -> None:
        self.kill()
        self.trees = dict(self._synced)

    @contextmanager
    def working(self, subject: str) -> Iterator[None]:
        """Around everything that changes what `subject` is about."""
        work = WORK.get()
        command = work.command if work is not None else None
        self.trace.note(self.name, f"begins {subject} {_shown(work)}")
        token = self.checks.begin(subject, command)
        try:
            yield
        finally:
            self.checks.end(subject, token)
            self.trace.note(self.name, f"ends {subject} {_shown(work)}")


def _shown(work: Work | None) -> str:
    if work is None or work.command is None:
        return "without a command"
    command = work.command
    return f"{command.intent[:8]} generation {command.generation} attempt {command.attempt} fence {command.fence}"


class JournalFile:
    """As much of a path as the journal needs."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def read_bytes(self) -> bytes:
        return self._disk.journal

    def replace(self, content: bytes) -> None:
        self._disk.check_room()
        self._disk.journal = content

    def truncate(self, length: int) -> None:
        self._disk.journal = self._disk.journal[:length]


def write_atomic(path: JournalFile | Path, content: bytes, mode: int = 0o644) -> None:
    """For what the worker writes whole: its journal. The rest nobody reads here."""
    if isinstance(path, JournalFile):
        path.replace(content)


class SimJournal(Journal):
    """The real journal; only its bytes are elsewhere."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(Path())
        self._path = cast(Path, JournalFile(disk))
        self._disk = disk

    def check(self, subject: str, command: Command) -> None:
        super().check(subject, command)
        self._disk.checks.passed(subject, command)

    def _write(self, content: bytes) -> None:
        self._disk.check_room()
        self._disk.journal += content
        self._disk.checks.journalled(content)
