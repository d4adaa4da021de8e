"""A file leaves its source once, however many nodes want it: the others read it from the first. Real workers, one of
which is killed, stopped or wrong in the middle.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Flip
from tests.fetch.faulty import Faulty
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving, ask
from tests.fleet.warehouse import Warehouse

from enginehouse.core.model import Model, ModelFile

MEBIBYTE = 1024 * 1024
THREE = ("worker-1", "worker-2", "worker-3")


class Hub:
    """The source of model files outside of the fleet, which counts what leaves it."""

    def __init__(self, warehouse: Warehouse) -> None:
        self._warehouse = warehouse
        self._server = warehouse.proxy
        self._paths: list[str] = []

    def offer(self, name: str, mebibytes: int) -> ModelFile:
        content = os.urandom(MEBIBYTE) * mebibytes
        path = f"/hub/{name}.gguf"
        self._paths.append(path)
        self._server.files[path] = content
        digest = hashlib.sha256(content).hexdigest()
        return ModelFile(f"{name}.gguf", f"{self._server.url}{path}", digest, len(content))

    @property
    def server(self) -> Faulty:
        return self._server

    def sent(self, file: ModelFile) -> int:
        return self._server.bytes_sent(f"/hub/{file.name}")

    def close(self) -> None:
        for path in self._paths:
            self._server.files.pop(path, None)


@pytest.fixture
def hub(warehouse: Warehouse) -> Iterator[Hub]:
    made = Hub(warehouse)
    yield made
    made.close()


@pytest.fixture
def backend(serving: Serving, name: str, fleet: Fleet) -> str:
    serving.offer(name, "one")
    fleet.done("install", name, THREE)
    return name


def add(fleet: Fleet, model: str, backend: str, file: ModelFile) -> None:
    definition = msgspec.json.encode(Model(name=model, backend=backend, files=(file,))).decode()
    fleet.rows("insert into models (name, definition, created_at) values (%s, %s, 0)", model, definition)


def load(fleet: Fleet, model: str, worker: str) -> dict[str, Any]:
    found: dict[str, Any] = fleet.first.post(f"/api/models/{model}/load", {"node": worker})
    return found


def place(fleet: Fleet, worker: str, model: str, file: ModelFile) -> Path:
    return fleet.root / worker / "models" / model / file.name


def has(fleet: Fleet, worker: str, model: str, file: ModelFile) -> bool:
    path = place(fleet, worker, model, file)
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256


def succeeded(fleet: Fleet, operation: dict[str, Any]) -> None:
    ended = fleet.ended(operation)
    assert ended["status"] == "succeeded", ended


def unload(fleet: Fleet, model: str) -> None:
    fleet.ended(fleet.first.delete(f"/api/models/{model}"))


def test_three_nodes_at_once_take_a_file_from_outside_once(
    fleet: Fleet, hub: Hub, serving: Serving, backend: str
) -> None:
    file = hub.offer("once", 48)
    add(fleet, "once", backend, file)
    hub.server.bytes_per_second = 24 * MEBIBYTE
    for operation in [load(fleet, "once", worker) for worker in THREE]:
        succeeded(fleet, operation)
    assert hub.sent(file) == file.size_bytes, "it left the source once"
    assert all(has(fleet, worker, "once", file) for worker in THREE)
    assert ask(fleet.second.port, serving.token, "once")[0] == 200
    unload(fleet, "once")


def partly(fleet: Fleet, worker: str, file: ModelFile) -> Callable[[], bool]:
    part = fleet.root / worker / "models" / ".downloads" / f"{file.sha256}.part"
    return lambda: part.exists() and part.stat().st_blocks * 512 > MEBIBYTE


@pytest.mark.parametrize("fate", ["killed", "stopped"])
def test_a_peer_that_ends_in_the_middle_costs_only_what_is_missing(
    fleet: Fleet, hub: Hub, backend: str, fate: str
) -> None:
    model = f"cut-{fate}"
    file = hub.offer(model, 200)
    add(fleet, model, backend, file)
    succeeded(fleet, load(fleet, model, "worker-1"))
    before = hub.sent(file)
    assert before == file.size_bytes
    operation = load(fleet, model, "worker-2")
    wait_for("the transfer to be under way", partly(fleet, "worker-2", file))
    if fate == "killed":
        fleet.workers["worker-1"].kill()
    else:
        fleet.workers["worker-1"].pause()
    succeeded(fleet, operation)
    assert has(fleet, "worker-2", model, file)
    again = hub.sent(file) - before
    assert 0 < again < file.size_bytes, "from the source, and only what the peer had not given"
    fleet.mend()
    unload(fleet, model)


def test_a_peer_with_other_bytes_does_no_harm(fleet: Fleet, hub: Hub, backend: str) -> None:
    file = hub.offer("lied", 24)
    add(fleet, "lied", backend, file)
    succeeded(fleet, load(fleet, "lied", "worker-1"))
    path = place(fleet, "worker-1", "lied", file)
    status = path.stat()
    # Its disk goes bad: other bytes under the same size and time, which the worker cannot see.
    with path.open("r+b") as broken:
        broken.seek(MEBIBYTE)
        broken.write(b"other bytes")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    succeeded(fleet, load(fleet, "lied", "worker-2"))
    assert has(fleet, "worker-2", "lied", file)
    assert "peer.gave_other_bytes" in fleet.log_of("worker-2")
    assert hub.sent(file) == 2 * file.size_bytes
    # The next one has an honest peer beside the broken one.
    succeeded(fleet, load(fleet, "lied", "worker-3"))
    assert has(fleet, "worker-3", "lied", file)
    assert hub.sent(file) == 2 * file.size_bytes
    unload(fleet, "lied")


def test_while_the_source_is_gone_a_peer_is_enough(fleet: Fleet, hub: Hub, backend: str) -> None:
    file = hub.offer("gone", 8)
    add(fleet, "gone", backend, file)
    succeeded(fleet, load(fleet, "gone", "worker-1"))
    hub.close()
    hub.server.plan(Flip(), path="/hub/gone", times=None)
    succeeded(fleet, load(fleet, "gone", "worker-2"))
    assert has(fleet, "worker-2", "gone", file)
    unload(fleet, "gone")
