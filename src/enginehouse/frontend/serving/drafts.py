"""Drafts of models: complete and checked, and not stored.

Asks the sources for files and the galleries for the backend. Writes nothing: `definitions` stores drafts.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from enginehouse.core.errors import Invalid, NotFound
from enginehouse.core.file_name import check_file_name
from enginehouse.core.gguf import GgufHeader
from enginehouse.core.model import Model, ModelFile
from enginehouse.core.model_answers import AddModel
from enginehouse.core.model_definition import (
    COMPANION_KEYS,
    FileNeed,
    ModelParts,
    check_nesting,
    make_alias,
    make_model,
    merged,
    needs_of,
    with_companions,
    with_templates,
)
from enginehouse.core.model_source import FoundModel, check_sha256, parse_source
from enginehouse.core.name import check_model_name, shown
from enginehouse.core.node import Node
from enginehouse.core.placement import free_memory
from enginehouse.fetch.models.huggingface import Wishes
from enginehouse.fetch.models.sources import ModelFinder, renamed
from enginehouse.frontend.galleries import Galleries
from enginehouse.frontend.localai.builds import builds_for
from enginehouse.frontend.serving.uploads import Uploads
from enginehouse.store import nodes
from enginehouse.store.db import Store

ALIAS = "alias:"  # a source that is another model of the cluster
GGUF_BACKEND, DIRECTORY_BACKEND = "llama-cpp", "transformers"

CheckEndpoint = Callable[[str], Awaitable[str]]


class Draft(Struct, frozen=True, kw_only=True):
    """A model that is complete and not stored yet."""

    model: Model
    remarks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Kept(Struct, frozen=True, kw_only=True):
    """What stays of a model whose configuration changes, or what is given beside a configuration."""

    files: tuple[ModelFile, ...] = ()
    needs: tuple[FileNeed, ...] = ()  # besides, or instead of, those of the configuration
    replicas: int = 1
    before: Model | None = None


class Drafts:
    def __init__(
        self,
        store: Store,
        galleries: Galleries,
        sources: ModelFinder | None,
        check_endpoint: CheckEndpoint | None,
        uploads: Uploads | None = None,
    ) -> None:
        self._store = store
        self._galleries = galleries
        self._sources = sources
        self._check_endpoint = check_endpoint
        self._uploads = uploads

    async def of_request(self, asked: AddModel) -> Draft:
        if len(asked.sources) == 1 and asked.sources[0].startswith(ALIAS):
            return Draft(model=make_alias(asked.name, asked.sources[0].removeprefix(ALIAS), asked.config))
        kinds = [parse_source(text).kind for text in asked.sources]
        if "endpoint" in kinds:
            return await self._remote(asked)
        check_nesting(asked.config)
        config = with_templates(asked.config)
        config["name"] = asked.name
        needs = [
            FileNeed(
                key="sources",
                source=text,
                credential=asked.credential,
                allow=asked.allow_patterns,
                ignore=asked.ignore_patterns,
            )
            for text in asked.sources
        ]
        if asked.backend:
            config["backend"] = asked.backend
        given = Kept(files=asked.files, needs=(*needs, *needs_of(config)), replicas=asked.replicas)
        return await self.of_needs(config, given)

    async def of_config(self, mapping: Mapping[str, Any]) -> Draft:
        """The draft of an imported configuration."""
        check_model_name(str(mapping["name"]))
        config = with_templates(mapping)
        return await self.of_needs(config, Kept(needs=tuple(needs_of(config))))

    async def of_needs(self, config: dict[str, Any], kept: Kept) -> Draft:
        """Find the files of a configuration and make the model of it."""
        name = str(config["name"])
        fleet = await self._store.read(nodes.every)
        found = [await self._found(name, need, fleet) for need in kept.needs]
        before = kept.before
        for one in found:
            is_companion = one is not found[0] and one.header is not None and one.header.is_projector
            config = merged({"mmproj": one.files[0].name} if is_companion else one.config, config)
        config = with_companions(config, kept.needs, found)
        every = [_checked(file) for file in kept.files] + [file for one in found for file in one.files]
        config = {"name": name, **config}
        if not config.get("backend") and not config.get("alias"):
            config["backend"] = DIRECTORY_BACKEND if any(one.is_directory for one in found) else GGUF_BACKEND
        headers = [await self._uploaded(file) for file in every if file.uri.startswith("upload:")]
        header = next((one for one in (*headers, *(one.header for one in found)) if one is not None), None)
        parts = ModelParts(
            files=tuple(every),
            license=next((one.license for one in found if one.license), before.license if before else ""),
            description=before.description if before else "",
            replicas=kept.replicas,
            context_length=header.context_length if header else before.options.context_size if before else 0,
            cache_bytes_per_token=(
                header.cache_bytes_per_token if header else before.cache_bytes_per_token if before else 0
            ),
        )
        model, warnings = make_model(config, parts)
        doubts = self.about_backend(model, fleet) if model.runs_here else []
        return Draft(
            model=model,
            remarks=tuple(remark for one in found for remark in one.remarks),
            warnings=(*(text for one in found for text in one.warnings), *warnings, *doubts),
        )

    async def _found(self, name: str, need: FileNeed, fleet: Sequence[Node]) -> FoundModel:
        if self._sources is None:
            raise Invalid(f"cannot fetch the files of {name}: this frontend has no sources", code="unsupported")
        wishes = Wishes(
            credential=need.credential,
            memory_bytes=tuple(free_memory(node.capacity) for node in fleet if node.is_schedulable),
            allow=need.allow,
            ignore=need.ignore,
            is_directory=need.is_directory,
        )
        found = await self._sources.find(need.source, wishes)
        if need.sha256 and len(found.files) == 1:
            (file,) = found.files
            if file.sha256 not in ("", need.sha256):
                raise Invalid(
                    f"cannot use {shown(file.name)} of {name}: its sha256 is {file.sha256}, not {need.sha256}",
                    code="digest_mismatch",
                    param="files",
                )
            unknown = tuple(text for text in found.warnings if "no digest" not in text)
            found = replace(found, files=(replace(file, sha256=need.sha256),), warnings=unknown)
        if need.key == "download_files":
            # The configuration itself says how the file is called and what it is for.
            found = replace(renamed(found, need.name or found.files[0].name), config={})
        elif need.key in COMPANION_KEYS:
            found = replace(found, config={})
        return found

    async def _uploaded(self, file: ModelFile) -> GgufHeader | None:
        """The header of an uploaded file; raises if it is not here, or is no model although its name says so."""
        if self._uploads is None:
            raise Invalid(f"cannot use {shown(file.name)}: this frontend takes no uploads", code="unsupported")
        header = await self._uploads.header(file.uri.removeprefix("upload:"))
        if header is None and file.name.lower().endswith(".gguf"):
            raise Invalid(
                f"cannot use {shown(file.name)}: it is no GGUF file, although its name says so; check the file",
                code="unsupported",
                param="files",
            )
        return header

    def about_backend(self, model: Model, fleet: Sequence[Node]) -> list[str]:
        """Warn of a backend that no node can run now; raise for one that no gallery has."""
        targets = [node for node in fleet if node.is_target]
        try:
            builds, reasons = builds_for(self._galleries, model.backend, targets, has_carrier=True)
        except NotFound as error:
            raise Invalid(
                f"cannot add {shown(model.name)}: no gallery has the backend {shown(model.backend)}; "
                "`enginehouse backends available --all` lists those there are",
                code="unknown_backend",
                param="backend",
            ) from error
        if not targets:
            return [f"no node has joined yet: {model.name} cannot be loaded before one does"]
        if not builds:
            why = next(iter(reasons.values()), "")
            return [
                f"no node can run {model.backend} now, so the model cannot be loaded until one joins that can: {why}"
            ]
        return []

    async def _remote(self, asked: AddModel) -> Draft:
        if len(asked.sources) > 1 or asked.files or asked.config or asked.backend:
            raise Invalid(
                f"cannot add {shown(asked.name)}: a server that runs elsewhere is the only source and has no files, "
                "configuration or backend",
                code="unsupported",
                param="source",
            )
        if self._check_endpoint is None:
            raise Invalid(
                f"cannot add {shown(asked.name)}: this frontend uses no servers elsewhere", code="unsupported"
            )
        if asked.credential and self._sources is not None:
            self._sources.credentials.value(asked.credential)
        address = await self._check_endpoint(parse_source(asked.sources[0]).url)
        model = Model(
            name=asked.name,
            backend="",
            files=(),
            description=f"served by {address}",
            endpoint=address,
            credential=asked.credential,
        )
        return Draft(model=model)


def _checked(file: ModelFile) -> ModelFile:
    check_file_name(file.name)
    parse_source(file.uri)
    if file.size_bytes < 0:
        raise Invalid(f"cannot use {shown(file.name)}: its size is negative", code="unsupported", param="files")
    return replace(file, sha256=check_sha256(file.sha256, file.name))
