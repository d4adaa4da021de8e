"""The parts of the frontend's answers that the commands show, where they are not structs of `core.views`.

Unknown fields are ignored, and only fields that every frontend has always sent are required, so that commands can talk
to a newer or older frontend.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from enginehouse.core.views import OperationView


class OperationPage(Struct, frozen=True):
    operations: tuple[OperationView, ...] = ()


class ListedHolder(Struct, frozen=True, kw_only=True):
    node_name: str = ""
    node_status: str = ""
    version: str = ""
    digest: str = ""
    meta_backend_for: str = ""
    installed_at: str = ""
    is_broken: bool = False
    unknown: bool = False
    report_age_seconds: float | None = None


class ListedBackend(Struct, frozen=True, kw_only=True):
    name: str = field(name="Name")
    is_meta: bool = field(name="IsMeta", default=False)
    nodes: tuple[ListedHolder, ...] | None = None
    drift: tuple[ListedHolder, ...] | None = None


class GalleryName(Struct, frozen=True):
    name: str = ""


class AvailableBackend(Struct, frozen=True, kw_only=True):
    name: str
    description: str = ""
    license: str = ""
    version: str = ""
    gallery: GalleryName | str = ""  # older frontends send a string
    installed: bool = False
    is_development: bool = False
    is_variant: bool = False
    fits: bool = True
    stale: bool = False

    @property
    def gallery_name(self) -> str:
        return self.gallery if isinstance(self.gallery, str) else self.gallery.name


class ListedToken(Struct, frozen=True, kw_only=True):
    id: str
    role: str
    name: str = ""
    node: str = ""
    created_at: str | float = ""
    token: str = ""
    models: tuple[str, ...] = ()
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    expires_at: str = ""
    expired: bool = False
    last_used_at: str = ""
    old_until: str = ""  # when the secret before a rotation ends
    file_renewed: bool = False


class RejectedNode(Struct, frozen=True, kw_only=True):
    name: str
    fingerprint: str = ""
    rejected_at: str = ""


class LoginLink(Struct, frozen=True, kw_only=True):
    url: str


class ListedAudit(Struct, frozen=True, kw_only=True):
    at: str = ""
    who: str = ""
    role: str = ""
    address: str = ""
    method: str = ""
    path: str = ""
    summary: str = ""
    target: str = ""
    status: int = 0
    error: str = ""
    operation_id: str = ""
    count: int = 1


class AuditPage(Struct, frozen=True, kw_only=True):
    audit: tuple[ListedAudit, ...] = ()
    next: str = ""


class ListedUsage(Struct, frozen=True, kw_only=True):
    token: str = ""
    model: str = ""
    node: str = ""
    hour: str = ""
    day: str = ""
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class UsageAnswer(Struct, frozen=True, kw_only=True):
    usage: tuple[ListedUsage, ...]
    total: ListedUsage = ListedUsage()
    truncated: bool = False


class StoredSchedule(Struct, frozen=True, kw_only=True):
    """A schedule as the API shows it."""

    model_name: str
    min_replicas: int = 0
    max_replicas: int = 0
    node_selector: str = ""
    spread_all: bool = False
    idle_seconds: float = 0.0
    route_policy: str = ""
    unsatisfiable_until: str = ""
    reason: str = ""

    @property
    def selector(self) -> dict[str, str]:
        return msgspec.json.decode(self.node_selector, type=dict[str, str]) if self.node_selector else {}


class NodeFit(Struct, frozen=True, kw_only=True):
    node_name: str
    fits: bool
    reason: str = ""


class ShownExplanation(Struct, frozen=True, kw_only=True):
    model: str
    needs_bytes: int
    needs_from: str
    replicas: int
    wanted: int
    chosen: str
    stops: tuple[str, ...]
    nodes: tuple[NodeFit, ...]
    last_failure: str
    would_help: tuple[str, ...] = ()  # a server of the version before does not say it
    retry_in_seconds: float | None
