"""Single files from web servers and registries, as origins of one blob.

A file from a web server is read in ranges that carry the ETag of the first response (If-Range), so bytes of two
versions are never mixed. Its digest may be unknown: then `version` says whether bytes of an earlier run still belong to
the same file. Nothing here checks digests.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping

from msgspec import Struct

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import Denied, Hopeless, Upstream
from enginehouse.core.reference import ImageReference, shown_uri
from enginehouse.fetch.http.answers import failure
from enginehouse.fetch.http.bodies import body, ignores_range, no_ranges, range_header
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.oci.local import LocalBlob
from enginehouse.fetch.registry.images import ImageOrigin
from enginehouse.fetch.registry.requests import Registries

_TOTAL = re.compile(r"bytes [0-9*-]+/(\d{1,19})")


class Described(Struct, frozen=True):
    """What a server says of a file before it is read; `version` is "" if it gives none."""

    size_bytes: int
    version: str = ""


class WebFile:
    """The file at one URL, read as one version even without a known digest. `headers` go to its host only."""

    def __init__(
        self, url: str, client: Client, patience: RetryPolicy, headers: Mapping[str, str], *, has_digest: bool
    ) -> None:
        self.uri = url
        self.supports_ranges = True
        self._client = client
        self._patience = patience
        self._headers = dict(headers)
        self._has_digest = has_digest
        self._tag = ""

    async def resolve(self, platform: str) -> Artifact:
        raise Hopeless(f"cannot install from {shown_uri(self.uri)}: it is a single file", code="unsupported")

    def local(self, layer: Layer) -> LocalBlob | None:
        return None

    async def describe(self) -> Described:
        return await self._patience.retried(self._describe)

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        end = layer.size_bytes if end is None else min(end, layer.size_bytes)
        if start >= end:
            return
        what = shown_uri(self.uri)
        if start and not self.supports_ranges:
            raise no_ranges(what, start)
        headers = range_header(start, end, layer.size_bytes)
        if headers and self._tag:
            headers["if-range"] = self._tag
        request = OutboundRequest(url=self.uri, headers={**self._headers, **headers})
        async with self._client.open(request) as response:
            if response.status in (401, 403):
                raise _gated(what)
            if response.status in (200, 206) and self._tag and _strong(response.headers) != self._tag:
                raise Upstream(f"cannot fetch {what}: it was changed on the server meanwhile", code="source_changed")
            if ignores_range(response, start, end, layer.size_bytes):
                self.supports_ranges = False
            async for piece in body(response, layer, start, end, what):
                yield piece

    async def _describe(self) -> Described:
        """From HEAD, or from a GET of the first byte if the server does not support HEAD."""
        what = shown_uri(self.uri)
        head = OutboundRequest(url=self.uri, method="HEAD", headers=self._headers)
        async with self._client.open(head) as response:
            length = response.headers.get("content-length", "")
            if response.status == 200 and length.isdecimal() and not response.is_encoded:
                return self._noted(int(length), response.headers)
            if response.status in (401, 403):
                raise _gated(what)
        first = OutboundRequest(url=self.uri, headers={**self._headers, "range": "bytes=0-0"})
        async with self._client.open(first) as response:
            if response.status in (401, 403):
                raise _gated(what)
            if response.status >= 400:
                raise failure(response.status, what, response.headers)
            total = _TOTAL.fullmatch(response.headers.get("content-range", ""))
            length = total[1] if total and response.status == 206 else response.headers.get("content-length", "")
            if response.status in (200, 206) and length.isdecimal() and not response.is_encoded:
                return self._noted(int(length), response.headers)
        raise Hopeless(f"cannot fetch {what}: the server does not report its size", code="unsupported")

    def _noted(self, size_bytes: int, headers: Mapping[str, str]) -> Described:
        tag = _strong(headers)
        self._tag = "" if self._has_digest else tag
        return Described(size_bytes, tag)


class RegistryFile(ImageOrigin):
    """A blob in a registry, by digest."""

    def __init__(self, uri: str, reference: ImageReference, client: Client, registries: Registries) -> None:
        super().__init__(uri, reference, client, registries)

    async def describe(self) -> Described:
        url = self._registry.url(f"blobs/{self._reference.digest}")
        async with self._registry.open(url, {}) as response:
            if response.status >= 400:
                raise failure(response.status, str(self._reference), response.headers)
            length = response.headers.get("content-length", "")
            if response.status == 200 and length.isdecimal():
                return Described(int(length), self._reference.digest)
        raise Upstream(f"cannot fetch {self._reference}: the registry does not report the size of the file")


def _gated(what: str) -> Denied:
    return Denied(
        f"cannot fetch {what}: access denied. It is private, gated or does not exist; accept its terms, and set the "
        "credential that the model names on this node",
        code="forbidden",
        param="credential",
    )


def _strong(headers: Mapping[str, str]) -> str:
    """The ETag if it is strong: only equal strong ETags imply equal bytes."""
    tag = headers.get("etag", "")
    return tag if tag.startswith('"') else ""
