"""The unpacked size of a layer, read from a few bytes of it.

A manifest carries no unpacked sizes. A gzip stream ends with its size modulo 4 GiB, and the head of a zstd frame may
carry its content size. Both are claims of the producer of the image: they are good for a plan and must not be used as
a limit or in place of a check.
"""

from __future__ import annotations

import zstandard

from enginehouse.core.artifact import Layer

_GZIP_SIZE_BYTES = 4
_FRAME_HEAD_BYTES = 18  # the longest head of a zstd frame
_FOUR_GIB = 2**32


def hint_range(layer: Layer) -> tuple[int, int]:
    """The byte range [start, end) of the layer that `unpacked_bytes` needs; empty for an uncompressed layer."""
    match layer.compression:
        case "none":
            return 0, 0
        case "gzip":
            return max(0, layer.size_bytes - _GZIP_SIZE_BYTES), layer.size_bytes
        case "zstd":
            return 0, min(layer.size_bytes, _FRAME_HEAD_BYTES)


def unpacked_bytes(layer: Layer, hint: bytes) -> int:
    """The unpacked size that the bytes of `hint_range` state; 0 if it is unknown."""
    match layer.compression:
        case "none":
            return layer.size_bytes if layer.form == "tar" else 0
        case "gzip":
            if len(hint) != _GZIP_SIZE_BYTES:
                return 0
            size = int.from_bytes(hint, "little")
            # Compression hardly ever makes a layer larger, so a smaller number has lost multiples of 4 GiB.
            while size < layer.size_bytes:
                size += _FOUR_GIB
            return size
        case "zstd":
            try:
                return max(0, zstandard.frame_content_size(hint))
            except zstandard.ZstdError:
                return 0
