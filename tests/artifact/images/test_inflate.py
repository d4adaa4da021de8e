"""Compressed streams that are cut, broken, something else, or bombs; and digests, which come before everything."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from tests.artifact.archives import file, header, layer_of, tar, tree_of, unpack_packed
from tests.fetch.images import compress, digest_of

from enginehouse.artifact.images.inflate import Inflating
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import Sharing
from enginehouse.artifact.images.tar import TarStream
from enginehouse.artifact.images.zstd_frames import Frames
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Compression, Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, Upstream

MIB = 1024 * 1024
# No end mark: only the compressed stream itself can tell that something is missing.
CONTENT = tar(*(file(f"{index}", random.Random(index).randbytes(20_000)) for index in range(20)), end=b"")


def claimed(packed: bytes, compression: Compression) -> tuple[Layer, bytes]:
    """A layer whose digest is right and whose plain bytes nobody knows."""
    return Layer(digest=digest_of(packed), size_bytes=len(packed), compression=compression), packed


def code_of(root: Path, *layers: tuple[Layer, bytes], limits: ArchiveLimits | None = None) -> str:
    with pytest.raises(EnginehouseError) as raised:
        unpack_packed(root, layers, limits=limits)
    return raised.value.code


@pytest.mark.parametrize("cut", [1, 9, 100, 100_000])
@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_stream_that_is_cut_off_is_refused(cut: int, compression: Compression, tmp_path: Path) -> None:
    assert code_of(tmp_path / "root", claimed(compress(CONTENT, compression)[:-cut], compression)) == "unsafe_archive"


def test_a_frame_that_never_ends_is_refused_though_all_bytes_have_come(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor(level=1).compressobj()
    packed = packer.compress(CONTENT) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    assert code_of(tmp_path / "root", claimed(packed, "zstd")) == "unsafe_archive"
    assert len(tree_of(tmp_path / "root")) == 20


@pytest.mark.parametrize("said", ["gzip", "zstd", "none"])
@pytest.mark.parametrize("really", ["gzip", "zstd", "none"])
def test_another_compression_than_the_one_named_is_refused(
    said: Compression, really: Compression, tmp_path: Path
) -> None:
    layer = claimed(compress(CONTENT, really), said)
    if said == really:
        unpack_packed(tmp_path / "root", [layer])
    else:
        assert code_of(tmp_path / "root", layer) == "unsafe_archive"


def test_several_members_and_padding_are_one_stream(tmp_path: Path) -> None:
    first, second = CONTENT[:70_000], CONTENT[70_000:]
    zipped = gzip.compress(first) + gzip.compress(b"") + gzip.compress(second) + bytes(1000)
    unpack_packed(tmp_path / "gzip", [claimed(zipped, "gzip")])
    skipped = b"\x5f\x2a\x4d\x18" + (9).to_bytes(4, "little") + b"something"
    packed = compress(first, "zstd") + skipped + compress(second, "zstd") + skipped
    unpack_packed(tmp_path / "zstd", [claimed(packed, "zstd")])
    assert len(tree_of(tmp_path / "gzip")) == 20
    assert tree_of(tmp_path / "gzip") == tree_of(tmp_path / "zstd")


def test_garbage_after_the_last_member_is_refused(tmp_path: Path) -> None:
    assert code_of(tmp_path / "a", claimed(gzip.compress(CONTENT) + b"garbage", "gzip")) == "unsafe_archive"
    assert code_of(tmp_path / "b", claimed(compress(CONTENT, "zstd") + b"garbage", "zstd")) == "unsafe_archive"


@pytest.mark.parametrize("seed", range(20))
def test_the_end_of_a_frame_is_found_however_the_bytes_arrive(seed: int) -> None:
    chance = random.Random(seed)
    content = chance.randbytes(chance.randrange(300_000)) + bytes(chance.randrange(300_000))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        chance.choice([1, 10]), write_checksum=chance.random() < 0.5, write_content_size=chance.random() < 0.5
    )
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    for length in (len(packed), chance.randrange(1, len(packed)), len(packed) - 1):
        frames, rest = Frames(), packed[:length]
        while rest:
            size = chance.choice([1, 2, 3, 1000, 100_000])
            frames.feed(rest[:size])
            rest = rest[size:]
        assert frames.is_whole == (length == len(packed))


def test_a_window_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    """F-098."""
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = packer.compress(CONTENT) + packer.flush()
    assert code_of(tmp_path / "root", claimed(packed, "zstd")) == "archive_too_large"


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("where", [0.01, 0.3, 0.5, 0.99])
def test_a_flipped_byte_is_told_as_a_wrong_digest_whatever_else_it_looks_like(
    where: float, compression: Compression
) -> None:
    layer, packed = layer_of(CONTENT, compression)
    flipped = bytearray(packed)
    flipped[int(len(packed) * where)] ^= 0xFF
    with Inflating(layer, io.BytesIO(bytes(flipped)), ArchiveLimits(), 2**30) as inflating:
        with contextlib.suppress(Hopeless):
            list(TarStream(inflating.next_buffer).entries())
        inflating.skip()
        with pytest.raises(Hopeless) as raised:
            inflating.check()
    assert raised.value.code == "digest_mismatch"


def test_a_flipped_byte_in_the_size_of_the_window_is_told_as_a_wrong_digest() -> None:
    packer = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    packed = packer.compress(CONTENT) + packer.flush()
    layer, _ = claimed(packed, "zstd")
    flipped = packed[:5] + b"\xff" + packed[6:]
    with Inflating(layer, io.BytesIO(flipped), ArchiveLimits(), 2**30) as inflating:
        with pytest.raises(Hopeless) as raised:
            inflating.next_buffer()
    assert raised.value.code == "digest_mismatch"


def test_the_rest_of_a_refused_layer_is_hashed_but_not_inflated() -> None:
    layer, packed = layer_of(tar(file("a/../b"), *(file(f"{index}", bytes(MIB)) for index in range(100))))
    with Inflating(layer, io.BytesIO(packed), ArchiveLimits(), 2**30) as inflating:
        with pytest.raises(Hopeless):
            list(TarStream(inflating.next_buffer).entries())
        inflating.skip()
        inflating.check()
        assert inflating.plain_bytes < 30 * MIB


def test_another_content_than_the_image_says_is_refused(tmp_path: Path) -> None:
    _, packed = layer_of(CONTENT)
    other = Layer(digest=digest_of(packed), size_bytes=len(packed), compression="gzip", diff_id="sha256:" + "0" * 64)
    assert code_of(tmp_path / "root", (other, packed)) == "unsafe_archive"


def test_an_error_of_the_source_is_passed_on(tmp_path: Path) -> None:
    class Broken:
        def read(self, size: int = -1, /) -> bytes:
            raise Upstream("cannot fetch it: gone", code="upstream_error")

    layer, _ = layer_of(CONTENT)
    with Inflating(layer, Broken(), ArchiveLimits(), 2**30) as inflating:
        with pytest.raises(Upstream):
            inflating.next_buffer()


class Endless:
    """A stream that goes on for ever: a head, then the same piece again and again."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._pieces = self._make(head, piece)
        self._held = b""

    def _make(self, head: bytes, piece: bytes) -> Iterator[bytes]:
        yield head
        while True:
            yield piece * (1 + 100_000 // len(piece))

    def read(self, size: int = -1, /) -> bytes:
        while len(self._held) < size:
            self._held += next(self._pieces)
        taken, self._held = self._held[:size], self._held[size:]
        return taken


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("limits", [ArchiveLimits(), ArchiveLimits(total_bytes=30 * MIB, ratio=10**9)])
def test_a_bomb_is_stopped_at_the_limit(compression: Compression, limits: ArchiveLimits, tmp_path: Path) -> None:
    """F-098."""
    bomb = Endless(compress(header("a", size=10 * 2**30), compression), compress(bytes(4 * MIB), compression))
    (tmp_path / "root").mkdir()
    layer = Layer(digest="sha256:" + "0" * 64, size_bytes=10 * MIB, compression=compression)
    with Unpacker(tmp_path / "root", Sharing(), limits) as unpacker:
        with Inflating(layer, bomb, limits, limits.total_bytes) as inflating:
            with pytest.raises(Hopeless) as raised:
                unpacker.apply(TarStream(inflating.next_buffer), lambda: False)
    assert raised.value.code == "archive_too_large"
    allowed = min(limits.total_bytes, limits.ratio * 512 * 1024)
    assert (tmp_path / "root/a").stat().st_size <= allowed + MIB
