"""Archives from web servers: one file with a known sha256.

The size is requested first. Range requests carry the ETag of the first response (If-Range), so bytes of two versions
are never mixed. If the file changes during the download, it is read again from the start in one request.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.errors import Hopeless, Invalid, Upstream
from enginehouse.core.reference import Source, shown_uri
from enginehouse.fetch.http.answers import failure
from enginehouse.fetch.http.bodies import body, ignores_range, no_ranges, range_header
from enginehouse.fetch.http.client import Client, OutboundRequest
from enginehouse.fetch.http.retries import RetryPolicy
from enginehouse.fetch.oci.local import LocalBlob

_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_TOTAL = re.compile(r"bytes [0-9*-]+/(\d{1,19})")


class ArchiveOrigin:
    """The archive at one URL."""

    def __init__(self, uri: str, source: Source, client: Client, patience: RetryPolicy, *, sha256: str) -> None:
        found = _SHA256.fullmatch(sha256.strip().lower())
        if found is None:
            raise Invalid(
                f"cannot install from {shown_uri(uri)}: its sha256 is missing or invalid; give 64 hexadecimal digits",
                code="invalid_uri",
            )
        self.uri = uri
        self.supports_ranges = True
        self._digest = f"sha256:{found[1]}"
        self._source = source
        self._client = client
        self._patience = patience
        self._version = ""

    async def resolve(self, platform: str) -> Artifact:
        size_bytes = await self._patience.retried(self._size)
        is_plain = self._source.form == "tar" and self._source.compression == "none"
        layer = Layer(
            digest=self._digest,
            size_bytes=size_bytes,
            compression=self._source.compression,
            diff_id=self._digest if is_plain else "",
            form=self._source.form,
        )
        return Artifact(uri=self.uri, digest=self._digest, platform=platform, layers=(layer,))

    def local(self, layer: Layer) -> LocalBlob | None:
        return None

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        end = layer.size_bytes if end is None else min(end, layer.size_bytes)
        if start >= end:
            return
        what = shown_uri(self.uri)
        if start and not self.supports_ranges:
            raise no_ranges(what, start)
        headers = range_header(start, end, layer.size_bytes)
        if headers and self._version:
            headers["if-range"] = self._version
        async with self._client.open(OutboundRequest(url=self._source.url, headers=headers)) as response:
            if response.status in (200, 206):
                self._check_version(response.headers, start, what)
            if ignores_range(response, start, end, layer.size_bytes):
                self.supports_ranges = False
            async for piece in body(response, layer, start, end, what):
                yield piece

    def _check_version(self, headers: Mapping[str, str], start: int, what: str) -> None:
        version = _strong(headers)
        if self._version and version != self._version:
            self.supports_ranges, self._version = False, version
            if start:
                raise Upstream(f"cannot resume {what}: the file has changed on the server", code="no_ranges")
        self._version = self._version or version

    async def _size(self) -> int:
        """Return the size from HEAD, or from a GET of the first byte if the server does not support HEAD."""
        what = shown_uri(self.uri)
        async with self._client.open(OutboundRequest(url=self._source.url, method="HEAD")) as response:
            length = response.headers.get("content-length", "")
            if response.status == 200 and length.isdecimal():
                self._version = _strong(response.headers)
                return int(length)
        async with self._client.open(OutboundRequest(url=self._source.url, headers={"range": "bytes=0-0"})) as response:
            if response.status >= 400:
                raise failure(response.status, what, response.headers)
            self._version = _strong(response.headers)
            total = _TOTAL.fullmatch(response.headers.get("content-range", ""))
            length = total[1] if total and response.status == 206 else response.headers.get("content-length", "")
            if response.status in (200, 206) and length.isdecimal():
                return int(length)
        raise Hopeless(f"cannot install from {what}: the server does not report its size", code="unsupported")


def _strong(headers: Mapping[str, str]) -> str:
    """The ETag if it is strong: only equal strong ETags imply equal bytes."""
    tag = headers.get("etag", "")
    return tag if tag.startswith('"') else ""
