"""Lists a backends directory for people: one line per name, with the version that a rollback would restore."""

from __future__ import annotations

from msgspec import Struct

from enginehouse.core.backend import InstalledBackend
from enginehouse.worker.backends.trees import Trees


class LocalBackend(Struct, frozen=True, kw_only=True):
    """One line of a listing."""

    name: str
    kind: str  # installed, system, meta, broken
    leads_to: str = ""
    version: str = ""
    digest: str = ""
    uri: str = ""
    installed_at: str = ""
    previous_version: str = ""
    previous_digest: str = ""
    can_roll_back: bool = False


def list_backends(trees: Trees) -> list[LocalBackend]:
    return [_line(trees, backend) for backend in trees.list_installed()]


def _line(trees: Trees, backend: InstalledBackend) -> LocalBackend:
    previous = None if backend.is_meta else trees.previous_metadata(backend.name)
    kind = "broken" if backend.is_broken else "system" if backend.is_system else "installed"
    return LocalBackend(
        name=backend.name,
        kind="meta" if backend.is_meta and not backend.is_broken else kind,
        leads_to=backend.meta_backend_for,
        version=backend.version,
        digest=backend.digest,
        uri=backend.uri,
        installed_at=backend.installed_at,
        previous_version=previous.version if previous else "",
        previous_digest=previous.digest if previous else "",
        can_roll_back=previous is not None,
    )
