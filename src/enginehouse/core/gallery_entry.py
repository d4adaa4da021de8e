"""Parts of a gallery: entries, the gallery itself, and how much of it is known.

An entry is *meta* if it has capabilities and no URI. Capabilities alone are not enough: merged YAML also gives them to
concrete entries.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from enginehouse.core.model import Model
from enginehouse.core.model_gallery import ModelEntry
from enginehouse.core.replica import EngineProtocol

DEVELOPMENT = "-development"  # the suffix of entries built from LocalAI's main branch


class GalleryEntry(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One backend of a gallery: LocalAI's keys, then ours."""

    name: str
    alias: str = ""
    uri: str = ""
    mirrors: tuple[str, ...] = ()
    capabilities: dict[str, str] = {}
    version: str = ""
    sha256: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    # Ours, for `pypi:` entries.
    requirements: tuple[str, ...] = ()
    launcher: str = ""
    protocol: EngineProtocol | Literal[""] = ""  # what its process speaks; "" leaves it to the worker to find out
    platforms: tuple[str, ...] = ()
    size_bytes: int = 0

    @property
    def is_meta(self) -> bool:
        return bool(self.capabilities) and not self.uri

    @property
    def is_development(self) -> bool:
        return self.name.endswith(DEVELOPMENT)


class Skipped(Struct, frozen=True):
    """An unusable entry of a document, and the reason."""

    entry: str
    reason: str


class Gallery(Struct, frozen=True, kw_only=True):
    name: str
    url: str
    backends: tuple[GalleryEntry, ...] = ()
    models: tuple[Model, ...] = ()
    offers: tuple[ModelEntry, ...] = ()  # of a gallery of models
    skipped: tuple[Skipped, ...] = ()
    demands_signatures: bool = False
    problem: str = ""  # why it could not be loaded, while nothing of it is known
    is_expected: bool = False  # nothing is known of it because its source has not answered yet


class GalleryState(Struct, frozen=True, kw_only=True):
    """How much of a gallery is known, for operators."""

    name: str
    url: str
    status: str  # "built-in", "fresh", "stale", "never loaded"
    age_seconds: float | None = None  # since its source last confirmed it
    error: str = ""
    entries: int = 0
    skipped: tuple[Skipped, ...] = ()
