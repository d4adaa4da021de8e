"""A local directory is unpacked like an archive, and its digest changes with everything in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.artifact.archives import tree_of

from enginehouse.artifact.images.directories import DirectoryEntries
from enginehouse.artifact.images.layers import Unpacker
from enginehouse.artifact.images.sharing import Sharing
from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.errors import EnginehouseError, Hopeless


@pytest.fixture
def source(tmp_path: Path) -> Path:
    place = tmp_path / "source"
    (place / "lib" / "deep").mkdir(parents=True)
    (place / "run.sh").write_bytes(b"#!/bin/sh\n")
    (place / "run.sh").chmod(0o755)
    (place / "lib" / "large").write_bytes(os.urandom(2_500_000))
    (place / "lib" / "deep" / "empty").touch()
    (place / "lib" / "link").symlink_to("../run.sh")
    os.link(place / "run.sh", place / "lib" / "same")
    (place / "lib").chmod(0o555)
    return place


def copied(source: Path, to: Path, limit_bytes: int = 2**30) -> str:
    to.mkdir()
    entries = DirectoryEntries(source, limit_bytes)
    with Unpacker(to, Sharing(), ArchiveLimits()) as unpacker:
        unpacker.apply(entries, lambda: False)
        unpacker.finish()
    return entries.digest()


def test_the_copy_is_the_same_tree(source: Path, tmp_path: Path) -> None:
    copied(source, tmp_path / "copy")
    assert tree_of(tmp_path / "copy") == tree_of(source)
    assert (tmp_path / "copy/run.sh").stat().st_ino != (source / "run.sh").stat().st_ino
    assert (tmp_path / "copy/run.sh").stat().st_mtime_ns == (source / "run.sh").stat().st_mtime_ns


def test_a_directory_may_be_named_through_a_link(source: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(source)
    copied(tmp_path / "link", tmp_path / "copy")
    assert tree_of(tmp_path / "copy") == tree_of(source)


def test_the_digest_changes_with_everything_that_is_copied(source: Path, tmp_path: Path) -> None:
    (source / "lib").chmod(0o755)
    digests = [copied(source, tmp_path / "0"), copied(source, tmp_path / "1")]
    assert digests[0] == digests[1]
    (source / "lib/deep/empty").write_bytes(b"1")
    digests.append(copied(source, tmp_path / "2"))
    (source / "lib/deep/empty").chmod(0o600)
    digests.append(copied(source, tmp_path / "3"))
    (source / "lib/deep/empty").rename(source / "lib/deep/other")
    digests.append(copied(source, tmp_path / "4"))
    (source / "lib/link").unlink()
    (source / "lib/link").symlink_to("../lib")
    digests.append(copied(source, tmp_path / "5"))
    assert len(set(digests)) == len(digests) - 1


@pytest.mark.parametrize("kind", ["fifo", "absolute", "out"])
def test_what_an_archive_may_not_have_a_directory_may_not_have_either(kind: str, source: Path, tmp_path: Path) -> None:
    match kind:
        case "fifo":
            os.mkfifo(source / "x")
        case "absolute":
            (source / "x").symlink_to("/etc")
        case _:
            (source / "x").symlink_to("../../x")
    with pytest.raises(Hopeless) as raised:
        copied(source, tmp_path / "copy")
    assert raised.value.code == "unsafe_archive"


def test_set_id_bits_are_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "x").touch()
    (source / "x").chmod(0o6755)
    copied(source, tmp_path / "copy")
    assert (tmp_path / "copy/x").stat().st_mode & 0o7777 == 0o755


def test_more_than_the_limit_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(Hopeless) as raised:
        copied(source, tmp_path / "copy", limit_bytes=2_000_000)
    assert raised.value.code == "archive_too_large"


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(EnginehouseError) as raised:
        DirectoryEntries(tmp_path / "nothing", 1000)
    assert raised.value.code == "not_found"


def test_a_directory_that_becomes_a_link_while_it_is_read_is_not_followed(source: Path, tmp_path: Path) -> None:
    entries = iter(DirectoryEntries(source, 2**30).entries())
    for entry in entries:
        if entry.path == "lib/deep":
            break
    (source / "lib").chmod(0o755)
    (source / "lib/deep").rename(source / "lib/moved")
    (source / "lib/deep").symlink_to("moved")
    with pytest.raises(Hopeless) as raised:
        next(entries)
    assert raised.value.code == "unsafe_archive"
