"""Engines of both protocols for tests of the supervisor: whatever holds for one holds for the other."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
from tests.engine.localai import stub_backend
from tests.engine.openai import stub_engine
from tests.worker.world import KEY, World, tiny_chat

from enginehouse.core.replica import LOCALAI_GRPC, OPENAI_HTTP, EngineProtocol
from enginehouse.worker.engines.process_table import StartRequest

KINDS: tuple[EngineProtocol, ...] = (OPENAI_HTTP, LOCALAI_GRPC)


def write_engine(tree: Path, kind: EngineProtocol, **behaviour: object) -> Path:
    """An installed engine; `behaviour` as in `stub_backend.begin`."""
    write = stub_engine.write_tree if kind == OPENAI_HTTP else stub_backend.write_tree
    return write(tree, **behaviour)


def start_of(directory: str = "stub", *options: str, model: str = "tiny-chat", key: str = KEY) -> StartRequest:
    config = {"options": [f"stub.{one}" for one in options]}
    made = msgspec.structs.replace(tiny_chat(), name=model, backend=directory, config=config)
    return StartRequest(model=made, slot=0, directory=directory, key=key, generation=1)


def engines_of(world: World) -> list[psutil.Process]:
    """The processes that have the nonce of a running engine of this worker, whoever their parent is."""
    from enginehouse.host import processes

    nonces = [one.nonce for one in world.supervisor.running()]
    return [psutil.Process(pid) for nonce in nonces for pid, _ in processes.processes_with_nonce(nonce)]
