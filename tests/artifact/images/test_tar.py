"""The stream of entries is the same however the bytes arrive, and broken bytes give an error of ours."""

from __future__ import annotations

import io
import random
import tarfile

import pytest
from tests.artifact.archives import buffers, directory, file, hardlink, header, padded, pax, symlink, tar

from enginehouse.artifact.images.tar import TarStream
from enginehouse.core.archive import TarEntry
from enginehouse.core.errors import Hopeless

CONTENT = tar(
    directory("lib"),
    file("lib/a", b"x" * 1500),
    file("lib/" + "n" * 150, b"1"),
    pax({"path": "ü/" + "p" * 200, "mtime": "12.5", "size": "5"}) + header("short") + padded(b"12345"),
    symlink("s", "lib/a"),
    hardlink("h", "lib/a"),
    file("empty"),
    file("last", b"z" * 512),
)


def read(content: bytes, size: int) -> list[tuple[TarEntry, bytes]]:
    stream = TarStream(buffers(content, size))
    return [
        (entry, bytes(stream.whole()) if index % 2 else b"".join(stream.contents()))
        for index, entry in enumerate(stream.entries())
    ]


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 1024, 5000, 100_000])
def test_buffers_of_any_size_give_the_same_entries(size: int) -> None:
    found = read(CONTENT, size)
    assert [entry.path for entry, _ in found][:3] == ["lib", "lib/a", "lib/" + "n" * 150]
    assert [len(content) for _, content in found] == [0, 1500, 1, 5, 0, 0, 0, 512]
    assert found == read(CONTENT, len(CONTENT))


def test_contents_that_are_not_taken_are_skipped() -> None:
    paths = [entry.path for entry in TarStream(buffers(CONTENT, 1000)).entries()]
    assert paths == [entry.path for entry, _ in read(CONTENT, 1000)]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_the_standard_library_writes_is_read(form: int) -> None:
    name = "directory-" * 9 + "/" + "file-" * 15
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=form) as archive:
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = 5, 0o640, 1234567
        archive.addfile(member, io.BytesIO(b"hello"))
    [(entry, content)] = read(written.getvalue(), 700)
    assert (entry.path, entry.kind, entry.mode, entry.mtime_ns) == (name, "file", 0o640, 1234567 * 10**9)
    assert content == b"hello"


def test_a_name_of_gnu_wins_over_one_of_pax_and_neither_lasts() -> None:
    long = header("L", b"L", size=4) + padded(b"gnu\0")
    entries = read(tar(long, pax({"path": "pax"}), header("plain"), header("next")), 512)
    assert [entry.path for entry, _ in entries] == ["gnu", "next"]


def test_a_prefix_of_star_ends_before_its_times() -> None:
    block = bytearray(header("x", prefix=b"p" * 131))
    block[345 + 131 : 345 + 155] = b"00000000000\0" * 2
    block[508:512] = b"tar\0"
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}".encode() + b"\0 "
    [(entry, _)] = read(tar(bytes(block)), 512)
    assert entry.path == "p" * 131 + "/x"


@pytest.mark.parametrize("seed", range(300))
def test_broken_bytes_are_refused_or_read_and_nothing_else(seed: int) -> None:
    chance = random.Random(seed)
    broken = bytearray(CONTENT)
    for _ in range(chance.randint(1, 6)):
        where = chance.randrange(len(broken))
        broken[where] = chance.choice([0, 0x20, 0x2D, 0x80, 0xFF, chance.randrange(256)])
        block = where - where % 512
        if chance.random() < 0.8:  # most with a checksum that is right, or nothing behind it would be reached
            broken[block + 148 : block + 156] = b" " * 8
            total = sum(broken[block : block + 512])
            broken[block + 148 : block + 156] = f"{total:06o}".encode() + b"\0 "
    try:
        read(bytes(broken), 1000)
    except Hopeless as error:
        code = error.code
    else:
        code = "unsafe_archive"
    assert code in ("unsafe_archive", "archive_too_large")
