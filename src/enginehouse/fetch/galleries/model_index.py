"""Model galleries of LocalAI: the index, and the base documents that its entries lead to.

An entry that cannot be read is skipped with the reason and does not affect the others. Base documents are read on
demand, through the same client and rules as everything else; one on this disk only for a gallery on this disk.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from msgspec.structs import replace

from enginehouse.core.errors import EnginehouseError, Invalid
from enginehouse.core.gallery_entry import Gallery, Skipped
from enginehouse.core.gallery_source import location
from enginehouse.core.model_gallery import ModelEntry
from enginehouse.core.name import check_model_name
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.galleries.copies import FETCH_SECONDS, read_file
from enginehouse.fetch.galleries.documents import YamlLimits, read_mappings
from enginehouse.fetch.http.client import Client

MAX_BASE_BYTES = 256 * 1024
KEPT_SECONDS = 3600.0  # as in LocalAI
MAX_KEPT = 200
# LocalAI's index has 1,700 entries of some forty values each.
INDEX_LIMITS = YamlLimits(nodes=1_000_000, seconds=10.0)
_LISTS = ("files", "prompt_templates", "variants", "urls", "tags")
_TEXTS = ("url", "description", "license", "icon", "backend")


def with_models(gallery: Gallery, body: bytes) -> Gallery:
    """The gallery with the entries of an index. Blocks; raises `Invalid` if it has no usable entry."""
    entries: list[ModelEntry] = []
    skipped: list[Skipped] = []
    seen: set[str] = set()
    for position, item in enumerate(read_mappings(body, f"the gallery {gallery.name}", INDEX_LIMITS)):
        name = str(item.get("name") or f"#{position + 1}")[:60]
        try:
            entry = msgspec.convert(_tolerant(item), ModelEntry, strict=False)
            check_model_name(entry.name)
        except (msgspec.ValidationError, EnginehouseError) as error:
            skipped.append(Skipped(name, str(error)))
            continue
        if entry.name.lower() in seen:
            skipped.append(Skipped(name, "an entry before it has the same name"))
            continue
        seen.add(entry.name.lower())
        entries.append(entry)
    if not entries:
        raise Invalid(
            f"cannot use the gallery {gallery.name}: it has no usable entries; check its URL", code="unsupported"
        )
    return replace(gallery, offers=tuple(entries), skipped=tuple(skipped), problem="", is_expected=False)


def _tolerant(item: dict[str, Any]) -> dict[str, Any]:
    """Drop keys without a value and presentation of the wrong type: LocalAI ignores both."""
    kept = {key: value for key, value in item.items() if value is not None}
    for key in _LISTS:
        if key in kept and not isinstance(kept[key], list):
            del kept[key]
    for key in _TEXTS:
        if key in kept and not isinstance(kept[key], str):
            kept[key] = str(kept[key])
    for key in ("urls", "tags"):
        if key in kept:
            kept[key] = [str(one) for one in kept[key]]
    return kept


class BaseDocuments:
    """Base documents by address, kept for a while."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._kept: dict[str, tuple[float, dict[str, Any]]] = {}

    async def read(self, url: str, *, may_read_files: bool) -> dict[str, Any]:
        """The document at `url`, with its `config_file` as a map."""
        place = location(url)
        if place.startswith("file:"):
            if not may_read_files:
                raise Invalid(
                    f"cannot read {shown_uri(url)}: only galleries on this machine may name files of this machine",
                    code="uri_not_allowed",
                )
            found = await asyncio.to_thread(read_file, Path(unquote(place.removeprefix("file://"))), "")
            return opened((found or (b"", ""))[0], url)
        known = self._kept.get(place)
        if known is not None and time.monotonic() - known[0] < KEPT_SECONDS:
            return known[1]
        answer = await self._client.document(place, limit_bytes=MAX_BASE_BYTES, total_seconds=FETCH_SECONDS)
        document = opened(answer.body, url)
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        self._kept[place] = (time.monotonic(), document)
        return document


def opened(body: bytes, url: str) -> dict[str, Any]:
    """A base document from its bytes. A plain configuration counts as a document that has nothing else."""
    found = read_mappings(body, shown_uri(url))
    if len(found) > 1:
        raise Invalid(f"cannot use {shown_uri(url)}: it must be one mapping", code="unsupported")
    document = found[0] if found else {}
    if "config_file" not in document and ({"backend", "parameters"} & set(document)):
        return {"config_file": document}
    return {**document, "config_file": config_of(document.get("config_file"), url)}


def config_of(value: object, what: str) -> dict[str, Any]:
    """The value of `config_file`: a map, or the text of one."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, str) or not value.strip():
        return {}
    found = read_mappings(value.encode(), f"the config_file of {shown_uri(what)}")
    return found[0] if found else {}
