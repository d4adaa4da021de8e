"""Models in registries: Ollama's, and files in any OCI artifact.

A tag is resolved once; the URIs that leave here name blobs by digest. In Ollama's manifests the media type says what a
layer is: the model, its projector, its template, its parameters or its licence. In other artifacts the layers with a
title are files; a layer that is an archive is no model and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.file_name import check_file_name
from enginehouse.core.model import ModelFile
from enginehouse.core.model_source import FoundModel, ModelSource
from enginehouse.core.reference import ImageReference, parse_image
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.oci.manifests import ACCEPT, MAX_DOCUMENT_BYTES, Descriptor, Parsed, parse
from enginehouse.fetch.registry.requests import Registries, Registry

OLLAMA = "registry.ollama.ai"
_OLLAMA_LAYER = "application/vnd.ollama.image."
MAX_TEXT_BYTES = 256 * 1024
_TITLE = "org.opencontainers.image.title"
_LICENSE = "org.opencontainers.image.licenses"
_ARCHIVES = ("tar", "tar+gzip", "tar+zstd", "tar.gzip", "diff.tar.gzip")
_ACCEPT_ARTIFACT = f"{ACCEPT}, application/vnd.oci.artifact.manifest.v1+json"
# Parameters of Ollama that LocalAI's configurations have, and where.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "num_predict": "max_tokens",
}


class RegistryModels:
    def __init__(self, client: Client, registries: Registries, ollama: str = OLLAMA) -> None:
        self._client = client
        self._registries = registries
        self._ollama = ollama

    async def find_ollama(self, source: ModelSource) -> FoundModel:
        reference = ImageReference(host=self._ollama, repository=source.repository, tag=source.revision)
        registry, manifest = await self._manifest(reference)
        layers = {one.media_type.removeprefix(_OLLAMA_LAYER): one for one in reversed(manifest.layers)}
        model = layers.get("model")
        if model is None:
            raise Invalid(
                f"cannot use {source.text}: its manifest has no model; it may be an adapter or run elsewhere",
                code="unsupported",
                param="source",
            )
        stem = f"{source.repository.rpartition('/')[2]}-{source.revision}"
        files = [self._file(f"{stem}.gguf", reference, model, scheme="ollama")]
        config: dict[str, Any] = {"parameters": {"model": files[0].name}}
        if projector := layers.get("projector"):
            files.append(self._file(f"{stem}-projector.gguf", reference, projector, scheme="ollama"))
            config["mmproj"] = files[-1].name
        warnings = ["its chat template is Ollama's and is not used: the one in the model's file is"]
        if parameters := layers.get("params"):
            self._take_parameters(config, await self._text(registry, parameters))
        if system := layers.get("system"):
            config["system_prompt"] = await self._text(registry, system)
        if "adapter" in layers:
            warnings.append("its adapter is not used")
        terms = await self._text(registry, layers["license"]) if "license" in layers else ""
        return FoundModel(
            files=tuple(files),
            license=_first_line(terms),
            config=config,
            warnings=tuple(warnings if "template" in layers else warnings[1:]),
        )

    async def find_image(self, source: ModelSource) -> FoundModel:
        reference = parse_image(source.repository)
        _, manifest = await self._manifest(reference)
        titled = [
            (str((one.annotations or {}).get(_TITLE, "")), one)
            for one in manifest.layers
            if (one.annotations or {}).get(_TITLE)
        ]
        files = [
            (title, one) for title, one in titled if not one.media_type.endswith(_ARCHIVES) and not title.endswith("/")
        ]
        if not files:
            raise Invalid(
                f"cannot use {reference} as a model: none of its layers is a file with a title; push one with "
                "`oras push REGISTRY/NAME:TAG model.gguf`",
                code="unsupported",
                param="source",
            )
        files.sort(key=lambda pair: (not pair[0].lower().endswith(".gguf"), "mmproj" in pair[0].lower(), pair[0]))
        placed = tuple(self._file(title, reference, one, scheme="oci") for title, one in files)
        is_gguf = placed[0].name.lower().endswith(".gguf")
        projector = next((file.name for file in placed if "mmproj" in file.name.lower()), "")
        config: dict[str, Any] = {"parameters": {"model": placed[0].name}} if is_gguf else {}
        if projector:
            config["mmproj"] = projector
        return FoundModel(
            files=placed,
            license=_license(manifest.layers),
            is_directory=not is_gguf,
            config=config,
        )

    def _file(self, name: str, reference: ImageReference, layer: Descriptor, *, scheme: str) -> ModelFile:
        return ModelFile(
            name=check_file_name(name),
            uri=f"{scheme}://{reference.host}/{reference.repository}@{layer.digest}",
            sha256=layer.digest.removeprefix("sha256:"),
            size_bytes=layer.size,
        )

    async def _manifest(self, reference: ImageReference) -> tuple[Registry, Parsed]:
        registry = self._registries.open(reference, self._client)
        answer = await registry.document(
            f"manifests/{reference.wanted}", accept=_ACCEPT_ARTIFACT, limit_bytes=MAX_DOCUMENT_BYTES
        )
        media_type = answer.headers.get("content-type", "")
        if media_type.startswith(("application/json", "text/plain")):
            media_type = ""  # Ollama's registry says so; the document itself knows better
        parsed = parse(answer.body, media_type=media_type, digest=reference.digest, what=str(reference))
        if parsed.kind == "index":
            raise Invalid(
                f"cannot use {reference} as a model: it is an index of images for several platforms; name one digest",
                code="unsupported",
                param="source",
            )
        return registry, parsed

    async def _text(self, registry: Registry, layer: Descriptor) -> str:
        if layer.size > MAX_TEXT_BYTES:
            raise Hopeless(f"cannot use {registry.reference}: a text of it has {layer.size} bytes", code="too_large")
        answer = await registry.document(f"blobs/{layer.digest}", accept="", limit_bytes=MAX_TEXT_BYTES)
        return answer.body.decode("utf-8", "replace")

    def _take_parameters(self, config: dict[str, Any], content: str) -> None:
        try:
            given = msgspec.json.decode(content, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        for theirs, ours in _PARAMETERS.items():
            if isinstance(given.get(theirs), int | float):
                config["parameters"][ours] = given[theirs]
        if isinstance(given.get("num_ctx"), int):
            config["context_size"] = given["num_ctx"]
        stops = given.get("stop")
        if isinstance(stops, list) and all(isinstance(one, str) for one in stops):
            config["stopwords"] = stops


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:100] if lines else ""


def _license(layers: Sequence[Descriptor]) -> str:
    return next((one.annotations[_LICENSE] for one in layers if one.annotations and _LICENSE in one.annotations), "")
