"""Manages the backends of this machine without a cluster: calls the worker's installer directly.

A name is a directory on disk, or a meta name that points to one.
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
    """Made by `open_local`, which holds the lock of the directory; without it only reading methods may be called."""

    def __init__(self, options: InstallerOptions, installation: Installation) -> None:
        self._options = options
        self._installation = installation

    async def install(self, request: InstallRequest, report: ReportProgress) -> Installed:
        return await self._installation.installer.install(request, report, _stop_nothing)

    async def upgrade(self, resolved: Resolved, report: ReportProgress) -> Installed:
        """Upgrade to the current version of the source; a no-op if that version is installed."""
        return await self.install(InstallRequest(resolved=resolved, upgrade=True), report)

    async def roll_back(self, name: str) -> Metadata:
        return await self._installation.installer.roll_back(self.directory_of(name), _stop_nothing)

    async def delete(self, name: str) -> str:
        directory = self.directory_of(name)
        await self._installation.installer.remove(directory)
        return directory

    async def collect(self, cap_bytes: int | None) -> Collected:
        try:
            return await in_thread(self._installation.installer.collect, cap_bytes)
        except OSError as error:
            raise disk.storage_error(error, f"remove unused downloads from {self._options.backends}") from error

    async def plan(self, resolved: Resolved) -> InstallPlan:
        return await plan(self._installation, resolved)

    async def newest_digest(self, resolved: Resolved) -> str:
        """The digest of the source's current version, without downloading it."""
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
        """Resolve a name of the listing to its directory."""
        found = directory_behind(self._installation.trees.list_installed(), name)
        if found is None and self._installation.trees.previous_metadata(check_name(name, "backend")) is not None:
            found = name
        if found is None:
            raise NotFound(
                f"cannot find a backend named {name!r} in {self._options.backends}; "
                "list the installed backends with `enginehouse local list`",
                code="not_found",
            )
        return found


def resolved_from(metadata: Metadata, directory: str) -> Resolved:
    """The build to upgrade a backend to that is in no gallery; archives and packages have no other version."""
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
            f"cannot upgrade {directory}: its URI does not identify all of its parts, and the gallery it came from is "
            "not configured; add that gallery",
            code="not_found",
        )
    return build


async def _stop_nothing() -> None:
    """A no-op: this process holds the lock, so no worker runs engines from this directory."""
