"""Backends of this machine without a cluster: the same installer, called directly.

Names are those on disk: a directory, or a meta name that points to one.
"""

from __future__ import annotations

from pathlib import Path

from enginehouse.artifact.blobs.store import Collected
from enginehouse.artifact.images.directories import digest_of
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import NotFound
from enginehouse.core.external import external_build
from enginehouse.core.installation import Metadata, directory_behind
from enginehouse.core.name import check_name
from enginehouse.core.progress import ReportProgress
from enginehouse.core.reference import parse_uri
from enginehouse.host import disk
from enginehouse.host.blocking import in_thread
from enginehouse.worker.backends.installation import Installation, InstallerOptions
from enginehouse.worker.backends.installer import Installed, InstallRequest
from enginehouse.worker.backends.listing import LocalBackend, list_backends
from enginehouse.worker.backends.plan import InstallPlan, plan


class Local:
    """Built by `build_worker.open_local`, which holds the lock of the directory. Without the lock nothing may be
    changed.
    """

    def __init__(self, options: InstallerOptions, installation: Installation) -> None:
        self._options = options
        self._installation = installation

    async def install(self, request: InstallRequest, report: ReportProgress) -> Installed:
        return await self._installation.installer.install(request, report, _nobody_runs)

    async def upgrade(self, resolved: Resolved, report: ReportProgress) -> Installed:
        """To what its source has now; nothing happens where that is what is installed."""
        return await self.install(InstallRequest(resolved=resolved, upgrade=True), report)

    async def roll_back(self, name: str) -> Metadata:
        return await self._installation.installer.roll_back(self.directory_of(name), _nobody_runs)

    async def delete(self, name: str) -> str:
        directory = self.directory_of(name)
        await self._installation.installer.remove(directory)
        return directory

    async def collect(self, cap_bytes: int | None) -> Collected:
        try:
            return await in_thread(self._installation.installer.collect, cap_bytes)
        except OSError as error:
            raise disk.storage_error(error, f"remove what nobody needs from {self._options.backends}") from error

    async def plan(self, resolved: Resolved) -> InstallPlan:
        return await plan(self._installation, resolved)

    async def newest_digest(self, resolved: Resolved) -> str:
        """What the source has now, without fetching it."""
        if resolved.sha256:
            return "sha256:" + resolved.sha256.strip().lower().removeprefix("sha256:")
        source = parse_uri(resolved.uri)
        if source.kind == "directory":
            return await in_thread(digest_of, Path(source.path), self._options.limits.total_bytes)
        artifact, _ = await self._installation.suppliers.resolve(resolved)
        return artifact.digest

    def list_backends(self) -> list[LocalBackend]:
        return list_backends(self._installation.trees)

    def metadata_of(self, directory: str) -> Metadata | None:
        return self._installation.trees.metadata_of(directory)

    def directory_of(self, name: str) -> str:
        """The directory that a name of the listing means."""
        found = directory_behind(self._installation.trees.list_installed(), name)
        if found is None and self._installation.trees.previous_metadata(check_name(name, "backend")) is not None:
            found = name
        if found is None:
            raise NotFound(
                f"cannot find a backend named {name!r} in {self._options.backends}: "
                "`enginehouse local list` shows what is there",
                code="not_found",
            )
        return found


def resolved_from(metadata: Metadata, directory: str) -> Resolved:
    """What is installed as something that can be asked for again: for upgrades of what no gallery knows.

    An archive and a package are given with what they are, so there is never another version of them.
    """
    kind = parse_uri(metadata.uri).kind
    build = external_build(
        metadata.uri,
        directory,
        alias=metadata.alias,
        sha256=metadata.digest.removeprefix("sha256:") if kind == "archive" else "",
        platform=metadata.platform,
    )
    if build.digest not in ("", metadata.digest):
        raise NotFound(
            f"cannot upgrade {directory}: it came from a gallery that is not configured here, and its URI does not say "
            "everything it was made of",
            code="not_found",
        )
    return build


async def _nobody_runs() -> None:
    """The lock is ours, so no worker of this directory has a process to stop."""
