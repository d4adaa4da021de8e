"""Names that differ only in case or in how a letter is composed, where the file system cannot tell them apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.artifact.archives import directory, file, hardlink, symlink, tar, tree_of, unpack

from enginehouse.artifact.images import layers as unpack_module
from enginehouse.artifact.images.colliding_names import folds_case
from enginehouse.core.errors import Hopeless

TWINS: dict[str, list[bytes]] = {
    "two files": [tar(file("a/Read", b"1"), file("a/read", b"2"))],
    "files of two layers": [tar(file("Read", b"1")), tar(file("read", b"2"))],
    "two directories": [tar(file("Lib/x"), file("lib/y"))],
    "directories of two layers": [tar(directory("Lib")), tar(directory("lib"))],
    "a directory and a link": [tar(file("lib/x"), symlink("LIB", "lib"))],
    "a hard link": [tar(file("a"), hardlink("A", "a"))],
    "below a link": [tar(file("t/x"), symlink("l", "t")), tar(file("l/X"))],
    "another name of a link": [tar(file("t/x"), symlink("l", "t")), tar(file("L/y"))],
    "letters outside of ASCII": [tar(file("\u00c4"), file("\u00e4"))],
    "a letter in one piece and in two": [tar(file("\u00e4"), file("a\u0308"))],
}


@pytest.fixture
def folding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the probe finds it on macOS, and on ext4 in a directory with the attribute for it."""
    monkeypatch.setattr(unpack_module, "folds_case", lambda directory: True)


@pytest.mark.parametrize("case", TWINS)
def test_twins_are_refused_where_case_is_folded(case: str, folding: None, tmp_path: Path) -> None:
    with pytest.raises(Hopeless) as raised:
        unpack(tmp_path / "root", TWINS[case])
    assert raised.value.code == "unsafe_archive"
    assert "are equal to the file system" in raised.value.message
    assert "hostile" not in raised.value.message


@pytest.mark.parametrize("case", TWINS)
def test_twins_are_fine_where_case_is_told_apart(case: str, tmp_path: Path) -> None:
    unpack(tmp_path / "root", TWINS[case])
    assert len(tree_of(tmp_path / "root")) >= 2


def test_a_name_that_is_gone_is_no_twin(folding: None, tmp_path: Path) -> None:
    layers = [
        tar(file("Lib/x"), file("Read"), file("keep")),
        tar(file(".wh.Lib"), file("lib/y"), file(".wh.Read"), file("read"), file(".wh.KEEP")),
    ]
    unpack(tmp_path / "root", layers)
    assert set(tree_of(tmp_path / "root")) == {b"lib", b"lib/y", b"read", b"keep"}


def test_the_same_name_again_is_no_twin(folding: None, tmp_path: Path) -> None:
    unpack(tmp_path / "root", [tar(file("Lib/x", b"1"), directory("Lib")), tar(file("Lib/x", b"2"), file("Lib/y"))])
    assert (tmp_path / "root/Lib/x").read_bytes() == b"2"


def test_the_probe_leaves_nothing_and_tells_what_the_file_system_does(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = folds_case(handle)
    finally:
        os.close(handle)
    assert os.listdir(tmp_path) == []
    (tmp_path / "Name").touch()
    assert found == (tmp_path / "name").exists()
