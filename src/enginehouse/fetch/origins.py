"""Origins: the source of an artifact's bytes, chosen from its URI.

`open_origin` is the only place that maps a kind of URI to an implementation. It makes no request; `resolve` makes the
first one. Each mirror is an origin of its own, and the caller chooses the order in which mirrors are tried.
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


class Origin(Protocol):
    """One source of an artifact."""

    uri: str
    # False once the server has answered a range request with the whole blob; `read` must then start at byte 0.
    supports_ranges: bool

    async def resolve(self, platform: str) -> Artifact:
        """Return the artifact for `platform`, by digest. Small requests, retried while the server is busy."""

    def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        """Yield bytes [start, end) of a layer and no more. Digests are not checked here.

        Raises `Upstream` when the transfer is cut off, when no byte arrives in time (`stalled`), or when the server
        does not support ranges and `start` is above 0 (`no_ranges`).
        """

    def local(self, layer: Layer) -> LocalBlob | None:
        """Return the layer's place on the local disk, or None if it must be read. Valid after `resolve`."""


def open_origin(uri: str, *, client: Client, registries: Registries, sha256: str = "") -> Origin:
    """Return the origin of an image, a layout, a tar or an archive. Raises `Invalid` for any other kind of URI."""
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
            raise Invalid(
                f"cannot fetch {shown_uri(uri)}: a {source.kind} is not an artifact; use an image or an archive",
                code="unsupported",
            )
