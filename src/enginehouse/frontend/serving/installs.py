"""Models from documents: imports of LocalAI's YAML, installs from galleries, and exports.

Everything becomes a draft and then a row, through `definitions`. YAML is read and written in `fetch.galleries`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from enginehouse.core.errors import EnginehouseError, Invalid, NotFound
from enginehouse.core.gallery_entry import Gallery, GalleryState
from enginehouse.core.gallery_source import location
from enginehouse.core.ids import OperationId
from enginehouse.core.model_answers import AddModel, DefinedModel
from enginehouse.core.model_gallery import GalleryChanges, ModelEntry
from enginehouse.core.model_source import parse_source
from enginehouse.core.name import check_model_name
from enginehouse.core.placement import free_memory
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.galleries.documents import read_mappings, write_mapping
from enginehouse.fetch.http.client import Client
from enginehouse.frontend.acceptance import Requester
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.serving.catalogue import ModelCatalogue
from enginehouse.frontend.serving.definitions import Definitions, defined
from enginehouse.frontend.serving.drafts import Draft, Drafts
from enginehouse.store import nodes
from enginehouse.store.db import Store

MAX_DOCUMENT_BYTES = 1024 * 1024
FETCH_SECONDS = 20.0


class ApplyModel(Struct, frozen=True, kw_only=True):
    """An entry of a gallery, or the address of a configuration or a model, and what to change of it."""

    id: str = ""
    url: str = ""
    variant: str = ""
    changes: GalleryChanges = GalleryChanges()


class InstallParts(Struct, frozen=True, kw_only=True):
    store: Store
    galleries: Galleries
    definitions: Definitions
    drafts: Drafts
    catalogue: ModelCatalogue
    client: Client | None


class ModelInstalls:
    def __init__(self, parts: InstallParts) -> None:
        self._store = parts.store
        self._galleries = parts.galleries
        self._definitions = parts.definitions
        self._drafts = parts.drafts
        self._catalogue = parts.catalogue
        self._client = parts.client

    def offers(self) -> Iterator[tuple[Gallery, ModelEntry]]:
        return self._catalogue.entries()

    def states(self) -> tuple[GalleryState, ...]:
        return self._catalogue.states()

    async def written(self, name: str) -> str:
        """The configuration of a model as YAML."""
        return write_mapping(await self._definitions.export(name))

    async def import_text(self, body: bytes) -> list[DefinedModel]:
        mappings = await asyncio.to_thread(read_mappings, body, "the configuration")
        return await self._definitions.import_all(mappings)

    async def import_url(self, url: str) -> list[DefinedModel]:
        place = location(url)
        if self._client is None or place.startswith("file:"):
            raise Invalid(
                f"cannot import from {shown_uri(url)}: a frontend reads configurations from http(s) and github: only",
                code="uri_not_allowed",
                param="url",
            )
        answer = await self._client.document(place, limit_bytes=MAX_DOCUMENT_BYTES, total_seconds=FETCH_SECONDS)
        return await self.import_text(answer.body)

    async def plan(self, wanted: ApplyModel) -> DefinedModel:
        """What `apply` would store; stores nothing."""
        return defined(await self._draft(wanted), is_stored=False)

    async def apply(self, wanted: ApplyModel, requester: Requester) -> tuple[DefinedModel, OperationId]:
        """Add the model and begin its load."""
        draft = await self._draft(wanted)
        return await self._definitions.store_drafts([draft], requester, ["apply", wanted], is_loaded=True)

    async def _draft(self, wanted: ApplyModel) -> Draft:
        if bool(wanted.id) == bool(wanted.url):
            raise Invalid("cannot install a model: give either `id` or `url`", code="unsupported", param="id")
        if wanted.url:
            return await self._at_address(wanted)
        try:
            self._catalogue.find(wanted.id)
        except EnginehouseError:
            # A gallery of models comes first, because a person may have one with the same name.
            own = self._galleries.model(wanted.id)
            if own is None:
                raise
            if wanted.changes.overrides or wanted.changes.files or wanted.variant:
                raise NotFound(
                    f"cannot install {wanted.id} with changes: it comes with Enginehouse; install it, then change it",
                    param="overrides",
                ) from None
            name = check_model_name(wanted.changes.name or own.name)
            return Draft(model=replace(own, name=name))
        fleet = await self._store.read(nodes.every)
        memory = [free_memory(node.capacity) for node in fleet if node.is_schedulable]
        config, reason = await self._catalogue.configuration(wanted.id, wanted.changes, wanted.variant, memory)
        draft = await self._drafts.of_config(config)
        return replace(draft, remarks=(*([reason] if reason else []), *draft.remarks))

    async def _at_address(self, wanted: ApplyModel) -> Draft:
        """The draft of a configuration at an address, or of a model at its source."""
        is_document = wanted.url.partition("?")[0].partition("@")[0].endswith((".yaml", ".yml", ".json"))
        if is_document or wanted.url.startswith("github:"):
            return await self._drafts.of_config(await self._catalogue.at_address(wanted.url, wanted.changes))
        parse_source(wanted.url)
        name = wanted.changes.name or shown_uri(wanted.url).rstrip("/").rpartition("/")[2].removesuffix(".gguf")
        asked = AddModel(name=check_model_name(name), sources=(wanted.url,), config=wanted.changes.overrides)
        return await self._drafts.of_request(asked)
