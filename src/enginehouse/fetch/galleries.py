"""Galleries from their YAML documents: the only door to YAML.

Entries are validated one by one, so a bad one hides only itself; it is named in the log. Resolving is
`core.gallery`'s, nothing here decides. A document is refused as a whole only if it cannot be read at all or
exceeds the limits below.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import TypeVar

import msgspec
import yaml

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.core.gallery import Entry, Gallery
from enginehouse.core.model import Model
from enginehouse.core.name import check_model_name, check_name

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 5 * 1024 * 1024  # ten times the largest gallery known
MAX_NODES = 100_000  # counted after aliases are expanded, which is how a small document becomes a large one
BUILTIN = "enginehouse"

T = TypeVar("T", Entry, Model)


class _Loader(yaml.CSafeLoader):
    """The C safe loader, refusing a key that is given twice: which of the two counts is anyone's guess."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge"):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key.value!r} is given twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def builtin_directory() -> Traversable:
    """Where the package keeps its gallery, launchers and model."""
    return resources.files("enginehouse").joinpath("gallery")


@cache
def load_builtin() -> Gallery:
    """The gallery that comes with the package."""
    directory = builtin_directory()
    return Gallery(
        name=BUILTIN,
        url="builtin:",
        backends=parse_backends(directory.joinpath("backends.yaml").read_bytes(), BUILTIN),
        models=parse_models(directory.joinpath("models.yaml").read_bytes(), BUILTIN),
    )


def parse_backends(document: bytes, gallery: str) -> tuple[Entry, ...]:
    return tuple(entry for entry in _entries(document, gallery, Entry) if _has_good_name(entry, gallery))


def parse_models(document: bytes, gallery: str) -> tuple[Model, ...]:
    return tuple(model for model in _entries(document, gallery, Model) if _has_good_name(model, gallery))


def _entries(document: bytes, gallery: str, kind: type[T]) -> list[T]:
    found: list[T] = []
    for position, item in enumerate(_sequence(document, gallery)):
        try:
            found.append(msgspec.convert(item, kind))
        except msgspec.ValidationError as error:
            named = item.get("name") if isinstance(item, dict) else None
            log.warning("gallery.entry_skipped gallery=%s entry=%s error=%s", gallery, named or f"#{position}", error)
    return found


def _has_good_name(entry: Entry | Model, gallery: str) -> bool:
    try:
        if isinstance(entry, Model):
            check_model_name(entry.name)
        else:
            for name in (entry.name, entry.alias or entry.name, *entry.capabilities.values()):
                check_name(name, "backend")
    except EnginehouseError as error:
        log.warning("gallery.entry_skipped gallery=%s entry=%r error=%s", gallery, entry.name[:40], error)
        return False
    return True


def _sequence(document: bytes, gallery: str) -> list[object]:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise Invalid(
            f"cannot read the gallery {gallery}: {len(document)} bytes, more than {MAX_DOCUMENT_BYTES}",
            code="unsupported",
        )
    try:
        loaded = yaml.load(document.decode("utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        told = " ".join(str(error).split())
        raise Invalid(f"cannot read the gallery {gallery}: {told}", code="unsupported") from error
    if loaded is None:
        return []
    if not isinstance(loaded, list):
        raise Invalid(f"cannot read the gallery {gallery}: it must be a list of entries", code="unsupported")
    if not _is_small(loaded):
        raise Invalid(
            f"cannot read the gallery {gallery}: more than {MAX_NODES} values after aliases are expanded",
            code="unsupported",
        )
    return loaded


def _is_small(loaded: object) -> bool:
    """Walks without recursion and stops at the limit, so a bomb of aliases costs no more than that."""
    waiting = [loaded]
    count = 0
    while waiting:
        count += 1
        if count > MAX_NODES:
            return False
        item = waiting.pop()
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)
    return True
