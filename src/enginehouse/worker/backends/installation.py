"""A backends directory with everything that works on it: trees, blobs, the installer and its sources.

Built by `build_worker.make_installation`. Only one process at a time may change a backends directory: the caller holds
its lock from before the installation is built until it is closed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.store import DEFAULT_CAP_BYTES, BlobStore
from enginehouse.artifact.origins import Suppliers
from enginehouse.core.archive import ArchiveLimits
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.pypi import Python
from enginehouse.fetch.registry.requests import Registries
from enginehouse.host import disk
from enginehouse.host.confinement import NONE, Confinement
from enginehouse.worker.backends.installer import Installer
from enginehouse.worker.backends.trees import Trees
from enginehouse.worker.enclosures import Enclosures


class InstallerOptions(Struct, frozen=True, kw_only=True):
    backends: Path
    system: Path | None = None  # backends that came with the machine, read-only
    allowed_hosts: tuple[str, ...] = ()  # hosts that may be used although their addresses are not public
    registry_credentials: Mapping[str, str] = {}
    limits: ArchiveLimits = ArchiveLimits()
    cap_bytes: int = DEFAULT_CAP_BYTES
    stall_seconds: float = 120.0  # an install or a start without any progress for so long fails
    patience: RetryPolicy = RetryPolicy()
    data: Path | None = None  # hidden from engines; None is the directory that holds the backends
    hidden: tuple[Path, ...] = ()  # hidden from engines as well
    confinement: Confinement = NONE  # applied to engines
    may_link: bool = False  # engines cannot write to the trees, so versions may share files by hard links


class Installation(Struct, frozen=True, kw_only=True):
    trees: Trees
    blobs: BlobStore
    installer: Installer
    suppliers: Suppliers
    python: Python
    client: Client
    registries: Registries
    enclosures: Enclosures

    async def close(self) -> None:
        await self.client.close()


def lock_backends(backends: Path, doing: str) -> disk.Lock:
    """Lock a backends directory; raises while another process holds the lock."""
    private = Trees(backends).private
    with disk.naming_the_file(backends, "--backends-path"):
        backends.mkdir(parents=True, exist_ok=True)
        private.mkdir(mode=0o750, exist_ok=True)
    return disk.Lock(private / "lock_backends", doing, option="--backends-path", place=backends)
