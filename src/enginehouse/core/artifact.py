"""What an installable thing consists of, once its reference has been resolved: digests, sizes, layers.

An artifact never names a tag: everything in it is fetched by digest, so what was resolved is what is installed.
Layers are in the order in which they are applied.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Compression = Literal["none", "gzip", "zstd"]
Form = Literal["tar", "zip"]


class Layer(Struct, frozen=True, kw_only=True):
    """One blob. `digest` is of the bytes as they are transferred, `diff_id` of the tar inside ("" when unknown)."""

    digest: str
    size_bytes: int
    compression: Compression
    diff_id: str = ""
    form: Form = "tar"


class Artifact(Struct, frozen=True, kw_only=True):
    """`digest` is that of the platform's manifest; for an archive it is that of the archive."""

    uri: str
    digest: str
    index_digest: str = ""
    platform: str = ""
    layers: tuple[Layer, ...]

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self.layers)
