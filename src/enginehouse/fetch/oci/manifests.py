"""Indexes, manifests and image configurations: parsed, validated, and turned into layers.

Independent of the source of a document. Refused are documents that are ambiguous (index or manifest, duplicate keys),
refer to other URLs for their bytes, exceed the limits, or do not have the requested digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Literal, NoReturn

import msgspec
from msgspec import Struct

from enginehouse.core.artifact import Compression, Layer
from enginehouse.core.errors import Hopeless
from enginehouse.core.reference import is_digest

MAX_DOCUMENT_BYTES = 4 * 1024 * 1024
MAX_LAYERS = 127
MAX_DEPTH = 2  # an index in an index; deeper nesting is not used in practice

INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
MANIFESTS = ("application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json")
ACCEPT = ", ".join((*INDEXES, *MANIFESTS))
_IMAGE_CONFIGURATIONS = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
_COMPRESSIONS: dict[str, Compression] = {"gzip": "gzip", "gz": "gzip", "zstd": "zstd", "zst": "zstd"}


class Platform(Struct, frozen=True):
    os: str = ""
    architecture: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(Struct, frozen=True, rename="camel"):
    """A reference to a blob in an index or manifest."""

    digest: str
    size: int
    media_type: str = ""
    platform: Platform | None = None
    urls: tuple[str, ...] | None = None
    annotations: dict[str, str] | None = None

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEXES


class Parsed(Struct, frozen=True, kw_only=True):
    """A validated document. An index has `children`, a manifest `config` and `layers`."""

    kind: Literal["index", "manifest"]
    digest: str
    media_type: str
    children: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()


class _Document(Struct, rename="camel"):
    schema_version: int = 0
    media_type: str = ""
    manifests: list[Descriptor] | None = None
    layers: list[Descriptor] | None = None
    config: Descriptor | None = None


class _RootFilesystem(Struct):
    diff_ids: list[str] = []


class Configuration(Struct):
    """The fields of an image configuration that are used here."""

    os: str = ""
    architecture: str = ""
    variant: str = ""
    rootfs: _RootFilesystem = msgspec.field(default_factory=_RootFilesystem)


def check_digest(content: bytes, digest: str, what: str) -> str:
    """Return the digest of `content`. Raises `Hopeless` if `digest` is given and differs."""
    actual = "sha256:" + hashlib.sha256(content).hexdigest()
    if digest and digest != actual:
        raise Hopeless(
            f"cannot use {what}: its digest is {actual}, not {digest}; the source is damaged or was changed",
            code="digest_mismatch",
        )
    return actual


def parse(content: bytes, *, media_type: str, digest: str, what: str) -> Parsed:
    """Parse an index or a manifest. `media_type` is the type stated by the sender, or ""."""
    actual = check_digest(content, digest, what)
    raw = _load(content, what)
    if "fsLayers" in raw or raw.get("schemaVersion") == 1:
        raise Hopeless(
            f"cannot use {what}: its manifest has schema version 1, which is not supported; build it again",
            code="unsupported",
        )
    if "manifests" in raw and ("layers" in raw or "config" in raw):
        _unsafe(what, "it is ambiguous: it has the fields of an index and of a manifest")
    try:
        document = msgspec.convert(raw, _Document)
    except msgspec.ValidationError as error:
        raise Hopeless(f"cannot use {what}: it is not a manifest ({error})", code="unsafe_archive") from error
    kind = _kind(document, media_type.partition(";")[0].strip().lower(), what)
    for descriptor in (*(document.manifests or ()), *(document.layers or ())):
        _check_descriptor(descriptor, what)
    if document.manifests is not None:
        return Parsed(kind="index", digest=actual, media_type=kind, children=tuple(document.manifests))
    if document.config is None or document.layers is None:
        _unsafe(what, "it has neither layers nor manifests")
    _check_descriptor(document.config, what)
    if len(document.layers) > MAX_LAYERS:
        raise Hopeless(
            f"cannot use {what}: it has {len(document.layers)} layers; at most {MAX_LAYERS} are allowed",
            code="archive_too_large",
        )
    return Parsed(
        kind="manifest", digest=actual, media_type=kind, config=document.config, layers=tuple(document.layers)
    )


def has_configuration(manifest: Parsed) -> bool:
    """Whether this is an image. Other artifacts have an empty configuration or a type of their own."""
    return manifest.config is not None and manifest.config.media_type in _IMAGE_CONFIGURATIONS


def parse_configuration(content: bytes, what: str) -> Configuration:
    try:
        return msgspec.convert(_load(content, what), Configuration)
    except msgspec.ValidationError as error:
        raise Hopeless(f"cannot use {what}: its configuration is invalid ({error})", code="unsafe_archive") from error


def layers_of(manifest: Parsed, configuration: Configuration | None, what: str) -> tuple[Layer, ...]:
    """Return the layers in order, with the diff IDs of the configuration if there is one."""
    diff_ids = [""] * len(manifest.layers)
    if configuration is not None:
        diff_ids = configuration.rootfs.diff_ids
        if len(diff_ids) != len(manifest.layers) or not all(is_digest(text) for text in diff_ids):
            _unsafe(what, f"its configuration lists {len(diff_ids)} layers, its manifest {len(manifest.layers)}")
    layers = []
    for descriptor, diff_id in zip(manifest.layers, diff_ids, strict=True):
        compression = _compression(descriptor, what)
        if compression == "none" and diff_id not in ("", descriptor.digest):
            _unsafe(what, "the digest and the diff ID of an uncompressed layer differ")
        layers.append(
            Layer(digest=descriptor.digest, size_bytes=descriptor.size, compression=compression, diff_id=diff_id)
        )
    return tuple(layers)


def _load(content: bytes, what: str) -> dict[str, object]:
    try:
        loaded = json.loads(content, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Hopeless(f"cannot use {what}: it is not valid JSON", code="unsafe_archive") from error
    if not isinstance(loaded, dict):
        _unsafe(what, "it is not a JSON object")
    return loaded


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse duplicate keys, because parsers differ in which one they use."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate key")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _kind(document: _Document, sent_as: str, what: str) -> str:
    own = document.media_type
    if own and sent_as and own != sent_as:
        _unsafe(what, f"its media type is {own!r}, but it was sent as {sent_as!r}")
    media_type = own or sent_as
    if media_type not in (INDEXES if document.manifests is not None else MANIFESTS):
        if media_type in (*INDEXES, *MANIFESTS):
            _unsafe(what, f"its content does not match its media type {media_type!r}")
        raise Hopeless(f"cannot use {what}: {media_type or 'no media type'!r} is not an image", code="unsupported")
    return media_type


def _check_descriptor(descriptor: Descriptor, what: str) -> None:
    if not is_digest(descriptor.digest) or descriptor.size < 0:
        _unsafe(what, "a descriptor has a digest that is not sha256 or a negative size")
    if descriptor.urls:
        _unsafe(what, "a descriptor refers to other URLs for its content")


def _compression(descriptor: Descriptor, what: str) -> Compression:
    kind = descriptor.media_type.lower()
    if "foreign" in kind or "nondistributable" in kind:
        _unsafe(what, "it has a non-distributable layer")
    bare, _, ending = kind.replace("+", ".").rpartition(".")
    if ending in _COMPRESSIONS and bare.endswith("tar"):
        return _COMPRESSIONS[ending]
    if ending == "tar":
        return "none"
    raise Hopeless(
        f"cannot use {what}: it has a layer of type {descriptor.media_type!r}, not a tar", code="unsupported"
    )


def _unsafe(what: str, why: str) -> NoReturn:
    raise Hopeless(f"cannot use {what}: {why}", code="unsafe_archive")
