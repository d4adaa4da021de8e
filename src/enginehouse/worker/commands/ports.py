"""The parts that actions use, as narrow protocols: backends and models on disk, processes, the journal of commands.

Each protocol has only the methods that `Actions`, the executor and the listener call. Blocking work is behind an
awaitable, so callers never need a thread for a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.ids import IntentId
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model, PinnedFile
from enginehouse.core.peer import FilePeer
from enginehouse.core.progress import ReportProgress
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.worker.backends.installer import Installed, InstallRequest, Swapped
from enginehouse.worker.engines.process_table import EndedProcess, Started, StartRequest, Stopped

LookUp = Callable[[str], Awaitable[Sequence[Gallery]]]  # loads the galleries that a Go frontend's message names


class BackendInventory(Protocol):
    """Lists the installed backends."""

    async def list_installed(self) -> tuple[InstalledBackend, ...]: ...

    async def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """The directories of each alias."""

    async def inode_of(self, directory: str) -> int | None:
        """The inode of a tree; it differs from that of a tree that replaced it. None if there is no tree."""


class BackendInstaller(Protocol):
    """Installs and removes backends. Callers hold the lock of the directory."""

    async def install(self, request: InstallRequest, report: ReportProgress, swapped: Swapped) -> Installed:
        """A cancellation before the swap leaves the old version; a later one takes effect when the install is done."""

    async def remove(self, directory: str) -> None: ...


class ModelStorage(Protocol):
    """The files of models. Callers hold the lock of the model."""

    async def pull(
        self, model: Model, generation: int | None, report: ReportProgress, peers: Sequence[FilePeer] = ()
    ) -> tuple[PinnedFile, ...]:
        """Place the files, from `peers` where they have them; returns the digests of those for which the model has
        none.
        """

    async def restore(self, model: Model, report: ReportProgress) -> None: ...

    async def remove(self, name: str) -> bool:
        """Remove a model's files, and return whether there were any."""


class EngineSupervisor(Protocol):
    """The engine processes."""

    def running(self) -> tuple[RunningReplica, ...]: ...

    def find(self, process_key: str) -> RunningReplica | None: ...

    async def start(self, request: StartRequest, report: ReportProgress) -> Started: ...

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        """Wait until no request is in progress, at most `limit_seconds`; return whether that is so."""

    async def stop(self, process_key: str) -> EndedProcess | None:
        """Stop a process; None if there is none. Raises `Unavailable` if it does not end."""

    async def stop_from(self, directory: str, *, kept: Collection[int] = (), newest: int | None = None) -> Stopped: ...

    async def stop_model(self, model: str) -> Stopped: ...

    async def stop_all(self) -> Stopped: ...


class CommandJournal(Protocol):
    """Seen generations and results of commands; synced when a call returns."""

    def check(self, subject: str, command: Command) -> None: ...

    async def accept(self, subject: str, command: Command) -> None: ...

    def generation_of(self, subject: str) -> int: ...

    async def record(self, result: CommandResult) -> None: ...

    def result_of(self, intent: IntentId, attempt: int) -> Outcome | None: ...


class CommandPorts(Struct, frozen=True, kw_only=True):
    trees: BackendInventory
    installer: BackendInstaller
    models: ModelStorage
    supervisor: EngineSupervisor
    journal: CommandJournal
    look_up: LookUp
