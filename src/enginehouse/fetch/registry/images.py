"""Images from registries, by the OCI distribution protocol.

A tag is resolved once; all later requests are by digest, so the recorded digest is the installed one.
If the registry redirects a blob, the redirect target is used for the other ranges of that blob, without credentials,
until it expires. This saves one request per range.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from enginehouse.core.artifact import Artifact, Layer
from enginehouse.core.reference import ImageReference, is_digest
from enginehouse.fetch.http.bodies import body, ignores_range, no_ranges, range_header
from enginehouse.fetch.http.client import Client
from enginehouse.fetch.oci.local import LocalBlob
from enginehouse.fetch.oci.manifests import ACCEPT, MAX_DOCUMENT_BYTES, Descriptor, check_digest, parse
from enginehouse.fetch.oci.resolution import artifact_of
from enginehouse.fetch.registry.requests import Registries

# Statuses of an expired signed URL; they depend on the storage provider.
_EXPIRED = {400, 401, 403, 404, 410}


class ImageOrigin:
    """One image in a registry."""

    def __init__(self, uri: str, reference: ImageReference, client: Client, registries: Registries) -> None:
        self.uri = uri
        self.supports_ranges = True
        self._reference = reference
        self._registry = registries.open(reference, client)
        self._moved: dict[str, str] = {}

    async def resolve(self, platform: str) -> Artifact:
        content, sent_as = await self._document(self._reference.wanted)
        root = parse(content, media_type=sent_as, digest=self._reference.digest, what=self.uri)
        return await artifact_of(root, self, platform=platform, uri=self.uri)

    async def manifest(self, descriptor: Descriptor) -> tuple[bytes, str]:
        return await self._document(descriptor.digest)

    async def configuration(self, descriptor: Descriptor) -> bytes:
        answer = await self._registry.document(
            f"blobs/{descriptor.digest}", accept="", limit_bytes=max(descriptor.size, 1)
        )
        return answer.body

    def local(self, layer: Layer) -> LocalBlob | None:
        return None

    async def read(self, layer: Layer, start: int, end: int | None) -> AsyncIterator[bytes]:
        end = layer.size_bytes if end is None else min(end, layer.size_bytes)
        if start >= end:
            return
        what = f"{layer.digest[:19]} of {self._reference}"
        if start and not self.supports_ranges:
            raise no_ranges(what, start)
        headers = range_header(start, end, layer.size_bytes)
        own = self._registry.url(f"blobs/{layer.digest}")
        for url in dict.fromkeys((self._moved.get(layer.digest, own), own)):
            async with self._registry.open(url, headers) as response:
                if url != own and response.status in _EXPIRED:
                    self._moved.pop(layer.digest, None)
                    continue
                if ignores_range(response, start, end, layer.size_bytes):
                    self.supports_ranges = False
                async for piece in body(response, layer, start, end, what):
                    # Only a URL that has delivered bytes is used again.
                    if response.url != own:
                        self._moved[layer.digest] = response.url
                    yield piece
                return

    async def _document(self, wanted: str) -> tuple[bytes, str]:
        answer = await self._registry.document(f"manifests/{wanted}", accept=ACCEPT, limit_bytes=MAX_DOCUMENT_BYTES)
        stated = answer.headers.get("docker-content-digest", "")
        if is_digest(stated):
            check_digest(answer.body, stated, f"the manifest of {self.uri}")
        return answer.body, answer.headers.get("content-type", "")
