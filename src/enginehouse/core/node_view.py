"""A node as the API shows it and as the command line reads it: LocalAI's keys, then additional ones.

Every field but the first two has a default, so that commands can read the answers of older frontends; a frontend sends
all of them.
"""

from __future__ import annotations

from msgspec import field

from enginehouse.core.backend import InstalledBackend
from enginehouse.core.capacity import Capacity
from enginehouse.core.ids import NodeId
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
