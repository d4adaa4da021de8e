"""The catalogue of models that galleries of LocalAI's form offer, and what an entry becomes here.

Reads the galleries in memory; only `step` and the installation of an entry read from outside. Writes no rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from enginehouse.core.errors import EnginehouseError, Invalid, NotFound, Unavailable
from enginehouse.core.gallery_entry import Gallery, GalleryState
from enginehouse.core.model_definition import needs_of
from enginehouse.core.model_gallery import GalleryChanges, ModelEntry, VariantCandidate, choose_variant, configured
from enginehouse.core.name import shown
from enginehouse.fetch.galleries.model_index import BaseDocuments, config_of
from enginehouse.fetch.galleries.sources import Sources
from enginehouse.fetch.models.huggingface import Wishes
from enginehouse.fetch.models.sources import ModelFinder

MAX_PROBED = 8  # variants whose size is asked for
PROBE_SECONDS = 8.0  # for all of them together
_UNREAD_SECONDS = 2.0

Place = tuple[Gallery, ModelEntry]


class ModelCatalogue:
    def __init__(self, galleries: Sources | None, documents: BaseDocuments | None, sources: ModelFinder | None) -> None:
        self._galleries = galleries
        self._documents = documents
        self._sources = sources

    async def restore(self) -> None:
        if self._galleries is not None:
            await self._galleries.restore()

    async def step(self) -> None:
        if self._galleries is not None:
            await self._galleries.refresh()

    def states(self) -> tuple[GalleryState, ...]:
        return self._galleries.states if self._galleries is not None else ()

    def entries(self) -> Iterator[Place]:
        for gallery in self._galleries.galleries if self._galleries is not None else ():
            for entry in gallery.offers:
                yield gallery, entry

    def find(self, name: str) -> Place:
        """Find an entry by `name` or `gallery@name`; case does not matter, as in LocalAI."""
        chosen, _, plain = name.rpartition("@")
        for gallery, entry in self.entries():
            if entry.name.lower() == plain.lower() and chosen in ("", gallery.name):
                return gallery, entry
        galleries = self._galleries.galleries if self._galleries is not None else ()
        expected = [one.name for one in galleries if one.is_expected]
        if expected:
            unread = Unavailable(
                f"cannot find {shown(name)} yet: the gallery {', '.join(expected)} is being fetched for the first "
                "time. Try again in a moment",
                code="gallery_loading",
                param="id",
            )
            unread.retry_after_seconds = _UNREAD_SECONDS
            raise unread
        problems = "".join(f"; the gallery {one.name} is not loaded: {one.problem}" for one in galleries if one.problem)
        raise NotFound(
            f"cannot find a model named {shown(name)} in any gallery; see `enginehouse models available`{problems}",
            code="not_found",
            param="id",
        )

    async def configuration(
        self, name: str, changes: GalleryChanges, variant: str, memory_bytes: Sequence[int]
    ) -> tuple[dict[str, Any], str]:
        """The configuration of an entry under its own name, and why this build was chosen."""
        gallery, own = self.find(name)
        entry, reason = await self._chosen(gallery, own, variant, memory_bytes)
        asked = GalleryChanges(name=changes.name or own.name, overrides=changes.overrides, files=changes.files)
        documents = await self._base_documents(gallery, entry)
        return configured(entry, documents, asked), reason

    async def at_address(self, url: str, changes: GalleryChanges) -> dict[str, Any]:
        """The configuration at an address that a request names."""
        if self._documents is None:
            raise Invalid(
                "cannot read a configuration from an address: this frontend has no client", code="unsupported"
            )
        document = await self._documents.read(url, may_read_files=False)
        name = changes.name or str(document.get("name") or document["config_file"].get("name") or "")
        if not name:
            raise Invalid(f"cannot add the model at {shown(url)}: it has no name; give one", param="name")
        return configured(ModelEntry(name=name), [document], changes)

    async def _base_documents(self, gallery: Gallery, entry: ModelEntry) -> list[Mapping[str, Any]]:
        if entry.config_file is not None:
            return [{"config_file": config_of(entry.config_file, entry.name)}]
        if not entry.url or self._documents is None:
            return []
        is_local = gallery.url.startswith("file:")
        return [await self._documents.read(entry.url, may_read_files=is_local)]

    async def _chosen(
        self, gallery: Gallery, own: ModelEntry, wanted: str, memory_bytes: Sequence[int]
    ) -> tuple[ModelEntry, str]:
        by_name = {entry.name.lower(): entry for entry in gallery.offers}
        others = [by_name[one.model.lower()] for one in own.variants if one.model.lower() in by_name]
        every = [own, *(entry for entry in others if entry is not own)]
        if wanted or len(every) == 1:
            return choose_variant([VariantCandidate(entry=entry) for entry in every], memory_bytes, wanted)
        sizes: dict[str, int] = {}
        try:
            async with asyncio.timeout(PROBE_SECONDS), asyncio.TaskGroup() as group:
                for entry in every[:MAX_PROBED]:
                    group.create_task(self._measure(entry, sizes))
        except TimeoutError:
            pass  # what is not known by now does not count
        candidates = [VariantCandidate(entry=entry, size_bytes=sizes.get(entry.name, 0)) for entry in every]
        return choose_variant(candidates, memory_bytes)

    async def _measure(self, entry: ModelEntry, sizes: dict[str, int]) -> None:
        """Ask how large the files of an entry are. An entry whose files cannot be measured stays unknown."""
        if self._sources is None:
            return
        try:
            needs = needs_of({"name": entry.name, "download_files": list(entry.files)})
            found = [await self._sources.find(need.source, Wishes()) for need in needs]
        except EnginehouseError:
            return
        sizes[entry.name] = sum(file.size_bytes for one in found for file in one.files)
