"""Bodies of the HTTP requests and replies between a worker and a frontend: challenge, registration, heartbeat.

They are LocalAI's, plus additive fields that an old peer ignores. The same rules as for messages on the bus apply: see
`core.wire`, which also encodes and decodes them.
"""

from __future__ import annotations

from msgspec import Struct, field

from enginehouse.core.capacity import Capacity, GraphicsCard
from enginehouse.core.ids import IntentId, NodeId
from enginehouse.core.report import Report, ReportStamp


class RegisterRequest(Capacity, frozen=True, omit_defaults=True, kw_only=True):
    name: str
    node_type: str = ""
    address: str = ""
    http_address: str = ""
    token: str = ""
    capability: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    max_replicas_per_model: int = 0
    vram_budget: str = ""
    # Additive.
    public_key: str = ""
    signature: str = ""
    platform: str = ""
    challenge: str = ""  # from `ChallengeReply`; covered by the signature


class ChallengeReply(Struct, frozen=True, kw_only=True):
    """Additive: requested by a worker with a key before it registers."""

    challenge: str = ""


class BusCredential(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The bus credential of a worker that joins or renews. Its lifetime is relative, because clocks may differ."""

    nats_jwt: str = ""
    nats_user_seed: str = ""
    nats_url: str = ""
    nats_life_seconds: float = 0.0  # 0: it does not expire


class RegisterReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    id: NodeId
    name: str
    node_type: str
    status: str
    created_at: str
    api_token: str = ""
    nats_jwt: str = ""
    nats_user_seed: str = ""
    # Additive.
    nats_url: str = ""
    nats_life_seconds: float = 0.0
    node_token: str = ""
    heartbeat_seconds: float = 0.0
    mark: float = 0.0  # the store's time; returned as `boot_mark` in every report of this run


BUS_AWAY = "away"


class HeartbeatRequest(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A change of a `Capacity`: an absent key keeps the stored value, an explicit 0 is stored."""

    available_vram: int | None = None
    total_vram: int | None = None
    available_ram: int | None = None
    available_disk: int | None = None
    total_disk: int | None = None
    gpu_vendor: str | None = None
    # Additive.
    gpu_cards: tuple[GraphicsCard, ...] | None = None  # all of them, or absent if nothing changed or is known
    used_cores: float | None = None  # absent if unknown now: unlike the others, an older value is not kept
    report: Report | None = None  # absent if the last answer confirmed its digest
    report_digest: str = ""  # of the worker's report, whether it is here or not
    unchanged: ReportStamp | None = None  # in place of the report: when the unchanged one was taken
    renew: bool = False  # the bus credential and the node's token expire soon
    bus: str = ""  # `BUS_AWAY`: commands do not reach this worker; any other value: they do


class HeartbeatReply(Struct, frozen=True, omit_defaults=True, kw_only=True):
    message: str
    # Additive.
    mark: float = 0.0
    credential: BusCredential | None = None
    node_token: str = ""  # replaces the presented one, which stays valid until this one is used
    # Intents that the report lists as running but that have ended: stop working on them.
    cancelled: tuple[IntentId, ...] = ()
    report_digest: str = ""  # the store has this report; a worker with any other one sends it whole
