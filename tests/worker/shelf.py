"""What tests of installing install: small images in a registry behind a proxy with misfortunes, and an installer.

    async with shelf(registry, tmp_path) as one:
        image = await one.publish("engine:1", [{"run.sh": launcher("one")}])
        installed = await one.install(one.request("engine:1"))

Images are made for this machine; `backends` is an empty directory of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from tests.fetch.faulty import Faulty, faulty
from tests.fetch.images import Compression, Image, write_image
from tests.fetch.real_registry import Registry
from tests.worker.world import nothing

from enginehouse.build_worker import make_installation, open_local
from enginehouse.core.backend import Resolved
from enginehouse.core.installation import METADATA_FILE, Metadata, decode_metadata
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.host import hardware
from enginehouse.worker.backends.installation import Installation, InstallerOptions
from enginehouse.worker.backends.installer import Installed, InstallRequest
from enginehouse.worker.backends.listing import LocalBackend
from enginehouse.worker.backends.plan import InstallPlan, plan

DIRECTORY = "engine"
Tree = dict[str, tuple[int, bytes]]


def launcher(text: str) -> bytes:
    return f"#!/bin/sh\necho {text}\n".encode()


def noise(size: int, seed: int = 4) -> bytes:
    return random.Random(seed).randbytes(size)


def tree_of(root: Path) -> Tree:
    """Names, modes and contents; without the metadata, which have the time in them."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name != METADATA_FILE:
            content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b"/"
            found[name] = (path.lstat().st_mode, content)
    return found


def said_by(tree: Path) -> str:
    """What its launcher says; it must run."""
    return subprocess.run([tree / "run.sh"], check=True, capture_output=True, text=True, timeout=20).stdout.strip()


class Shelf:
    def __init__(self, registry: Registry, proxy: Faulty, directory: Path, options: InstallerOptions) -> None:
        self.registry = registry
        self.proxy = proxy
        self.directory = directory
        self.backends = options.backends
        self.options = options
        self.assembled = make_installation(options, os.environ)
        self._opened = [self.assembled]
        self.progress: list[tuple[str, int, int]] = []

    @property
    def worker(self) -> Path:
        return self.assembled.trees.private

    @property
    def tree(self) -> Path:
        return self.backends / DIRECTORY

    async def publish(
        self,
        name: str,
        layers: Sequence[Mapping[str, bytes] | bytes],
        *,
        compression: Compression = "gzip",
        platform: str = "",
    ) -> Image:
        """An image in the registry under a name of this test's own."""
        place = self.directory / "images" / name.replace("/", "-").replace(":", "-")
        image = write_image(place, layers, compression=compression, platform=platform or hardware.platform())
        await self.registry.push(place, self.named(name))
        return image

    def named(self, name: str) -> str:
        return f"{self.directory.name.lower().replace('_', '-')}/{name}"

    def resolved(self, name: str, **fields: object) -> Resolved:
        known = Resolved(directory=DIRECTORY, uri=self.proxy.reference(self.named(name)), digest="")
        return msgspec.structs.replace(known, **fields)

    def request(self, name: str, *, force: bool = False, upgrade: bool = True, **fields: object) -> InstallRequest:
        return InstallRequest(resolved=self.resolved(name, **fields), force=force, upgrade=upgrade)

    def report(self, phase: str, file: str, done: int, total: int) -> None:
        self.progress.append((phase, done, total))

    async def install(self, request: InstallRequest) -> Installed:
        return await self.assembled.installer.install(request, self.report, nothing)

    async def plan(self, name: str, **fields: object) -> InstallPlan:
        return await plan(self.assembled, self.resolved(name, **fields))

    def metadata(self) -> Metadata:
        found = decode_metadata((self.tree / METADATA_FILE).read_bytes())
        assert found is not None
        return found

    def again(self, **options: object) -> Installation:
        """A new process, as it were: everything remembered in memory is gone."""
        self.assembled = make_installation(msgspec.structs.replace(self.options, **options), os.environ)
        self._opened.append(self.assembled)
        self.assembled.installer.recover()
        return self.assembled

    def residue(self) -> list[str]:
        """What must never be left: trees that are neither installed nor previous, and records of unfinished work."""
        places = ("staging", "replaced")
        left = [path.name for place in places for path in (self.worker / place).glob("*")]
        left += [path.name for path in (self.worker / "state").glob(".*")]
        names = [path.stem for path in (self.worker / "state").glob("*.json")]
        return left + [name for name in names if self.assembled.trees.record(name).step != "cleaned"]

    def blobs(self, suffix: str = "") -> list[str]:
        return sorted(path.name for path in (self.worker / "blobs").glob(f"*{suffix}"))

    async def close(self) -> None:
        for assembled in self._opened:
            await assembled.close()


@asynccontextmanager
async def shelf(registry: Registry, directory: Path, **options: object) -> AsyncIterator[Shelf]:
    known = InstallerOptions(
        backends=directory / "backends",
        allowed_hosts=("127.0.0.1",),
        patience=RetryPolicy(factor=0.01),
        stall_seconds=20.0,
        may_link=True,  # as on a machine whose engines are confined
    )
    async with faulty(registry.address) as proxy:
        made = Shelf(registry, proxy, directory, msgspec.structs.replace(known, **options))
        try:
            yield made
        finally:
            await made.close()


def five_layers(changed: int = -1, text: str = "one") -> list[dict[str, bytes]]:
    layers = [{f"lib/{number}.so": noise(60_000, number + 100 * (number == changed))} for number in range(5)]
    layers[0]["run.sh"] = launcher(text)
    return layers


async def listed(one: Shelf) -> dict[str, LocalBackend]:
    async with open_local(one.options, os.environ, doing="list", is_locked=False) as local:
        return {backend.name: backend for backend in local.list_backends()}


def write_metadata(directory: Path, **fields: str) -> None:
    """As LocalAI writes it."""
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    (directory / METADATA_FILE).write_text(json.dumps(fields, indent=2))


def write_backend(directory: Path, text: str, **fields: str) -> None:
    directory.mkdir(mode=0o750, parents=True, exist_ok=True)
    (directory / "run.sh").write_bytes(launcher(text))
    (directory / "run.sh").chmod(0o755)
    if fields:
        write_metadata(directory, **fields)
