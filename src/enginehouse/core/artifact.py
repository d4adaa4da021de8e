"""The content of a resolved reference: digests, sizes, layers.

An artifact never names a tag: everything in it is fetched by digest, so the resolved version is the installed one.
Layers are in the order in which they are applied.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Compression = Literal["none", "gzip", "zstd"]
Form = Literal["tar", "zip"]


class Layer(Struct, frozen=True, kw_only=True):
    """One blob. `digest` covers the bytes as transferred, `diff_id` the tar inside ("" if unknown)."""

    digest: str
    size_bytes: int
    compression: Compression
    diff_id: str = ""
    form: Form = "tar"


class Artifact(Struct, frozen=True, kw_only=True):
    """`digest` is that of the platform's manifest, or that of the archive."""

    uri: str
    digest: str
    index_digest: str = ""
    platform: str = ""
    layers: tuple[Layer, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)
