"""The options of one worker: a frozen struct that `build_worker.py` fills from the settings.

All paths below the data directory are defined here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from enginehouse.worker.backends.installation import InstallerOptions


class WorkerOptions(Struct, frozen=True, kw_only=True):
    directory: Path  # the data directory
    name: str
    join_token: str = ""
    advertise_host: str = ""  # "" means the local address of the connection to the frontend
    base_port: int = 50051
    http_port: int | None = None  # None means the port below the first one for engines, or the next free one below that
    model_credentials: Mapping[str, str] = {}  # secrets for sources of models, by name
    model_directories: tuple[Path, ...] = ()  # shared storage: models may name files below these
    labels: dict[str, str] = {}
    max_replicas_per_model: int = 1  # how many replicas of one model LocalAI's frontends may start here
    grace_seconds: float = 10.0  # from SIGTERM to SIGKILL
    ready_limit_seconds: float = 900.0  # for an engine that works and does not get ready; large ones import for minutes
    heartbeat_seconds: float = 0.0  # 0 leaves the choice to the frontend
    installing: InstallerOptions
    thread_budget: int = 0  # shared by all engines of this user on this machine; 0 means the number of cores

    @property
    def backends(self) -> Path:
        return self.installing.backends

    @property
    def models(self) -> Path:
        return self.directory / "models"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def staging(self) -> Path:
        return self.directory / "staging"

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

    @property
    def waiting_file(self) -> Path:
        """Why this worker is not joined; absent while it is."""
        return self.directory / "waiting.json"

    def make_directories(self) -> None:
        """Create the directories with a private mode: they hold replica keys and programs that run as this user."""
        for path in (
            *(self.backends, self.models, self.data, self.staging),
            *(self.journal, self.processes, self.engine_logs),
        ):
            path.mkdir(mode=0o750, parents=True, exist_ok=True)
