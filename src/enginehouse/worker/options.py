"""The options of one worker: a frozen struct that `build_worker.py` fills from the settings.

All paths below the data directory are defined here and nowhere else.
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from enginehouse.artifact.blobs.store import DEFAULT_CAP_BYTES
from enginehouse.core.archive import ArchiveLimits
from enginehouse.host.confinement import NONE, Confinement
from enginehouse.worker.backends.installation import InstallerOptions


class WorkerOptions(Struct, frozen=True, kw_only=True):
    directory: Path  # the data directory
    name: str
    join_token: str = ""
    advertise_host: str = ""  # "" means the local address of the connection to the frontend
    base_port: int = 50051
    labels: dict[str, str] = {}
    max_replicas_per_model: int = 1  # how many replicas of one model LocalAI's frontends may start here
    grace_seconds: float = 10.0  # from SIGTERM to SIGKILL
    stall_seconds: float = 120.0  # an install or a start without any progress for so long fails
    ready_limit_seconds: float = 900.0  # for an engine that works and does not get ready; large ones import for minutes
    heartbeat_seconds: float = 0.0  # 0 leaves the choice to the frontend
    allowed_hosts: tuple[str, ...] = ()  # hosts that may be used although their addresses are not public
    registry_credentials: dict[str, str] = {}
    hidden: tuple[Path, ...] = ()  # hidden from engines, in addition to the data directory
    system_backends: Path | None = None
    archive_limit_bytes: int = ArchiveLimits().total_bytes
    blob_cap_bytes: int = DEFAULT_CAP_BYTES
    confinement: Confinement = NONE  # applied to engines
    thread_budget: int = 0  # shared by all engines of this user on this machine; 0 means the number of cores

    @property
    def backends(self) -> Path:
        return self.directory / "backends"

    @property
    def installer_options(self) -> InstallerOptions:
        return InstallerOptions(
            backends=self.backends,
            system=self.system_backends,
            allowed_hosts=self.allowed_hosts,
            registry_credentials=self.registry_credentials,
            limits=ArchiveLimits(total_bytes=self.archive_limit_bytes),
            cap_bytes=self.blob_cap_bytes,
            stall_seconds=self.stall_seconds,
            data=self.directory,
            hidden=self.hidden,
            confinement=self.confinement,
            may_link=self.confinement.protects_trees,
        )

    @property
    def models(self) -> Path:
        return self.directory / "models"

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    @property
    def processes(self) -> Path:
        return self.directory / "processes"

    @property
    def engine_logs(self) -> Path:
        return self.directory / "logs" / "engines"

    @property
    def ports_file(self) -> Path:
        return self.directory / "ports.json"

    @property
    def node_key(self) -> Path:
        return self.directory / "node.key"

    @property
    def node_file(self) -> Path:
        return self.directory / "node.json"

    def make_directories(self) -> None:
        """Create the directories with a private mode: they hold replica keys and programs that run as this user."""
        for path in (self.backends, self.models, self.journal, self.processes, self.engine_logs):
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
