"""Replicas: one backend process with one model loaded, and the worker's key for it.

A replica is identified by node, model and slot; its process by a nonce, because addresses are reused.
"""

from __future__ import annotations

from typing import Literal, Protocol

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.ids import NodeId

# What the process of a backend speaks: OpenAI's HTTP, or LocalAI's gRPC service.
EngineProtocol = Literal["openai-http", "localai-grpc"]
OPENAI_HTTP: EngineProtocol = "openai-http"
LOCALAI_GRPC: EngineProtocol = "localai-grpc"


class Replica(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A ready replica. `nonce` identifies the process, so a restarted one is never mistaken for the old one."""

    node_id: NodeId
    model: str
    slot: int
    revision: str
    address: str
    nonce: str
    backend: str
    key: str = ""
    checks_key: bool = True  # whether its engine refuses requests without the key
    protocol: EngineProtocol = OPENAI_HTTP
    # The model as it was loaded, in JSON, where requests are translated by its configuration; else "".
    definition: str = ""


class RunningReplica(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One live process as a worker reports it: `models.running` with our additive fields."""

    model_id: str
    replica_index: int
    address: str = ""
    nonce: str = ""
    backend: str = ""
    revision: str = ""
    generation: int = 0
    checks_key: bool = True  # of its engine
    protocol: EngineProtocol = OPENAI_HTTP
    memory_bytes: int = 0  # the most that its processes were seen to hold, rounded up; 0 if unknown
    outdated: bool = False  # its backend was replaced by another version since it was started


class StartedProcess(Protocol):
    """What a frontend knows of a process that it had started: a replica's row, or a route."""

    @property
    def model(self) -> str: ...
    @property
    def slot(self) -> int: ...
    @property
    def address(self) -> str: ...
    @property
    def nonce(self) -> str: ...


def is_process(running: RunningReplica, replica: StartedProcess) -> bool:
    """Whether a reported process is that of a replica. LocalAI's workers report no nonces and their own loopback
    address, so model, slot and port are compared there.
    """
    if running.nonce:
        return running.nonce == replica.nonce
    is_slot = (running.model_id, running.replica_index) == (replica.model, replica.slot)
    return is_slot and (not running.address or port_of(running.address) == port_of(replica.address))


def port_of(address: str) -> str:
    return address.rpartition(":")[2]


class FailedReplica(Struct, frozen=True):
    """A replica that its worker has given up because its engine ended again and again."""

    model_id: str
    replica_index: int
    message: str


def process_key(model: str, slot: int) -> str:
    return f"{model}#{slot}"


def parse_process_key(key: str) -> tuple[str, int]:
    """Split at the last `#`, because model names may contain it."""
    model, sign, slot = key.rpartition("#")
    # Nine digits suffice for any slot; `int` refuses numbers of thousands of digits.
    if not sign or not model or not (slot.isascii() and slot.isdecimal() and len(slot) <= 9):
        raise Invalid(f"cannot read {key!r} as a process key: it must be MODEL#INDEX", code="invalid_name")
    return model, int(slot)
