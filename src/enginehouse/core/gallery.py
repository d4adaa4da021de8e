"""Galleries: catalogues of backends and models, and the choice of a concrete build for one machine.

An entry is *meta* when it has capabilities and no URI. Having capabilities alone says nothing: merged YAML gives them
to concrete entries too. Of two entries with one name the first wins, within a gallery and between galleries.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from enginehouse.core.backend import Resolved, package_digest
from enginehouse.core.errors import Hopeless, NotFound
from enginehouse.core.model import Model


class Entry(Struct, frozen=True, omit_defaults=True, kw_only=True):
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
    platforms: tuple[str, ...] = ()
    size_bytes: int = 0

    @property
    def is_meta(self) -> bool:
        return bool(self.capabilities) and not self.uri


class Gallery(Struct, frozen=True, kw_only=True):
    name: str
    url: str
    backends: tuple[Entry, ...] = ()
    models: tuple[Model, ...] = ()


def find_entry(galleries: Iterable[Gallery], name: str) -> tuple[Gallery, Entry]:
    """By `name`, or by `gallery@name`; lookup ignores case, as LocalAI's does."""
    chosen, _, plain = name.rpartition("@")
    for gallery in galleries:
        if chosen and gallery.name != chosen:
            continue
        for entry in gallery.backends:
            if entry.name.lower() == plain.lower():
                return gallery, entry
    raise NotFound(
        f"cannot find a backend named {name!r} in any gallery: `enginehouse backends available` lists what there is",
        code="not_found",
        param="backend",
    )


def find_model(galleries: Iterable[Gallery], name: str) -> Model | None:
    for gallery in galleries:
        for model in gallery.models:
            if model.name == name:
                return model
    return None


def resolve(galleries: Iterable[Gallery], name: str, capability: str, platform: str) -> Resolved:
    """The concrete build of `name` for a machine.

    `NotFound` when no gallery knows the name; `Hopeless` (`unsupported`, `unsupported_platform`) with the reason when
    none of its builds fits.
    """
    galleries = tuple(galleries)
    gallery, entry = find_entry(galleries, name)
    meta = ""
    if entry.is_meta:
        target = next(
            (entry.capabilities[key] for key in (capability, "default", "cpu") if key in entry.capabilities),
            None,
        )
        if target is None:
            raise Hopeless(
                f"cannot install {entry.name}: it has builds for {', '.join(sorted(entry.capabilities))}, "
                f"none for {capability}",
                code="unsupported",
            )
        meta = entry.name
        gallery, entry = find_entry(galleries, f"{gallery.name}@{target}")
    if entry.platforms and platform not in entry.platforms:
        raise Hopeless(
            f"cannot install {name}: it has builds for {', '.join(entry.platforms)}, none for {platform}",
            code="unsupported_platform",
        )
    return Resolved(
        directory=entry.name,
        uri=entry.uri,
        digest=package_digest(entry.uri, entry.requirements, entry.launcher, entry.version),
        source=gallery.name,
        platform=platform,
        meta=meta,
        alias=entry.alias,
        version=entry.version,
        requirements=entry.requirements,
        launcher=entry.launcher,
        size_bytes=entry.size_bytes,
    )
