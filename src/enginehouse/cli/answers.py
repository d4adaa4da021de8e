"""The parts of the frontend's answers that the commands show, where they are not structs of `core.views`.

Unknown fields are ignored, and only fields that every frontend has always sent are required, so that commands can talk
to a newer or older frontend.
"""

from __future__ import annotations

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
