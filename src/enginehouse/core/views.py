"""Nodes, models, upgrades and plans as the API shows them and as the command line reads them.

Nearly every field has a default, so that commands can read the answers of older frontends. A frontend sends them all,
except those that are unset: they are unknown, or do not apply. LocalAI's keys come first, then additional ones.
"""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType, field

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
from enginehouse.core.model import ModelOptions
from enginehouse.core.operation import Excluded
from enginehouse.core.replica import RunningReplica


class NodeView(Capacity, frozen=True, omit_defaults=False, kw_only=True):
    id: NodeId
    name: str
    node_type: str = ""
    address: str = ""
    http_address: str = ""
    status: str = ""
    capability: str = ""
    max_replicas_per_model: int = 0
    last_heartbeat: str = ""
    created_at: str = ""
    updated_at: str = ""
    model_count: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    # Additional.
    approved: bool = False
    health: str = ""
    drained: bool = False
    platform: str = ""
    fingerprint: str = ""
    heartbeat_age_seconds: float | None = None
    degraded: bool = False  # it sends heartbeats but has no connection to the bus
    worker_version: str = ""
    engine_confinement: str = ""
    waits_for: str = ""  # why it waits for approval again
    backends: tuple[InstalledBackend, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()


class ReplicaView(Struct, frozen=True):
    node_id: NodeId = NodeId("")
    node_name: str = ""
    slot: int = 0


class ModelView(Struct, frozen=True, kw_only=True):
    name: str
    backend: str = ""
    description: str = ""
    license: str = ""
    size_bytes: int = 0
    state: str = ""  # available (in a gallery), added (served, not running), loading, loaded
    options: ModelOptions = ModelOptions()
    replicas: tuple[ReplicaView, ...] = ()
    created_at: float = 0.0


class Drift(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    node_name: str
    version: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    unknown: bool | UnsetType = UNSET  # no digest is recorded, so it may be the same version


class NodeUpgrade(Struct, frozen=True, kw_only=True):
    node_id: NodeId
    node_name: str = ""
    installed_version: str = ""
    installed_digest: str = ""
    available_version: str = ""
    available_digest: str = ""
    unknown: bool | UnsetType = UNSET  # no digest is recorded, so it may be the same version


class Upgrade(Struct, frozen=True, kw_only=True):
    """An available upgrade of a backend, and the nodes that have another version."""

    backend_name: str = ""
    installed_version: str = ""
    available_version: str = ""
    installed_digest: str | UnsetType = UNSET
    available_digest: str | UnsetType = UNSET
    node_drift: list[Drift] | UnsetType = UNSET
    # Additional.
    nodes: list[NodeUpgrade] = field(default_factory=list)

    @property
    def is_certain(self) -> bool:
        """Whether some node is known to have another version."""
        return any(node.unknown is not True for node in self.nodes)


class NodePlan(Struct, kw_only=True):
    """What a request would do on one node."""

    node_id: NodeId = NodeId("")
    node_name: str = ""
    node_status: str = ""
    does: str = ""  # install, upgrade, reinstall, delete, nothing
    backend: str | UnsetType = UNSET  # the build chosen for this machine
    version: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    uri: str | UnsetType = UNSET
    source: str | UnsetType = UNSET
    capability: str = ""
    platform: str = ""
    installed_version: str | UnsetType = UNSET
    installed_digest: str | UnsetType = UNSET
    download_bytes: int | UnsetType = UNSET  # an upper bound: a worker reuses what it has
    free_disk_bytes: int | UnsetType = UNSET
    note: str | UnsetType = UNSET


class FleetPlan(Struct, kw_only=True):
    kind: str = ""
    name: str = ""
    nodes: list[NodePlan] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)
    max_parallel: int = 0  # 0 means all at once
    download_bytes: int = 0
