"""Finds what a source of a model has, whatever its kind.

The only entrance to this room: everything leaves through the one HTTP client with its rules. A result is complete and
pinned, or there is an error with what to do; nothing is stored here.
"""

from __future__ import annotations

import asyncio
from typing import assert_never

import msgspec
from msgspec import Struct

from enginehouse.core.errors import Invalid, Upstream
from enginehouse.core.file_name import check_file_name
from enginehouse.core.gguf import about_architecture
from enginehouse.core.model import ModelFile
from enginehouse.core.model_source import FoundModel, ModelSource, parse_source, plain_file_name
from enginehouse.core.reference import shown_uri
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.models.credentials import ModelCredentials
from enginehouse.fetch.models.huggingface import HuggingFace, Wishes
from enginehouse.fetch.models.registries import OLLAMA, RegistryModels
from enginehouse.fetch.models.web import probe
from enginehouse.fetch.registry.requests import Registries

FIND_SECONDS = 25.0  # below the limit of a request of the command line


class SourceOptions(Struct, frozen=True, kw_only=True):
    huggingface: str
    ollama: str = OLLAMA
    patience: RetryPolicy = RetryPolicy(tries=2)


class ModelFinder:
    def __init__(
        self, client: Client, registries: Registries, credentials: ModelCredentials, options: SourceOptions
    ) -> None:
        self.client = client
        self.credentials = credentials
        self._huggingface = HuggingFace(client, options.huggingface, credentials, options.patience)
        self._registries = RegistryModels(client, registries, options.ollama)

    async def find(self, text: str, wishes: Wishes) -> FoundModel:
        """Return what the source has. Raises what `parse_source` raises, and errors of the server."""
        source = parse_source(text)
        try:
            async with asyncio.timeout(FIND_SECONDS):
                return await self._find(source, wishes)
        except TimeoutError as error:
            raise Upstream(
                f"cannot read {shown_uri(text)}: timeout after {FIND_SECONDS:g} s; check the network",
                code="upstream_timeout",
            ) from error

    async def _find(self, source: ModelSource, wishes: Wishes) -> FoundModel:
        match source.kind:
            case "huggingface":
                return await self._huggingface.find(source, wishes)
            case "ollama":
                return await self._registries.find_ollama(source)
            case "oci":
                return await self._registries.find_image(source)
            case "web":
                return await self._web(source, wishes)
            case "file":
                name = check_file_name(source.path.rpartition("/")[2])
                return FoundModel(files=(ModelFile(name=name, uri=f"file://{source.path}", sha256=""),))
            case "upload":
                name = f"{source.path[:16]}.gguf"
                return FoundModel(files=(ModelFile(name=name, uri=source.text, sha256=source.path),))
            case "kept":
                name = plain_file_name(source.text.rpartition(":")[2].rpartition("#")[2]) or "model"
                return FoundModel(files=(ModelFile(name=name, uri=source.text, sha256=""),))
            case "endpoint":
                raise Invalid(
                    f"cannot use {shown_uri(source.text)} as a file: it is the address of a server",
                    code="invalid_uri",
                    param="source",
                )
        assert_never(source.kind)

    async def _web(self, source: ModelSource, wishes: Wishes) -> FoundModel:
        headers = self.credentials.headers(wishes.credential)
        found = await probe(self.client, source.url, headers, credential=wishes.credential)
        if not found.name:
            raise Invalid(
                f"cannot use {shown_uri(source.url)}: it has no file name; name the file in `files`",
                code="invalid_uri",
                param="source",
            )
        file = ModelFile(
            name=found.name,
            uri=source.url,
            sha256=found.sha256,
            size_bytes=found.size_bytes,
            credential=wishes.credential,
        )
        header = found.header
        config: dict[str, object] = {"parameters": {"model": file.name}}
        if header is not None and header.is_reranker:
            config["reranking"] = True
        elif header is not None and header.is_embedding:
            config["embeddings"] = True
        doubt = about_architecture(header) if header is not None else ""
        unknown = () if file.sha256 else ("the server states no digest: it is recorded at the first download",)
        return FoundModel(
            files=(file,),
            license=header.license if header is not None else "",
            header=header,
            config=config,
            warnings=(*unknown, *([doubt] if doubt else [])),
        )


def renamed(found: FoundModel, name: str) -> FoundModel:
    """The same, with another name for its only file: a configuration says how its files are called."""
    if len(found.files) != 1:
        return found
    return msgspec.structs.replace(found, files=(msgspec.structs.replace(found.files[0], name=name),))
