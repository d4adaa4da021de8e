"""Zip archives: the same tree as from a tar, and what a hostile one may try."""

from __future__ import annotations

import io
import random
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.artifact.archives import tree_of
from tests.fetch.images import digest_of

from enginehouse.artifact.blobs.partial import Following
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import Sharing
from enginehouse.artifact.images.zip import unzip
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError

MIB = 1024 * 1024
Member = tuple[str, bytes, int]  # name, content, mode with type


def zipped(*members: Member, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", method) as archive:
        for name, content, mode in members:
            member = zipfile.ZipInfo(name, (2024, 1, 2, 3, 4, 6))
            member.external_attr, member.compress_type = mode << 16 or 0x20, method
            archive.writestr(member, content)
    return written.getvalue()


def unpacked(root: Path, packed: bytes, limits: ArchiveLimits | None = None) -> int:
    root.mkdir()
    blob = root.with_suffix(".zip")
    blob.write_bytes(packed)
    layer = Layer(digest=digest_of(packed), size_bytes=len(packed), compression="none", form="zip")
    source = Following(blob, 0, len(packed))
    source.complete()
    try:
        with Unpacker(root, Sharing(), limits or ArchiveLimits()) as unpacker:
            read = unzip(layer, source, unpacker, limits or ArchiveLimits(), lambda: False)
            unpacker.finish()
            return read
    finally:
        source.close()


def a_file(name: str, content: bytes = b"x", mode: int = 0o644) -> Member:
    return name, content, stat.S_IFREG | mode


def a_link(name: str, target: str) -> Member:
    return name, target.encode(), stat.S_IFLNK | 0o777


def test_files_directories_links_and_modes_come_out(tmp_path: Path) -> None:
    members = [("d/", b"", stat.S_IFDIR | 0o750), a_file("d/run.sh", b"#!/bin/sh\n", 0o755), a_link("l", "d/run.sh")]
    large = random.Random(1).randbytes(3 * MIB)
    assert unpacked(tmp_path / "root", zipped(*members, a_file("large", large), a_file("empty", b""))) > 3 * MIB
    tree = tree_of(tmp_path / "root")
    assert [(path, node[0], node[1]) for path, node in sorted(tree.items())] == [
        (b"d", "directory", 0o750),
        (b"d/run.sh", "file", 0o755),
        (b"empty", "file", 0o644),
        (b"l", "symlink", 0),
        (b"large", "file", 0o644),
    ]
    assert (tmp_path / "root/large").read_bytes() == large
    assert (tmp_path / "root/d/run.sh").stat().st_mtime == 1704164646


def test_a_zip_without_modes_gets_usual_ones(tmp_path: Path) -> None:
    unpacked(tmp_path / "root", zipped(("d/", b"", 0), ("d/f", b"1", 0)))
    assert {node[1] for node in tree_of(tmp_path / "root").values()} == {0o755, 0o644}


def patched(packed: bytes, mark: bytes, offset: int, value: bytes) -> bytes:
    at = packed.index(mark) + offset
    return packed[:at] + value + packed[at + len(value) :]


UNSAFE: dict[str, Callable[[], bytes]] = {
    "upwards": lambda: zipped(a_file("../x")),
    "absolute": lambda: zipped(a_file("/x")),
    "a link out": lambda: zipped(a_link("l", "../x")),
    "a link without end": lambda: zipped(a_link("l", "x" * 100_000)),
    "a device": lambda: zipped(("d", b"", stat.S_IFCHR | 0o644)),
    "a FIFO": lambda: zipped(("d", b"", stat.S_IFIFO | 0o644)),
    "twice, as different things": lambda: zipped(a_file("a"), ("a/", b"", stat.S_IFDIR | 0o755)),
    "encrypted": lambda: patched(zipped(a_file("a")), b"PK\x01\x02", 8, b"\x01\x00"),
    "a smaller size in the table": lambda: patched(zipped(a_file("a", b"x" * 100)), b"PK\x01\x02", 24, b"\x05"),
    "no size in the table": lambda: patched(zipped(a_file("a", b"x" * 100)), b"PK\x01\x02", 24, bytes(4)),
    "a larger size in the table": lambda: patched(zipped(a_file("a", b"x" * 100)), b"PK\x01\x02", 24, b"\xff\xff"),
    "a link larger than the table says": lambda: patched(
        zipped(a_link("l", "x" * 50 * MIB)), b"PK\x01\x02", 24, struct.pack("<I", 10)
    ),
    "another checksum": lambda: patched(zipped(a_file("a", b"x" * 100)), b"PK\x01\x02", 16, b"\0\0\0\0"),
    "bzip2, which would be inflated whole": lambda: zipped(a_file("a"), method=zipfile.ZIP_BZIP2),
    "no zip": lambda: b"garbage" * 1000,
    "nothing": lambda: b"",
    "cut off": lambda: zipped(a_file("a", random.Random(1).randbytes(10_000)))[:5000],
    "a NUL in a name": lambda: zipped(a_file("aXb")).replace(b"aXb", b"a\0b"),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_what_is_unsafe_is_refused(case: str, tmp_path: Path) -> None:
    """F-097."""
    with pytest.raises(EnginehouseError) as raised:
        unpacked(tmp_path / "root", UNSAFE[case]())
    assert raised.value.code == "unsafe_archive"
    assert {path.name for path in tmp_path.iterdir()} <= {"root", "root.zip"}


def test_what_an_image_may_have_a_zip_may_have_too(tmp_path: Path) -> None:
    packed = zipped(a_link("d/l", "/t"), a_file("d/l/x", b"1"), a_file("s", b"x", 0o4755), a_file("t/z"))
    unpacked(tmp_path / "root", packed)
    tree = tree_of(tmp_path / "root")
    assert tree[b"d/l"][2] == "../t"
    assert set(tree) == {b"d", b"d/l", b"t", b"t/x", b"t/z", b"s"}
    assert (tmp_path / "root/s").stat().st_mode & 0o7777 == 0o755


def test_a_bomb_is_stopped_at_the_limit(tmp_path: Path) -> None:
    """F-098."""
    bomb = zipped(a_file("a", bytes(40 * MIB)))
    for name, limits in (("ratio", ArchiveLimits()), ("total", ArchiveLimits(total_bytes=15 * MIB, ratio=10**9))):
        with pytest.raises(EnginehouseError) as raised:
            unpacked(tmp_path / name, bomb, limits)
        assert raised.value.code == "archive_too_large"
        assert (tmp_path / name / "a").stat().st_size <= 16 * MIB


def test_a_table_of_too_many_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnginehouseError) as raised:
        unpacked(tmp_path / "few", zipped(*(a_file(str(index)) for index in range(20))), ArchiveLimits(entries=10))
    assert raised.value.code == "archive_too_large"
    entry = zipped(a_file("a"))
    start, end = entry.index(b"PK\x01\x02"), entry.index(b"PK\x05\x06")
    table = entry[start:end] * 200_000
    finish = patched(entry[end:], b"PK", 12, struct.pack("<I", len(table)))
    with pytest.raises(EnginehouseError) as raised:
        unpacked(tmp_path / "many", entry[:start] + table + finish)
    assert raised.value.code == "archive_too_large"
    assert not tree_of(tmp_path / "many")  # before the library made something of every entry


def test_another_digest_is_told_before_anything_is_unpacked(tmp_path: Path) -> None:
    packed = zipped(a_file("a"))
    (tmp_path / "root").mkdir()
    (tmp_path / "blob").write_bytes(packed)
    layer = Layer(digest="sha256:" + "0" * 64, size_bytes=len(packed), compression="none", form="zip")
    source = Following(tmp_path / "blob", 0, len(packed))
    source.complete()
    with Unpacker(tmp_path / "root", Sharing(), ArchiveLimits()) as unpacker:
        with pytest.raises(EnginehouseError) as raised:
            unzip(layer, source, unpacker, ArchiveLimits(), lambda: False)
    source.close()
    assert raised.value.code == "digest_mismatch"
    assert not tree_of(tmp_path / "root")


@pytest.mark.parametrize("seed", range(150))
def test_broken_bytes_are_refused_or_read_and_nothing_else(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    broken = bytearray(zipped(a_file("a", b"x" * 100), a_link("l", "a"), ("d/", b"", stat.S_IFDIR | 0o755)))
    for _ in range(chance.randint(1, 5)):
        broken[chance.randrange(len(broken))] = chance.choice([0, 0x7F, 0xFF, chance.randrange(256)])
    try:
        unpacked(tmp_path / "root", bytes(broken))
    except EnginehouseError as error:
        code = error.code
    else:
        code = "unsafe_archive"
    assert code in ("unsafe_archive", "archive_too_large")
