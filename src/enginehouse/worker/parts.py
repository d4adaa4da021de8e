"""The parts of an agent as narrow protocols. `build_worker.make_parts` builds the real ones.

Each protocol extends one of `commands.ports` with only the methods that the agent itself calls: for recovery at start,
for reports and for shutdown. The simulation passes in-memory parts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol

from msgspec import Struct

from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.model import HeldModel
from enginehouse.core.node_api import RegisterReply, RegisterRequest
from enginehouse.core.replica import FailedReplica
from enginehouse.core.report import CommandResult
from enginehouse.loop import Signal
from enginehouse.worker.commands.executor import Executor
from enginehouse.worker.commands.ports import (
    BackendInstaller,
    BackendInventory,
    CommandJournal,
    CommandPorts,
    EngineSupervisor,
    LookUp,
    ModelStorage,
)


class Machine(Protocol):
    """The resources of this machine, implemented by `host.hardware`. `capacity` blocks."""

    def capacity(self, directory: Path, /) -> Capacity: ...

    def capability(self) -> str: ...

    def platform(self) -> str: ...


class Signer(Protocol):
    """Signs registrations to prove the node's identity."""

    def signed(self, request: RegisterRequest) -> RegisterRequest: ...


class NodeFiles(Protocol):
    """The files that hold the worker's identity. All methods block."""

    def load_identity(self) -> Signer:
        """Load the node's key; the first start creates it."""

    def write_node(self, node: RegisterReply) -> None:
        """Record the node's ID and name, for people and programs on this machine."""

    def was_accepted(self) -> bool:
        """Whether this worker was ever accepted as a node here."""

    def write_waiting(self, reason: str) -> None:
        """Record why this worker is not joined, for people and programs on this machine; "" once it is."""


class Generations(Protocol):
    def forget_generations(self) -> None:
        """Reset all generations, because the worker became another node, which counts from one. Blocks."""


class AgentInstaller(BackendInstaller, Protocol):
    def recover(self) -> None:
        """Finish or undo the interrupted work of a killed worker. Blocks."""


class AgentModels(ModelStorage, Protocol):
    def recover(self) -> None: ...

    def held_models(self) -> tuple[HeldModel, ...]: ...


class AgentJournal(CommandJournal, Protocol):
    node_id: NodeId

    def load(self) -> None: ...

    async def belong_to(self, node_id: NodeId) -> bool: ...

    def results(self) -> tuple[CommandResult, ...]: ...


class AgentSupervisor(EngineSupervisor, Protocol):
    async def __aenter__(self) -> object: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def listen_on(self, host: str) -> None: ...

    def restarting(self) -> tuple[str, ...]:
        """The replicas, by process key, that this worker is about to start again by itself."""

    def failed(self) -> tuple[FailedReplica, ...]:
        """The replicas that were given up because their engine ended again and again."""

    def tidy(self) -> None: ...

    async def measure(self) -> None: ...

    async def until_all_idle(self, limit_seconds: float) -> None:
        """Wait until no engine is answering, at most `limit_seconds`."""


class HttpServer(Protocol):
    """The worker's own HTTP server, for files and logs."""

    async def listen(self, host: str) -> int:
        """Serve at a host of this machine, and return the port; 0 if it cannot. Another host replaces the first."""

    def joined(self, node: RegisterReply) -> None:
        """Note at which frontend this worker is, and with which token."""

    def heard(self, mark: float, *, is_bus_away: bool) -> None:
        """Note the store's time and whether commands reach this worker."""

    async def close(self) -> None: ...


class NoHttpServer:
    """A worker that serves no HTTP."""

    async def listen(self, host: str) -> int:
        return 0

    def joined(self, node: RegisterReply) -> None:
        pass

    def heard(self, mark: float, *, is_bus_away: bool) -> None:
        pass

    async def close(self) -> None:
        pass


async def _nothing() -> None:
    pass


class AgentParts(Struct, frozen=True, kw_only=True):
    machine: Machine
    node_files: NodeFiles
    generations: Generations
    inventory: BackendInventory
    installer: AgentInstaller
    models: AgentModels
    supervisor: AgentSupervisor
    journal: AgentJournal
    executor: Executor
    look_up: LookUp
    changed: Signal  # set when the next report would differ from the last one
    http_server: HttpServer = NoHttpServer()
    close: Callable[[], Awaitable[None]] = _nothing

    @property
    def ports(self) -> CommandPorts:
        return CommandPorts(
            trees=self.inventory,
            installer=self.installer,
            models=self.models,
            supervisor=self.supervisor,
            journal=self.journal,
            look_up=self.look_up,
        )
