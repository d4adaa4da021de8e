"""Builds an installer with everything around it, for the agent and for commands that need no cluster.

One process at a time works on a backends directory: whoever assembles holds its lock until `close`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.store import DEFAULT_CAP_BYTES, BlobStore
from enginehouse.artifact.images.sharing import Manifests
from enginehouse.artifact.suppliers import Suppliers
from enginehouse.core.archive import ArchiveLimits
from enginehouse.fetch.http.client import Client, Rules
from enginehouse.fetch.http.patience import RetryPolicy
from enginehouse.fetch.pypi import Limits, Python
from enginehouse.fetch.registry.requests import Registries
from enginehouse.host import disk, hardware, processes
from enginehouse.host.confinement import NONE, Confinement
from enginehouse.worker.backends.installer import Installer, Storage
from enginehouse.worker.backends.python_packages import Packages
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.engines.enclosures import Enclosures


class InstallerOptions(Struct, frozen=True, kw_only=True):
    backends: Path
    system: Path | None = None  # backends that came with the machine
    allowed_hosts: tuple[str, ...] = ()
    registry_credentials: Mapping[str, str] = {}
    limits: ArchiveLimits = ArchiveLimits()
    cap_bytes: int = DEFAULT_CAP_BYTES
    stall_seconds: float = 120.0
    patience: RetryPolicy = RetryPolicy()
    data: Path | None = None  # what engines must not see; None is where the backends are
    hidden: tuple[Path, ...] = ()  # and what else
    confinement: Confinement = NONE
    may_link: bool = False  # nobody but confined engines uses the trees, so that versions may share files


class Assembled(Struct, frozen=True, kw_only=True):
    trees: Trees
    blobs: BlobStore
    installer: Installer
    suppliers: Suppliers
    python: Python
    client: Client
    enclosures: Enclosures

    async def close(self) -> None:
        await self.client.close()


def assemble(options: InstallerOptions, environment: Mapping[str, str]) -> Assembled:
    rules = Rules(options.allowed_hosts)
    client = Client(rules, stall_seconds=options.stall_seconds)
    registries = Registries(
        rules, environment=environment, credentials=options.registry_credentials, patience=options.patience
    )
    python = Python(
        environment,
        limits=Limits(stall_seconds=options.stall_seconds),
        before_exec=processes.die_with_parent(),
    )
    trees = Trees(options.backends, options.system)
    storage = Storage(
        trees=trees,
        blobs=BlobStore(trees.private / "blobs"),
        manifests=Manifests(trees.private / "files"),
        limits=options.limits,
        cap_bytes=options.cap_bytes,
        may_link=options.may_link,
    )
    suppliers = Suppliers(client, registries, hardware.platform())
    enclosures = Enclosures(options.data or options.backends.parent, options.confinement, options.hidden)
    installer = Installer(storage, suppliers, Packages(python, environment, enclosures))
    return Assembled(
        trees=trees,
        blobs=storage.blobs,
        installer=installer,
        suppliers=suppliers,
        python=python,
        client=client,
        enclosures=enclosures,
    )


def lock(backends: Path, doing: str) -> disk.Lock:
    """Refused while another process works on the directory."""
    private = Trees(backends).private
    with disk.naming_the_culprit(backends, "--backends-path"):
        backends.mkdir(parents=True, exist_ok=True)
        private.mkdir(mode=0o750, exist_ok=True)
    return disk.Lock(private / "lock", doing, option="--backends-path", place=backends)
