"""Entries of LocalAI's model galleries, and the configuration that an entry stands for.

Pure. An entry is a base document (by address, or inline) with overrides merged over it; overrides win. Its variants are
other builds of the same model, and the choice among them is by memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from enginehouse.core.errors import Invalid
from enginehouse.core.model_definition import merged
from enginehouse.core.name import shown
from enginehouse.core.progress import format_bytes
from enginehouse.core.quantization import memory_needed


class VariantReference(Struct, frozen=True):
    model: str


class ModelEntry(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One model of a gallery: LocalAI's keys. Values that it does not promise are checked when they are used."""

    name: str
    url: str = ""
    config_file: Any = None  # a map, or the text of one
    overrides: dict[str, Any] = {}
    files: tuple[dict[str, Any], ...] = ()
    prompt_templates: tuple[dict[str, Any], ...] = ()
    variants: tuple[VariantReference, ...] = ()
    backend: str = ""
    description: str = ""
    license: str = ""
    icon: str = ""
    urls: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


class GalleryChanges(Struct, frozen=True, kw_only=True):
    """What a request adds to an entry."""

    name: str = ""
    overrides: dict[str, Any] = {}
    files: tuple[dict[str, Any], ...] = ()


def configured(entry: ModelEntry, documents: Sequence[Mapping[str, Any]], changes: GalleryChanges) -> dict[str, Any]:
    """The configuration of an entry. `documents` are its base documents, each with `config_file` as a map."""
    config: dict[str, Any] = {}
    described: dict[str, Any] = {}
    files: dict[str, Mapping[str, Any]] = {}
    templates: list[Any] = []
    own = {"files": entry.files, "prompt_templates": entry.prompt_templates}
    for document in (*documents, own, {"files": changes.files}):
        part = document.get("config_file")
        config = merged(config, part) if isinstance(part, Mapping) else config
        described |= {key: document[key] for key in ("description", "license") if document.get(key)}
        for file in _mappings(document.get("files")):
            files[str(file.get("filename") or file.get("uri"))] = file
        templates += _mappings(document.get("prompt_templates"))
    config = merged(merged(config, entry.overrides), changes.overrides)
    described |= {
        key: value for key, value in (("description", entry.description), ("license", entry.license)) if value
    }
    if entry.backend and not config.get("backend"):
        config["backend"] = entry.backend
    listed = config.get("download_files")
    downloads = [*(listed if isinstance(listed, list) else []), *files.values()]
    return {
        **{key: value for key, value in described.items() if key not in config},
        **config,
        "name": changes.name or entry.name,
        **({"download_files": [dict(one) for one in downloads]} if downloads else {}),
        **({"prompt_templates": templates} if templates else {}),
    }


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list | tuple) else []


class VariantCandidate(Struct, frozen=True, kw_only=True):
    """A build of a model; `size_bytes` 0 if its size is unknown."""

    entry: ModelEntry
    size_bytes: int = 0


def choose_variant(
    candidates: Sequence[VariantCandidate], memory_bytes: Sequence[int], wanted: str = ""
) -> tuple[ModelEntry, str]:
    """The build to install, and why. The first candidate is the entry itself, and it always counts."""
    own = candidates[0].entry
    if wanted:
        for candidate in candidates:
            if candidate.entry.name.lower() == wanted.lower():
                return candidate.entry, f"{wanted} was asked for"
        known = ", ".join(candidate.entry.name for candidate in candidates)
        raise Invalid(f"cannot find the variant {shown(wanted)} of {own.name}: there are {known}", param="variant")
    if len(candidates) == 1:
        return own, ""
    free = max(memory_bytes, default=0)
    fitting = [one for one in candidates if one.size_bytes and memory_needed(one.size_bytes) <= free]
    if not free or not fitting:
        return own, "no other build is known to fit"
    best = max(fitting, key=lambda one: one.size_bytes)
    size, room = format_bytes(best.size_bytes), format_bytes(free)
    return (
        best.entry,
        f"chose {best.entry.name} ({size}): the largest build that fits a node with {room} of free memory",
    )
