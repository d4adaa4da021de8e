"""The types of the supervisor's process table, and the records on disk by which the next worker finds leftovers."""

from __future__ import annotations

import asyncio
import asyncio.subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from enginehouse.core.model import Model
from enginehouse.core.replica import LOCALAI_GRPC, OPENAI_HTTP, EngineProtocol, RunningReplica, process_key
from enginehouse.host import disk
from enginehouse.ports import EngineTarget


class StartRequest(Struct, frozen=True, kw_only=True):
    model: Model
    slot: int
    directory: str
    key: str
    generation: int = 0
    process_only: bool = False  # a LocalAI frontend loads the model itself

    @property
    def process_key(self) -> str:
        return process_key(self.model.name, self.slot)


class Started(Struct, frozen=True):
    address: str
    nonce: str
    checks_key: bool = True
    protocol: EngineProtocol = OPENAI_HTTP


class Stopped(Struct, frozen=True):
    """The result of stopping several processes: the keys of the stopped ones and of those that did not end."""

    keys: tuple[str, ...] = ()
    survivors: tuple[str, ...] = ()


class EndedProcess(Struct, frozen=True):
    """The result of stopping one process. `freed` is None if its engine has no call to release a model."""

    freed: bool | None = None


class Running(Struct, kw_only=True):
    """One live process. `is_stopping` is set before the first signal, so that its end counts as expected."""

    request: StartRequest
    inode: int | None  # of the tree at the start; a different one means that the tree was replaced
    address: str
    port: int
    nonce: str
    process: asyncio.subprocess.Process
    log: Path
    threads: int = 1
    is_ready: bool = False
    freed: bool | None = None  # whether it released its model when it was stopped; None if it was not asked to
    checks_key: bool = False  # known once it is ready
    is_stopping: bool = False
    is_outdated: bool = False  # its tree was replaced since the start
    memory_bytes: int = 0  # the most that was seen
    # The protocols that the process may speak, the likely one first; one once it has answered.
    protocols: tuple[EngineProtocol, ...] = (LOCALAI_GRPC, OPENAI_HTTP)

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None and not self.is_stopping

    def serves(self, request: StartRequest, inode: int | None) -> bool:
        """Whether this process already fulfils `request`."""
        return (
            self.is_alive
            and self.is_ready
            and inode is not None
            and (self.request.key, self.request.model.revision, self.request.directory, self.inode)
            == (request.key, request.model.revision, request.directory, inode)
        )

    @property
    def started(self) -> Started:
        return Started(self.address, self.nonce, self.checks_key, self.protocols[0])

    @property
    def targets(self) -> tuple[EngineTarget, ...]:
        return tuple(
            EngineTarget(address=self.address, key=self.request.key, protocol=protocol) for protocol in self.protocols
        )

    def report(self) -> RunningReplica:
        return RunningReplica(
            model_id=self.request.model.name,
            replica_index=self.request.slot,
            address=self.address,
            nonce=self.nonce,
            backend=self.request.directory,
            revision=self.request.model.revision,
            generation=self.request.generation,
            checks_key=self.checks_key,
            protocol=self.protocols[0],
            memory_bytes=self.memory_bytes,
            outdated=self.is_outdated,
        )


def is_at(replica: RunningReplica, address: str) -> bool:
    """Whether a replica has an address: its advertised one, or the loopback one that LocalAI's workers report."""
    port = replica.address.rpartition(":")[2]
    return address == replica.address or address in (f"127.0.0.1:{port}", f"localhost:{port}", f"[::1]:{port}")


class Record(Struct, frozen=True, kw_only=True):
    """What the next worker needs to find the process if this worker is killed. Written before the process exists."""

    nonce: str
    process_key: str
    directory: str
    pid: int = 0
    started: float = 0.0


class Records:
    """Files below `processes/`, named by nonce: the record and, until the engine is ready, the description with its
    key.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def write(self, record: Record) -> None:
        disk.write_atomic(self._directory / f"{record.nonce}.json", msgspec.json.encode(record), mode=0o600)

    def describe(self, nonce: str, description: dict[str, object]) -> Path:
        path = self._directory / f"{nonce}.model"
        disk.write_atomic(path, msgspec.json.encode(description), mode=0o600)
        return path

    def forget_description(self, nonce: str) -> None:
        (self._directory / f"{nonce}.model").unlink(missing_ok=True)

    def remove(self, nonce: str) -> None:
        self.forget_description(nonce)
        (self._directory / f"{nonce}.json").unlink(missing_ok=True)

    def nonces(self) -> list[str]:
        """The nonces of processes that an earlier run may have left. Taken from file names: contents may be damaged."""
        return sorted({path.stem for path in self._directory.iterdir() if path.suffix in (".json", ".model")})
