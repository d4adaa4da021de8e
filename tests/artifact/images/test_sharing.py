"""Identical files share their disk space, others never do, and what is there is never written to."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
from tests.artifact.archives import MTIME, buffers, directory, file, hardlink, tar, tree_of, unpack

from enginehouse.artifact.images import sharing as sharing_module
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import FileRecord, Manifests, Sharing
from enginehouse.artifact.images.tar import TarStream
from enginehouse.core.archive import ArchiveLimits, TarEntry
from enginehouse.core.errors import Unavailable

MIB = 1024 * 1024
SMALL = random.Random(1).randbytes(10_000)
LARGE = random.Random(2).randbytes(3 * MIB + 17)


class World:
    """A first version is installed; `second` unpacks another beside it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.manifests = Manifests(place / "manifests")
        self.sharing = Sharing(may_link=True)
        self.sharing._can_clone = False  # so that it is links everywhere, whatever the file system of the test

    def first(self, *layers: bytes, name: str = "first") -> Path:
        done = unpack(self.place / name, layers)
        self.manifests.write(self.place / name, list(done.records.values()))
        self.sharing.add(self.place / name, self.manifests.read(self.place / name))
        return self.place / name

    def second(self, *layers: bytes) -> Path:
        unpack(self.place / "second", layers, sharing=self.sharing)
        return self.place / "second"

    def is_shared(self, name: str, other: str | None = None) -> bool:
        return (self.place / "second" / name).samefile(self.place / "first" / (other or name))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_an_equal_file_is_shared_whatever_its_name(content: bytes, world: World) -> None:
    world.first(tar(file("lib/a.so", content)))
    second = world.second(tar(file("other/b.so", content)))
    assert world.is_shared("other/b.so", "lib/a.so")
    assert world.sharing.shared_bytes == len(content)
    assert (second / "other/b.so").read_bytes() == content


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_that_was_changed_in_place_is_not_used(content: bytes, world: World) -> None:
    first = world.first(tar(file("a", content)))
    with (first / "a").open("r+b") as opened:
        opened.seek(len(content) - 1)
        opened.write(bytes([content[-1] ^ 1]))
    second = world.second(tar(file("a", content)))
    assert not world.is_shared("a")
    assert (second / "a").read_bytes() == content
    assert (first / "a").read_bytes() != content


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_tree_that_took_the_place_of_another_is_not_used(content: bytes, world: World, is_replaced: bool) -> None:
    first = unpack(world.place / "first", [tar(file("a", content))])
    tree = world.place / "first"
    world.sharing.add(tree, list(first.records.values()), tree.stat().st_ino)
    if is_replaced:
        tree.rename(world.place / "before")
        unpack(tree, [tar(file("a", content))])
    world.second(tar(file("a", content)))
    assert world.is_shared("a") != is_replaced


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_file_whose_mode_was_changed_since_is_not_used(content: bytes, world: World) -> None:
    first = world.first(tar(file("a", content)))
    (first / "a").chmod(0o600)
    second = world.second(tar(file("a", content)))
    assert not world.is_shared("a")
    assert (second / "a").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize(
    ("name", "mode", "mtime"),
    [
        ("mode", 0o640, MTIME),
        ("a.py", 0o644, MTIME + 1),
        ("a.cfg", 0o644, MTIME),
        ("a.json", 0o644, MTIME),
        ("a.pth", 0o644, MTIME),
        ("a.sh", 0o644, MTIME),
        ("a-script", 0o755, MTIME),
    ],
)
def test_what_may_be_edited_or_differs_in_more_than_content_is_not_shared(
    name: str, mode: int, mtime: int, world: World
) -> None:
    content = b"#!/usr/bin/python\n" + SMALL if name == "a-script" else SMALL
    world.first(tar(file(name, content, 0o755 if name == "a-script" else 0o644)))
    second = world.second(tar(file(name, content, mode, mtime=mtime)))
    assert not world.is_shared(name)
    assert (second / name).read_bytes() == content
    assert (second / name).stat().st_mode & 0o777 == mode
    assert (second / name).stat().st_mtime == mtime


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_equal_files_of_one_tree_are_never_one_file(content: bytes, world: World) -> None:
    """A program that writes into one of them must not change the other."""
    world.first(tar(file("a", content), hardlink("linked", "a")))
    second = world.second(tar(file("a", content), file("b", content), file("linked", content), hardlink("h", "b")))
    inodes = [(second / name).stat().st_ino for name in ("a", "b", "linked")]
    assert len(set(inodes)) == 3
    assert (second / "h").samefile(second / "b")  # which the image itself has
    assert world.is_shared("a")
    assert all((second / name).read_bytes() == content for name in ("a", "b", "linked", "h"))


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_where_engines_can_write_to_their_trees_versions_have_no_file_in_common(content: bytes, world: World) -> None:
    world.sharing = Sharing()
    first = world.first(tar(file("a", content)))
    second = world.second(tar(file("a", content)))
    (second / "a").write_bytes(b"written by an engine")
    assert (first / "a").read_bytes() == content
    assert world.sharing.how == "copy" or world.sharing.shared_bytes == len(content)


def test_a_python_source_of_the_same_time_is_shared(world: World) -> None:
    world.first(tar(file("a.py", SMALL), file("small", b"x" * 100)))
    world.second(tar(file("a.py", SMALL), file("small", b"x" * 100)))
    assert world.is_shared("a.py")
    assert not world.is_shared("small")  # such are often settings


@pytest.mark.parametrize("where", [0, MIB - 1, MIB, 2 * MIB + 5, len(LARGE) - 1])
def test_a_large_file_that_differs_in_one_byte_gets_its_own_content(where: int, world: World) -> None:
    other = LARGE[:where] + bytes([LARGE[where] ^ 1]) + LARGE[where + 1 :]
    first = world.first(tar(file("a", LARGE)))
    second = world.second(tar(file("a", other, mtime=5)))
    assert (second / "a").read_bytes() == other
    assert (first / "a").read_bytes() == LARGE
    assert (second / "a").stat().st_mtime == 5


def test_of_several_candidates_only_one_that_is_equal_from_beginning_to_end_is_used(world: World) -> None:
    """A candidate must not be taken because it agrees from where another one stopped to agree."""
    head = bytes([LARGE[0] ^ 1]) + LARGE[1:]
    tail = LARGE[:-1] + bytes([LARGE[-1] ^ 1])
    world.first(tar(file("head", head), file("tail", tail)))
    second = world.second(tar(file("a", LARGE)))
    assert (second / "a").read_bytes() == LARGE
    assert not world.is_shared("a", "head")
    assert not world.is_shared("a", "tail")


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_where_a_file_cannot_be_linked_it_is_written(
    content: bytes, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "_MOST_LINKS", 1)
    world.first(tar(file("a", content)))
    second = world.second(tar(file("a", content, mtime=7)))
    assert not world.is_shared("a")
    assert (second / "a").read_bytes() == content
    assert (second / "a").stat().st_mtime == 7
    assert world.sharing.shared_bytes == 0


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_a_clone_is_a_file_of_its_own_with_its_own_mode_and_time(
    content: bytes, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(made: int, source: int) -> None:
        """What a file system that has clones does, as far as it can be seen."""
        os.write(made, os.pread(source, len(content) + 1, 0))

    monkeypatch.setattr(sharing_module, "_ficlone", copy)
    world.sharing._can_clone = True
    first = world.first(tar(file("a.sh", content, 0o755)))
    second = world.second(tar(file("a.sh", content, 0o755, mtime=9)))
    assert not world.is_shared("a.sh")
    assert world.sharing.shared_bytes == len(content)
    assert (second / "a.sh").read_bytes() == content
    assert (second / "a.sh").stat().st_mode & 0o777 == 0o755
    assert ((first / "a.sh").stat().st_mtime, (second / "a.sh").stat().st_mtime) == (MTIME, 9)


def test_where_there_are_no_clones_it_is_tried_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def refuse(made: int, source: int) -> None:
        tried.append(made)
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(sharing_module, "_ficlone", refuse)
    world.sharing._can_clone = True
    world.first(tar(file("a", SMALL), file("b", LARGE)))
    world.second(tar(file("a", SMALL), file("b", LARGE)))
    assert world.is_shared("a")
    assert world.is_shared("b")
    assert len(tried) == 1


@pytest.mark.parametrize("content", [SMALL, LARGE], ids=["small", "large"])
def test_from_another_file_system_a_file_is_written(content: bytes, world: World) -> None:
    memory = Path("/dev/shm") / f"enginehouse-{os.getpid()}-{len(content)}"
    memory.write_bytes(content)
    try:
        memory.chmod(0o644)
        world.sharing.add(memory.parent, [FileRecord(memory.name, len(content), 0o644, _sum(content), 0)])
        assert (world.second(tar(file("a", content))) / "a").read_bytes() == content
    finally:
        memory.unlink()
    assert world.sharing.shared_bytes == 0


def test_a_file_that_changes_while_it_is_compared_is_an_error_that_heals(world: World) -> None:
    first = world.first(tar(file("a", LARGE)))
    other = LARGE[:-1] + bytes([LARGE[-1] ^ 1])
    content = tar(file("a", other))

    class Changing(TarStream):
        """Changes what was compared, before its head is copied."""

        reads = 0

        def _fill(self) -> bool:
            self.reads += 1
            if self.reads == 4:
                with (first / "a").open("r+b") as opened:
                    opened.write(b"changed")
            return super()._fill()

    (world.place / "second").mkdir()
    with Unpacker(world.place / "second", world.sharing, ArchiveLimits()) as unpacker:
        with pytest.raises(Unavailable):
            unpacker.apply(Changing(buffers(content, MIB)), lambda: False)


def test_a_shared_file_never_changes_through_a_later_layer(world: World) -> None:
    first = world.first(tar(file("a", SMALL), file("b", LARGE), file("c", SMALL[::-1]), file("d/e", SMALL[:5000])))
    before = tree_of(first), [path.lstat().st_mtime_ns for path in sorted(first.rglob("*"))]
    second = world.second(
        tar(file("a", SMALL), file("b", LARGE), file("c", SMALL[::-1]), file("d/e", SMALL[:5000])),
        tar(file("a", b"new", 0o600, mtime=1), file("b", LARGE, 0o755, mtime=2), hardlink("h", "c", 0o777)),
        tar(file("h", b"replaced"), file("d", b"a file"), directory("c", 0o700)),
    )
    assert (second / "a").read_bytes() == b"new"
    assert (second / "h").read_bytes() == b"replaced"
    after = tree_of(first), [path.lstat().st_mtime_ns for path in sorted(first.rglob("*"))]
    assert {path: node[:3] for path, node in after[0].items()} == {path: node[:3] for path, node in before[0].items()}
    assert after[1] == before[1]


def test_a_manifest_lists_what_is_in_the_tree_in_the_end(world: World) -> None:
    layers = [
        tar(*(file(name, SMALL) for name in ("a", "b", "d/x", "e/y")), file(b"\xff", SMALL)),
        tar(file(".wh.a"), file("d/.wh..wh..opq"), file("e", b"a file now")),
    ]
    first = world.first(*layers)
    assert [record.path for record in world.manifests.read(first)] == ["b"]


def test_a_manifest_follows_its_tree_and_goes_when_it_is_gone(world: World) -> None:
    first = world.first(tar(file("a", SMALL)))
    moved = first.rename(world.place / "moved")
    assert len(world.manifests.read(moved)) == 1
    [manifest] = (world.place / "manifests").iterdir()
    world.manifests.prune([])
    assert manifest.exists()  # an install may just have written it
    os.utime(manifest, (1, 1))
    world.manifests.prune([moved])
    assert manifest.exists()
    world.manifests.prune([])
    assert not manifest.exists()
    assert world.manifests.read(moved) == []


def test_a_manifest_that_cannot_be_read_shares_nothing(world: World) -> None:
    first = world.first(tar(file("a", SMALL)))
    [manifest] = (world.place / "manifests").iterdir()
    manifest.write_bytes(manifest.read_bytes()[:-3])
    assert world.manifests.read(first) == []


def test_the_index_of_files_is_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing_module, "MAX_RECORDS", 3)
    records = [FileRecord(str(index), 5000 + index, 0o644, 0, 0) for index in range(5)]
    world.sharing.add(world.place, records[:2])
    world.sharing.add(world.place, records)
    world.sharing.add(world.place, records)
    assert world.sharing.small(TarEntry(path="x", kind="file", size_bytes=5004), b"x" * 5004, 0) is None


def _sum(content: bytes) -> int:
    return sharing_module.checksum(content)
