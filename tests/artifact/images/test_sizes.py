"""The unpacked size that a layer states."""

from __future__ import annotations

import gzip

import pytest
import zstandard

from enginehouse.artifact.images.sizes import hint_range, unpacked_bytes
from enginehouse.core.artifact import Compression, Layer

CONTENT = b"content " * 1000


def layer(compression: Compression, size_bytes: int) -> Layer:
    return Layer(digest="sha256:" + "1" * 64, size_bytes=size_bytes, compression=compression)


def stated(compression: Compression, packed: bytes) -> int:
    asked = layer(compression, len(packed))
    start, end = hint_range(asked)
    return unpacked_bytes(asked, packed[start:end])


def test_each_compression_states_its_size() -> None:
    assert stated("none", CONTENT) == len(CONTENT)
    assert stated("gzip", gzip.compress(CONTENT)) == len(CONTENT)
    assert stated("zstd", zstandard.ZstdCompressor().compress(CONTENT)) == len(CONTENT)


def test_a_gzip_size_below_the_packed_size_has_lost_multiples_of_four_gib() -> None:
    assert unpacked_bytes(layer("gzip", 5 * 2**30), (2**20).to_bytes(4, "little")) == 2**33 + 2**20


def test_a_zstd_frame_without_a_size_is_unknown() -> None:
    assert stated("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(CONTENT)) == 0


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_bytes_that_could_not_be_read_are_unknown(compression: Compression) -> None:
    assert unpacked_bytes(layer(compression, 100), b"") == 0
    assert stated(compression, b"") == 0
    assert stated("zstd", b"no frame at all, but long enough") == 0
