"""Operations, nodes, models, upgrades and plans as the API shows them and as the command line reads them.

Unknown fields are ignored, and most have a default, so that commands can read the answers of other versions. A frontend
sends them all, except those that are unset and the defaults of operations: they are unknown, or do not apply. LocalAI's
keys come first, then additional ones.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import IntentId, NodeId, OperationId
from enginehouse.core.model import ModelOptions
from enginehouse.core.operation import Excluded, RequestOptions
from enginehouse.core.replica import FailedReplica, RunningReplica


class NodeRow(Struct, kw_only=True, omit_defaults=True):
    """One node (one intent) of an operation."""

    node_id: NodeId
    node_name: str
    status: str
    percentage: float
    file_name: str = ""
    current: str = ""
    total: str = ""
    phase: str = ""
    error: str = ""
    # Additional.
    action: str  # in words
    kind: str  # of the action, for programs
    intent: IntentId
    state: str
    attempt: int
    failures: int = 0  # attempts that failed, of `core.intent.MAX_FAILURES`
    reason: str = ""
    current_bytes: int | None = None
    total_bytes: int | None = None
    due_in_seconds: float | None = None
    note: str = ""  # the worker's remark on a success, such as `already_absent`
    startedAt: str = ""  # when the present attempt was sent
    finishedAt: str = ""

    @property
    def is_open(self) -> bool:
        return self.status in ("queued", "downloading", "running_on_worker")


class CanaryRow(Struct, kw_only=True, omit_defaults=True):
    """One canary of an upgrade."""

    node_id: NodeId
    node_name: str
    state: str  # watched, passed, left
    waits_for: str = ""


class CanaryView(Struct, kw_only=True, omit_defaults=True):
    """The canary phase of an upgrade."""

    phase: str  # watching, passed, released, failed, ended
    seconds: float
    nodes: list[CanaryRow] = field(default_factory=list)
    message: str = ""


class OperationView(Struct, kw_only=True, omit_defaults=True):
    id: str
    name: str
    fullName: str
    jobID: OperationId
    progress: int
    taskType: str
    isDeletion: bool
    isBackend: bool
    isQueued: bool
    cancellable: bool
    message: str
    nodeID: NodeId = NodeId("")
    phase: str = ""
    currentBytes: int = 0
    totalBytes: int = 0
    error: str = ""
    nodes: list[NodeRow] = field(default_factory=list)
    # Additional.
    kind: str
    status: str
    isParked: bool
    author: str
    createdAt: str
    excluded: tuple[Excluded, ...]
    targets: tuple[NodeId, ...]
    asked: RequestOptions
    retryOf: OperationId = OperationId("")
    dismissed: bool
    finishedAt: str = ""
    errorCode: str = ""
    canary: CanaryView | None = None
    counts: dict[str, int] = field(default_factory=dict)  # of all rows, by their status
    revision: int = 0  # never decreases; an event with a lower one than what was read is older
    partial: bool = False  # `nodes` has only the rows that changed; what a request asked for is left out

    def followed_by(self, event: OperationView) -> OperationView:
        """The operation after an event: the event itself, or its summary with the rows of both."""
        if not event.partial:
            return event
        rows = {row.intent: row for row in (*self.nodes, *event.nodes)}
        return msgspec.structs.replace(
            event,
            # As the server orders them: by name, and the steps of one node in their order.
            nodes=sorted(rows.values(), key=lambda row: row.node_name),
            targets=self.targets,
            excluded=self.excluded,
            asked=self.asked,
            partial=False,
        )

    @property
    def leaves_out(self) -> bool:
        """Whether a node was excluded although it was named, or because its version is unknown."""
        return any(self.asked.nodes or one.code == "unknown" for one in self.excluded)

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "running")

    @property
    def is_over(self) -> bool:
        """Whether following can end: the operation has ended, or it only waits for nodes to return."""
        return self.isParked or self.has_ended


class OperationSummary(Struct, kw_only=True, omit_defaults=True):
    """An operation without its nodes: how many there are in each state. The keys of `OperationView` mean the same."""

    id: str
    name: str
    fullName: str
    jobID: OperationId
    progress: int  # how many of a hundred have succeeded
    taskType: str
    isDeletion: bool
    isBackend: bool
    isQueued: bool
    cancellable: bool
    message: str
    error: str = ""  # that of the operation, or of one of its nodes
    # Additional.
    kind: str
    status: str
    author: str
    createdAt: str
    counts: dict[str, int]  # of its nodes, by status; silence is not known here
    excluded_count: int = 0
    retryOf: OperationId = OperationId("")
    dismissed: bool
    finishedAt: str = ""
    errorCode: str = ""


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
    behind: bool = False  # its worker is older than the frontend that tells this
    engine_confinement: str = ""
    waits_for: str = ""  # why it waits for approval again
    backends: tuple[InstalledBackend, ...] = ()
    replicas: tuple[RunningReplica, ...] = ()
    failed_replicas: tuple[FailedReplica, ...] = ()


class ReplicaView(Struct, frozen=True):
    node_id: NodeId = NodeId("")
    node_name: str = ""
    slot: int = 0


class ListedReplica(Struct, frozen=True, kw_only=True):
    """One replica in the list of all."""

    model: str
    node_id: NodeId = NodeId("")
    node_name: str = ""
    slot: int = 0
    state: str = ""  # ready, leaving, unreachable
    backend: str = ""
    revision: str = ""  # of the model, as it was loaded
    outdated: str = ""  # why it is to be replaced; "" if it is not
    in_flight: int = 0
    age_seconds: float = 0.0
    unused_seconds: float | None = None  # None if no use is known
    use_unknown: bool = False  # no use is known, but uses may have been lost with a frontend that ended
    memory_bytes: int | None = None  # the most that it was seen to hold; None if unknown


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
    does: str = ""  # install, upgrade, reinstall, delete, roll back, nothing
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
    canaries: list[str] = field(default_factory=list)  # nodes that an upgrade begins with
    download_bytes: int = 0


class SettingView(Struct, frozen=True, kw_only=True):
    """A setting of a frontend, and where people change it."""

    name: str
    value: str  # as people write it; of a secret only whether it is set
    source: str  # flag, variable, file, default, up (chosen by `enginehouse up`)
    place: str = field(name="from", default="")  # the flag, the variable, or the path of the file
    flag: str = ""  # "" if it has none
    variable: str = ""
    help: str = ""
    is_secret: bool = False


class FrontendView(Struct, frozen=True, kw_only=True):
    """The frontend that answers."""

    id: str
    host: str  # the name of its machine
    version: str
    started_at: str


class SettingsView(Struct, frozen=True, kw_only=True):
    settings: list[SettingView]
    frontend: FrontendView
    database: str  # sqlite or postgresql
    data: str  # the data directory
