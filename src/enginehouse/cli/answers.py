"""The parts of the frontend's answers that the commands show.

Unknown fields are ignored, and only fields that every frontend has always sent are required, so that commands can talk
to a newer or older frontend. Nodes, models, upgrades and plans are structs of `core.views`. Operations have a form of
their own here, because what a command shows of one is the same for a running, an ended and a local one.
"""

from __future__ import annotations

from msgspec import Struct, field

from enginehouse.core.operation import Excluded, RequestOptions


class ListedRow(Struct, frozen=True, kw_only=True):
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


class ListedOperation(Struct, frozen=True, kw_only=True):
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
    nodes: tuple[ListedRow, ...] | None = None
    excluded: tuple[Excluded, ...] | None = None
    asked: RequestOptions = RequestOptions()

    @property
    def leaves_out(self) -> bool:
        """Whether a node was excluded although it was named, or because its version is unknown."""
        return any(self.asked.nodes or one.code == "unknown" for one in self.excluded or ())

    @property
    def rows(self) -> tuple[ListedRow, ...]:
        return self.nodes or ()

    @property
    def is_over(self) -> bool:
        """Whether following can end: the operation has ended, or it only waits for nodes to return."""
        return self.is_parked or self.status not in ("queued", "running")


class OperationPage(Struct, frozen=True):
    operations: tuple[ListedOperation, ...] = ()


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
