"""The parts of the frontend's answers that the commands show.

Unknown fields are ignored and missing ones have defaults, so that a newer or older frontend can be talked to.
"""

from __future__ import annotations

from msgspec import Struct, field

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.operation import RequestOptions
from enginehouse.core.replica import RunningReplica


class Row(Struct, frozen=True, kw_only=True):
    """One action on one node of an operation."""

    node_id: str = ""
    node_name: str = ""
    action: str = ""
    intent: str = ""
    status: str = ""
    phase: str = ""
    file_name: str = ""
    percentage: float = 0.0
    current_bytes: int = 0
    total_bytes: int = 0
    attempt: int = 0
    reason: str = ""
    error: str = ""
    note: str = ""
    due_in_seconds: float | None = None

    @property
    def key(self) -> str:
        return self.intent or f"{self.node_id}/{self.action}"

    @property
    def is_open(self) -> bool:
        return self.status in ("queued", "downloading", "running_on_worker")


class Excluded(Struct, frozen=True, kw_only=True):
    node_name: str = ""
    reason: str = ""
    code: str = ""


class Operation(Struct, frozen=True, kw_only=True):
    id: str = field(name="jobID")
    name: str = ""
    kind: str = ""
    status: str
    is_parked: bool = field(name="isParked", default=False)
    author: str = ""
    created_at: str = field(name="createdAt", default="")
    progress: int = 0
    message: str = ""
    error: str = ""
    nodes: tuple[Row, ...] | None = None
    excluded: tuple[Excluded, ...] | None = None
    asked: RequestOptions = RequestOptions()

    @property
    def leaves_out(self) -> bool:
        """Whether nodes were left out that somebody named, or of which nobody knows whether they should have been."""
        return any(self.asked.nodes or one.code == "unknown" for one in self.excluded or ())

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.nodes or ()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will change that somebody should sit and wait for."""
        return self.is_parked or self.status not in ("queued", "running")


class OperationList(Struct, frozen=True):
    operations: tuple[Operation, ...] = ()


class Node(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    status: str = ""
    approved: bool = False
    health: str = ""
    drained: bool = False
    node_type: str = ""
    address: str = ""
    http_address: str = ""
    platform: str = ""
    capability: str = ""
    cores: int = 0
    total_ram: int = 0
    available_ram: int = 0
    total_vram: int = 0
    available_vram: int = 0
    total_disk: int = 0
    available_disk: int = 0
    gpu_vendor: str = ""
    labels: dict[str, str] | None = None
    fingerprint: str = ""
    heartbeat_age_seconds: float | None = None
    degraded: bool = False
    worker_version: str = ""
    engine_confinement: str = ""
    waits_for: str = ""
    created_at: str = ""
    backends: tuple[InstalledBackend, ...] | None = None
    replicas: tuple[RunningReplica, ...] | None = None


class BackendOnNode(Struct, frozen=True, kw_only=True):
    node_name: str = ""
    node_status: str = ""
    version: str = ""
    digest: str = ""
    meta_backend_for: str = ""
    installed_at: str = ""
    is_broken: bool = False
    unknown: bool = False
    report_age_seconds: float | None = None


class NodeUpgrade(Struct, frozen=True, kw_only=True):
    node_id: str
    node_name: str = ""
    installed_version: str = ""
    installed_digest: str = ""
    available_version: str = ""
    available_digest: str = ""
    unknown: bool = False


class Upgrade(Struct, frozen=True, kw_only=True):
    nodes: tuple[NodeUpgrade, ...] = ()


class PlanRow(Struct, frozen=True, kw_only=True):
    node_name: str = ""
    node_status: str = ""
    does: str = ""
    backend: str = ""
    version: str = ""
    digest: str = ""
    capability: str = ""
    platform: str = ""
    installed_version: str = ""
    installed_digest: str = ""
    download_bytes: int = 0
    free_disk_bytes: int = 0
    note: str = ""


class Plan(Struct, frozen=True, kw_only=True):
    nodes: tuple[PlanRow, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    max_parallel: int = 0


class Backend(Struct, frozen=True, kw_only=True):
    name: str = field(name="Name")
    is_meta: bool = field(name="IsMeta", default=False)
    nodes: tuple[BackendOnNode, ...] | None = None
    drift: tuple[BackendOnNode, ...] | None = None


class GalleryName(Struct, frozen=True):
    name: str = ""


class AvailableBackend(Struct, frozen=True, kw_only=True):
    name: str
    description: str = ""
    license: str = ""
    version: str = ""
    gallery: GalleryName | str = ""  # a text in answers of older frontends
    installed: bool = False
    is_development: bool = False
    is_variant: bool = False
    fits: bool = True
    stale: bool = False

    @property
    def gallery_name(self) -> str:
        return self.gallery if isinstance(self.gallery, str) else self.gallery.name


class ModelOptions(Struct, frozen=True, kw_only=True):
    system_prompt: str = ""
    context_size: int = 0


class ReplicaPlace(Struct, frozen=True, kw_only=True):
    node_name: str = ""


class Model(Struct, frozen=True, kw_only=True):
    name: str
    backend: str = ""
    description: str = ""
    license: str = ""
    size_bytes: int = 0
    state: str = ""
    options: ModelOptions = ModelOptions()
    replicas: tuple[ReplicaPlace, ...] | None = None


class Token(Struct, frozen=True, kw_only=True):
    id: str
    role: str
    name: str = ""
    node: str = ""
    created_at: str | float = ""
    token: str = ""
