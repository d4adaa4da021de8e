"""Images on the local disk: OCI layout directories, and tars written by `skopeo copy` or `docker save`.

Nothing is copied or unpacked: blobs are used in place, also inside a tar. A source with several images for one
platform is refused, because any choice would be a guess. Files are read in threads, not on the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from enginehouse.core.artifact import Artifact, Compression, Layer
from enginehouse.core.errors import Hopeless, NotFound
from enginehouse.core.reference import is_digest
from enginehouse.fetch.archives.stored_files import StoredFile, StoredFiles, open_places
from enginehouse.fetch.oci.local import LocalBlob, read_local
from enginehouse.fetch.oci.manifests import (
    INDEXES,
    MAX_DOCUMENT_BYTES,
    MAX_LAYERS,
    Configuration,
    Descriptor,
    Platform,
    check_digest,
    parse,
    parse_configuration,
)
from enginehouse.fetch.oci.resolution import artifact_of, is_attestation, matches, unsupported

_MAGIC: tuple[tuple[bytes, Compression], ...] = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"))
_HASHED_AT_ONCE_BYTES = 1024 * 1024

T = TypeVar("T")


class _Saved(Struct, rename="pascal"):
    """An entry of manifest.json in a docker archive."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class LayoutOrigin:
    """One image in a directory or a tar. `local` finds its blobs after `resolve`."""

    def __init__(self, uri: str, path: Path) -> None:
        self.uri = uri
        self.supports_ranges = True
        self._path = path
        self._places: StoredFiles = {}
        self._blobs: dict[str, LocalBlob] = {}

    async def resolve(self, platform: str) -> Artifact:
        self._places = await asyncio.to_thread(open_places, self._path)
        if "index.json" in self._places:
            artifact = await self._from_layout(platform)
        elif "manifest.json" in self._places:
            artifact = await self._from_docker(platform)
        else:
            raise Hopeless(
                f"cannot use {self._path}: it is neither an OCI layout nor a docker archive; create one with skopeo "
                "copy or docker save",
                code="unsupported",
            )
        return artifact

    def local(self, layer: Layer) -> LocalBlob | None:
        return self._blobs.get(layer.digest)

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        blob = self.local(layer)
        if blob is None:
            raise NotFound(
                f"cannot find the layer {layer.digest} in {self._path}; resolve the image again", code="not_found"
            )
        end = layer.size_bytes if end is None else min(end, layer.size_bytes)
        async for piece in read_local(blob, start, end):
            yield piece

    async def manifest(self, descriptor: Descriptor) -> tuple[bytes, str]:
        return await self._document(_blob_name(descriptor.digest)), ""

    async def configuration(self, descriptor: Descriptor) -> bytes:
        return await self._document(_blob_name(descriptor.digest))

    async def _from_layout(self, platform: str) -> Artifact:
        index = parse(await self._document("index.json"), media_type=INDEXES[0], digest="", what=self.uri)
        found: dict[str, Artifact] = {}
        refusals: list[str] = []
        for child in index.children:
            if is_attestation(child):
                continue
            content, _ = await self.manifest(child)
            root = parse(content, media_type=child.media_type, digest=child.digest, what=self.uri)
            try:
                artifact = await artifact_of(root, self, platform=platform, uri=self.uri)
            except Hopeless as error:
                if error.code != "unsupported_platform":
                    raise
                refusals.append(error.message)
                continue
            found[artifact.digest] = artifact
        if not found and len(refusals) == 1:
            raise Hopeless(refusals[0], code="unsupported_platform")
        artifact = self._only(list(found.values()), platform, [f"{len(refusals)} images for other platforms"])
        for layer in artifact.layers:
            place = self._place(_blob_name(layer.digest))
            if place.size_bytes != layer.size_bytes:
                raise Hopeless(
                    f"cannot use {self._path}: the layer {layer.digest} has {place.size_bytes} bytes, not "
                    f"{layer.size_bytes}",
                    code="digest_mismatch",
                )
            self._blobs[layer.digest] = LocalBlob(place.path, place.offset_bytes)
        return artifact

    async def _from_docker(self, platform: str) -> Artifact:
        try:
            saved = msgspec.json.decode(await self._document("manifest.json"), type=list[_Saved])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Hopeless(f"cannot use {self._path}: its manifest.json is invalid", code="unsafe_archive") from error
        fitting, offered = [], []
        for entry in saved:
            content = await self._document(entry.config)
            configuration = parse_configuration(content, self.uri)
            claimed = Platform(configuration.os, configuration.architecture, configuration.variant)
            if claimed.os and claimed.architecture and not matches(claimed, platform):
                offered.append(str(claimed))
                continue
            # A docker archive has no manifest, so the digest of the configuration identifies the image.
            fitting.append((check_digest(content, _digest_in_name(entry.config), self.uri), entry, configuration))
        digest, entry, configuration = self._only(fitting, platform, offered)
        layers = await self._docker_layers(entry, configuration)
        return Artifact(uri=self.uri, digest=digest, platform=platform, layers=layers)

    async def _docker_layers(self, entry: _Saved, configuration: Configuration) -> tuple[Layer, ...]:
        diff_ids = configuration.rootfs.diff_ids
        if len(diff_ids) != len(entry.layers) or len(diff_ids) > MAX_LAYERS or not all(map(is_digest, diff_ids)):
            raise Hopeless(
                f"cannot use {self._path}: its configuration lists {len(diff_ids)} layers, its manifest.json "
                f"{len(entry.layers)}",
                code="unsafe_archive",
            )
        layers = []
        for name, diff_id in zip(entry.layers, diff_ids, strict=True):
            place = self._place(name)
            layer = await asyncio.to_thread(_describe, place, diff_id)
            self._blobs[layer.digest] = LocalBlob(place.path, place.offset_bytes)
            layers.append(layer)
        return tuple(layers)

    def _only(self, found: list[T], platform: str, offered: list[str]) -> T:
        if not found:
            raise unsupported(self.uri, platform, offered)
        if len(found) > 1:
            raise Hopeless(
                f"cannot choose from {self._path}: it has {len(found)} images for {platform}; keep one of them",
                code="unsupported",
            )
        return found[0]

    async def _document(self, name: str) -> bytes:
        place = self._place(name)
        if place.size_bytes > MAX_DOCUMENT_BYTES:
            raise Hopeless(
                f"cannot use {self._path}: {name} is larger than {MAX_DOCUMENT_BYTES} bytes", code="archive_too_large"
            )
        blob = LocalBlob(place.path, place.offset_bytes)
        return b"".join([piece async for piece in read_local(blob, 0, place.size_bytes)])

    def _place(self, name: str) -> StoredFile:
        if place := self._places.get(name):
            return place
        raise Hopeless(f"cannot use {self._path}: it does not contain {name[:120]}", code="not_found")


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)


def _digest_in_name(name: str) -> str:
    """The digest in a file name such as `<hex>.json` or `blobs/sha256/<hex>`, or ""."""
    candidate = "sha256:" + name.rpartition("/")[2].removesuffix(".json")
    return candidate if is_digest(candidate) else ""


def _describe(place: StoredFile, diff_id: str) -> Layer:
    """Describe a saved layer. The digest of an uncompressed layer is its diff ID, which is checked on unpacking."""
    with place.path.open("rb") as file:
        file.seek(place.offset_bytes)
        start = file.read(min(4, place.size_bytes))
        compression: Compression = next((kind for magic, kind in _MAGIC if start.startswith(magic)), "none")
        digest = diff_id
        if compression != "none":
            file.seek(place.offset_bytes)
            hashed, left = hashlib.sha256(), place.size_bytes
            while left and (piece := file.read(min(left, _HASHED_AT_ONCE_BYTES))):
                hashed.update(piece)
                left -= len(piece)
            digest = "sha256:" + hashed.hexdigest()
    return Layer(digest=digest, size_bytes=place.size_bytes, compression=compression, diff_id=diff_id)
