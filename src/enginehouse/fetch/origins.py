"""From a URI to the place its bytes come from: the one function that chooses.

An origin is made without asking anybody; `resolve` is the first question. Mirrors are several origins, and which is
tried when is the caller's choice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import Invalid
from enginehouse.core.reference import parse_uri, shown_uri
from enginehouse.fetch.archives.layout import LayoutOrigin
from enginehouse.fetch.archives.web import ArchiveOrigin
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.oci.local import LocalBlob
from enginehouse.fetch.registry.images import ImageOrigin
from enginehouse.fetch.registry.requests import Registries

__all__ = ["LocalBlob", "Origin", "open_origin"]


class Origin(Protocol):
    """Something that can be installed, where it is kept."""

    uri: str
    # False once a server answered a request for a range with the whole; then `read` can only begin at byte 0.
    supports_ranges: bool

    async def resolve(self, platform: str) -> Artifact:
        """What there is for `platform`, by digest. Small, and asked for again when the server is busy."""

    def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        """Bytes [start, end) of a layer, never more. `Upstream` when they break off or nothing comes (`stalled`),
        or when the server sends only the whole (`no_ranges`). Nothing is checked against a digest.
        """

    def local(self, layer: Layer) -> LocalBlob | None:
        """Where the bytes are on this disk already, once `resolve` was called; None when they must be read."""


def open_origin(uri: str, *, client: Client, registries: Registries, sha256: str = "") -> Origin:
    """The origin of an image, a layout, a tar or an archive; raises `Invalid` for a URI that names none of them."""
    source = parse_uri(uri)
    match source.kind:
        case "image":
            assert source.image is not None
            return ImageOrigin(uri, source.image, client, registries)
        case "ocifile":
            return LayoutOrigin(uri, Path(source.path))
        case "archive":
            return ArchiveOrigin(uri, source, client, registries.patience, sha256=sha256)
        case "directory" | "package":
            raise Invalid(f"cannot fetch {shown_uri(uri)}: a {source.kind} is not an artifact", code="unsupported")
