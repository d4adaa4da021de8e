"""What actions act on, as narrow protocols: the backends and models on disk, the processes, the memory of commands.

Each names only what `Actions` and the listener call, so that both run on any parts that keep these promises. Whatever
blocks is behind an awaitable: nothing above goes to a thread for the sake of a part.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.gallery import Gallery
from enginehouse.core.intent import Outcome
from enginehouse.core.model import Model
from enginehouse.core.progress import ReportProgress
from enginehouse.core.replica import RunningReplica
from enginehouse.core.report import CommandResult
from enginehouse.core.wire import Command
from enginehouse.worker.backends.installer import Installed, InstallRequest, Swapped
from enginehouse.worker.engines.process_table import Started, StartRequest, Stopped

LookUp = Callable[[str], Awaitable[Sequence[Gallery]]]  # the galleries that a message of a Go frontend names


class BackendInventory(Protocol):
    """What is installed."""

    async def list_installed(self) -> tuple[InstalledBackend, ...]: ...

    async def aliases(self) -> Mapping[str, tuple[str, ...]]:
        """The directories that each alias may mean."""

    async def inode_of(self, directory: str) -> int | None:
        """What tells a tree from the one that replaced it under the same name; None where there is none."""


class BackendInstaller(Protocol):
    """Changes what is installed. Callers hold the lock of the directory."""

    async def install(self, request: InstallRequest, report: ReportProgress, swapped: Swapped) -> Installed:
        """A cancellation before the swap changes nothing; after it, everything is finished before it is heard."""

    async def remove(self, directory: str) -> None: ...


class ModelStorage(Protocol):
    """The files of models. Callers hold the lock of the model."""

    async def pull(self, model: Model, generation: int | None, report: ReportProgress) -> None: ...

    async def restore(self, model: Model, report: ReportProgress) -> None: ...

    async def remove(self, name: str) -> bool:
        """Whether anything was there."""


class EngineSupervisor(Protocol):
    """The engine processes."""

    def running(self) -> tuple[RunningReplica, ...]: ...

    def find(self, process_key: str) -> RunningReplica | None: ...

    async def start(self, request: StartRequest) -> Started: ...

    async def until_idle(self, process_key: str, limit_seconds: float) -> bool:
        """Wait until nobody is being answered, at most so long; whether that is so."""

    async def stop(self, process_key: str) -> bool:
        """Whether there was one; `Unavailable` where it does not end."""

    async def stop_from(self, directory: str, *, but_inode: int | None = None) -> Stopped: ...

    async def stop_model(self, model: str) -> Stopped: ...

    async def stop_all(self) -> Stopped: ...


class CommandJournal(Protocol):
    """What was seen and done: on disk when a call returns."""

    def check(self, subject: str, command: Command) -> None: ...

    async def accept(self, subject: str, command: Command) -> None: ...

    def generation_of(self, subject: str) -> int: ...

    async def record(self, result: CommandResult) -> None: ...

    def result_of(self, intent: str, attempt: int) -> Outcome | None: ...


class CommandPorts(Struct, frozen=True, kw_only=True):
    trees: BackendInventory
    installer: BackendInstaller
    models: ModelStorage
    supervisor: EngineSupervisor
    journal: CommandJournal
    look_up: LookUp
