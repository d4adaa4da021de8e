"""The disk of one machine: what survives a kill, what survives a power cut, and what was seen working on it.

A tree is there as a whole or not at all. One that was put in place and not synced yet is gone after a power cut, and
the one before is back, as where the sync itself fails; a kill of the worker loses nothing that was written. The
journal's lines are synced one by one, so only the line being written can be torn. Any write and any sync may meet a
full disk or an I/O error, any read an I/O error. The engine processes of the machine are here too: they live on no
disk, and no longer than their worker.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from random import Random

from msgspec import Struct
from msgspec.structs import replace
from tests.sim.ledgers import WorkerChecks
from tests.sim.options import METAS
from tests.sim.trace import Trace

from enginehouse.core.action import subject_of
from enginehouse.core.backend import InstalledBackend, Resolved
from enginehouse.core.model import HeldModel
from enginehouse.core.wire import Command
from enginehouse.worker.commands.journal import Journal
from enginehouse.worker.commands.work import Work
from enginehouse.worker.engines.process_table import StartRequest

WORK: ContextVar[Work | None] = ContextVar("work", default=None)  # what the current task was asked to do
ENDED: ContextVar[list[str]] = ContextVar("ended")  # the engines that were stopped for it


def _with(metas: tuple[str, ...], meta: str) -> tuple[str, ...]:
    return metas if not meta or meta in metas else (*metas, meta)


class DiskWeather(Struct):
    full_rate: float = 0.0
    error_rate: float = 0.0
    read_error_rate: float = 0.0


class Tree(Struct, frozen=True):
    digest: str
    generation: int
    inode: int
    metas: tuple[str, ...] = ()  # the names that lead to it


class Engine(Struct):
    """A live process, and the tree that it was started from."""

    request: StartRequest
    inode: int
    nonce: str
    address: str = ""
    checks_key: bool = True
    memory_bytes: int = 0


class Disk:
    def __init__(self, name: str, trace: Trace, checks: WorkerChecks, weather: DiskWeather, chance: Random) -> None:
        self.name = name
        self.trace = trace
        self.checks = checks
        self.weather = weather
        self.chance = chance
        self.trees: dict[str, Tree] = {}
        self._synced: dict[str, Tree] = {}
        self._refused: set[str] = set()  # what the disk did not keep and that is not undone yet
        self.models: dict[str, HeldModel] = {}
        self.engines: dict[str, Engine] = {}
        self.journal = b""
        self._inodes = 0
        self.on_end: list[Callable[[Engine], None]] = []

    # Trees ----------------------------------------------------------------------------------------

    def list_installed(self) -> tuple[InstalledBackend, ...]:
        """A tree that cannot be read is there all the same, and called broken; the directory is read or it is not."""
        self.check_read("the backends")
        found: list[InstalledBackend] = []
        unsynced = self._unsynced()
        for directory, tree in sorted(self.trees.items()):
            if not self.is_readable(directory):
                found.append(InstalledBackend(name=directory, is_system=False, is_meta=False, is_broken=True))
                continue
            found.append(
                InstalledBackend(
                    name=directory,
                    is_system=False,
                    is_meta=False,
                    digest=tree.digest,
                    generation=tree.generation,
                    is_unsettled=directory in unsynced,
                )
            )
            found += [
                InstalledBackend(name=meta, is_system=False, is_meta=True, meta_backend_for=directory)
                for meta in tree.metas
            ]
        return tuple(found)

    def inode_of(self, directory: str) -> int | None:
        tree = self.trees.get(directory)
        return None if tree is None else tree.inode

    def metadata_of(self, directory: str) -> None:
        """No alias is ever installed here."""

    def forget_generations(self) -> None:
        self.check_write()
        self.trees = {directory: replace(tree, generation=0) for directory, tree in self.trees.items()}
        self._synced = {directory: replace(tree, generation=0) for directory, tree in self._synced.items()}
        self.checks.forgotten()

    def note_generation(self, directory: str, generation: int, meta: str) -> None:
        self.check_room()
        tree = self.trees[directory]
        noted = replace(tree, generation=max(tree.generation, generation), metas=_with(tree.metas, meta))
        self._synced[directory] = self.trees[directory] = noted
        self.checks.became(f"synced:{directory}", tree.digest)
        self.trace.note(self.name, f"disk: {directory} is wanted by generation {generation} as well {meta}")
        self._note_pointers(directory)
        self.checks.took_effect(f"backend:{directory}", self.trees[directory].digest)

    def swap(self, resolved: Resolved, generation: int) -> int:
        """Usable from now on, and safe after `sync`."""
        self.check_room()
        self._inodes += 1
        before = self.trees.get(resolved.directory)
        metas = _with(before.metas if before is not None else (), resolved.meta)
        self.trees[resolved.directory] = Tree(resolved.digest, generation, self._inodes, metas)
        self._note_pointers(resolved.directory)
        self.trace.note(self.name, f"disk: {resolved.directory} is {resolved.digest[7:13]} by generation {generation}")
        self.checks.took_effect(f"backend:{resolved.directory}", resolved.digest)
        return self._inodes

    def _note_pointers(self, directory: str) -> None:
        """Which names lead to it from now on."""
        tree = self.trees.get(directory)
        for meta in METAS:
            self.checks.became(f"pointer:{meta}", directory if tree is not None and meta in tree.metas else "")

    def sync(self, directory: str) -> None:
        self.check_write()
        self._synced[directory] = self.trees[directory]
        self.checks.became(f"synced:{directory}", self.trees[directory].digest)

    def refuse(self, directory: str) -> None:
        """A sync has failed: whatever the next one says, this tree is undone, at once or with the next command."""
        self._refused.add(directory)
        self.check_write()
        self.undo(directory)

    def settle(self, directory: str) -> None:
        if directory in self._refused:
            self.refuse(directory)

    def undo(self, directory: str) -> None:
        """The tree that was there before an unsynced one is back."""
        before = self._synced.get(directory)
        self._refused.discard(directory)
        self.trees.pop(directory)
        if before is not None:
            self.trees[directory] = before
        self._note_pointers(directory)
        self.trace.note(self.name, f"disk: {directory} is {before.digest[7:13] if before else 'gone'} again")
        self.checks.became(f"backend:{directory}", before.digest if before else "")

    def recover(self) -> None:
        """What a killed worker left in place is made to last, or undone."""
        for directory in self._unsynced():
            self.check_read(f"how far {directory} is")
            if directory in self._refused:
                self.undo(directory)
                continue
            try:
                self.sync(directory)
            except OSError:
                self.undo(directory)

    def _unsynced(self) -> list[str]:
        return [directory for directory, tree in self.trees.items() if self._synced.get(directory) != tree]

    def remove(self, directory: str) -> None:
        self.check_write()
        self.trees.pop(directory, None)
        self._synced.pop(directory, None)
        self._refused.discard(directory)
        self.checks.became(f"synced:{directory}", "")
        self._note_pointers(directory)
        self.trace.note(self.name, f"disk: {directory} is gone")
        self.checks.took_effect(f"backend:{directory}", "")

    def check_room(self) -> None:
        """Before what makes files larger."""
        if self.weather.full_rate and self.chance.random() < self.weather.full_rate:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.check_write()

    def check_write(self) -> None:
        """Before any change: nothing of it is done where it fails."""
        if self.weather.error_rate and self.chance.random() < self.weather.error_rate:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def check_read(self, what: str) -> None:
        """Before a read that is not survived by guessing: whoever asked must say so."""
        if not self.is_readable(what):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def is_readable(self, what: str) -> bool:
        rate = self.weather.read_error_rate
        if rate and self.chance.random() < rate:
            self.trace.note(self.name, f"disk: cannot read {what}")
            return False
        return True

    # Models and engines ---------------------------------------------------------------------------

    def hold_model(self, held: HeldModel) -> None:
        self.check_room()
        self.models[held.name] = held
        self.trace.note(self.name, f"disk: has the files of {held.name}")
        self.checks.took_effect(f"model:{held.name}", "held")

    def drop_model(self, name: str) -> bool:
        self.check_write()
        was_there = self.models.pop(name, None) is not None
        self.trace.note(self.name, f"disk: no files of {name}")
        self.checks.took_effect(f"model:{name}", "")
        return was_there

    def begin_engine(self, request: StartRequest, inode: int) -> Engine:
        self._inodes += 1
        engine = Engine(request, inode, f"{self.name}-{request.process_key}-{self._inodes}")
        self.engines[request.process_key] = engine
        self.trace.note(self.name, f"engine {engine.nonce} runs from {request.directory}")
        self.checks.became(f"replica:{request.process_key}", engine.nonce)
        return engine

    def end_engine(self, key: str) -> bool:
        engine = self.engines.pop(key, None)
        if engine is not None:
            self.trace.note(self.name, f"engine {engine.nonce} has ended")
            self.checks.became(f"replica:{key}", "")
            for tell in self.on_end:
                tell(engine)
        return engine is not None

    def check_unused(
        self, what: str, *, directory: str = "", model: str = "", but_inodes: Collection[int] = ()
    ) -> None:
        """Nothing may be taken away from an engine that runs: of a directory, but for some trees, or of a model."""
        using = [
            engine.nonce
            for engine in self.engines.values()
            if (engine.request.directory == directory or engine.request.model.name == model)
            and engine.inode not in but_inodes
        ]
        self.checks.judge("G6", f"{directory or model} was {what} while {using} ran from it" if using else "")

    # Misfortune -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """The worker is gone; the kernel has every byte that it wrote."""
        for key in list(self.engines):
            self.end_engine(key)
        self.checks.stopped()
        if self.chance.random() < 0.3:
            self.journal += b'{"subject":"backend:al'

    def power_cut(self) -> None:
        self.kill()
        for directory in self._unsynced():
            self.undo(directory)

    @contextmanager
    def working(self, subject: str) -> Iterator[None]:
        """Around everything that changes what `subject` is about."""
        work = WORK.get()
        # A start that places missing files again works on the files of its model, under a number of its own.
        is_its_own = work is not None and subject_of(work.action) == subject
        command = work.command if work is not None and is_its_own else None
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


class SimJournal(Journal):
    """The real journal; only its bytes are elsewhere."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(Path())
        self._disk = disk

    def _read(self) -> bytes:
        self._disk.check_read("the journal")
        return self._disk.journal

    def _truncate(self, length: int) -> None:
        self._disk.check_write()
        self._disk.journal = self._disk.journal[:length]

    def _replace(self, content: bytes) -> None:
        self._disk.check_room()
        self._disk.journal = content

    def check(self, subject: str, command: Command) -> None:
        super().check(subject, command)
        self._disk.checks.passed(subject, command)

    def _write(self, content: bytes) -> None:
        self._disk.check_room()
        self._disk.journal += content
        self._disk.checks.journalled(content)
