"""Layers give exactly the tree that umoci gives: named cases, and images made at random of the same pieces.

The cases that do not meddle with the root share one image, each below a directory of its own.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from tests.artifact.archives import (
    MTIME,
    Node,
    directory,
    file,
    hardlink,
    header,
    padded,
    pax,
    reference,
    symlink,
    tar,
    tree_of,
    unpack,
)
from tests.artifact.layer_cases import CASES, WHOLE, combined
from tests.artifact.random_images import random_image, random_links

from enginehouse.core.artifact import Compression
from enginehouse.core.errors import Hopeless

Trees = tuple[dict[bytes, Node], dict[bytes, Node]]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Trees:
    work = tmp_path_factory.mktemp("combined")
    unpack(work / "ours", combined())
    return tree_of(reference(work / "umoci", combined())), tree_of(work / "ours")


def below(tree: dict[bytes, Node], top: bytes) -> dict[bytes, Node]:
    return {path: node for path, node in tree.items() if path == top or path.startswith(top + b"/")}


@pytest.mark.parametrize("case", CASES)
def test_a_case_gives_the_tree_that_umoci_gives(case: str, trees: Trees) -> None:
    top = f"case{list(CASES).index(case):02}".encode()
    expected, ours = below(trees[0], top), below(trees[1], top)
    assert expected
    assert ours == expected


@pytest.mark.parametrize("case", WHOLE)
def test_a_whole_image_gives_the_tree_that_umoci_gives(case: str, tmp_path: Path) -> None:
    unpack(tmp_path / "ours", WHOLE[case])
    expected = tree_of(reference(tmp_path / "umoci", WHOLE[case]))
    assert expected
    assert tree_of(tmp_path / "ours") == expected


@pytest.mark.parametrize("seed", range(25))
def test_an_image_made_at_random_gives_the_tree_that_umoci_gives(seed: int, tmp_path: Path) -> None:
    layers = random_image(random.Random(seed))
    unpack(tmp_path / "ours", layers)
    assert tree_of(tmp_path / "ours") == tree_of(reference(tmp_path / "umoci", layers))


def test_absolute_links_lead_where_they_lead_under_umoci(tmp_path: Path) -> None:
    """Their text differs, because the tree is not the root of whoever starts the engine."""
    layers = [
        tar(
            *(symlink("etc/alternatives/awk", "/usr/bin/mawk"), symlink("usr/bin/awk", "/etc/alternatives/awk")),
            *(symlink("top", "/etc"), symlink("usr/share/root", "/"), symlink("usr/share/doc/odd", "//usr/./bin/")),
            *(symlink("bin", "/usr/bin"), file("usr/bin/mawk", b"1"), symlink("usr/above", "/../etc")),
        ),
        tar(file("bin/tool", b"2"), symlink("bin/down", "/top/alternatives"), hardlink("a/b/c", "usr/bin/awk")),
    ]
    unpack(tmp_path / "ours", layers)
    expected, ours = tree_of(reference(tmp_path / "umoci", layers)), tree_of(tmp_path / "ours")
    assert set(ours) == set(expected)
    assert {path: node for path, node in ours.items() if node[0] != "symlink"} == {
        path: node for path, node in expected.items() if node[0] != "symlink"
    }
    for path in [path for path, node in expected.items() if node[0] == "symlink"]:
        led = os.path.realpath(os.fsencode(tmp_path / "ours") + b"/" + path)
        assert led == _inside(os.fsencode(tmp_path / "ours"), expected, path), path


def test_random_layers_below_links_give_what_they_give_under_umoci(tmp_path: Path) -> None:
    compared = 0
    for seed in range(40):
        layers = random_links(random.Random(seed))
        place = tmp_path / str(seed)
        place.mkdir()
        try:
            unpack(place / "ours", layers)
        except Hopeless:
            continue
        assert _led(tree_of(place / "ours")) == _led(tree_of(reference(place / "umoci", layers))), seed
        compared += 1
    assert compared > 15


def _led(tree: dict[bytes, Node]) -> dict[bytes, object]:
    """The tree with what its links lead to in place of what they say."""
    return {path: _inside(b"", tree, path) if node[0] == "symlink" else node for path, node in tree.items()}


def _inside(root: bytes, tree: dict[bytes, Node], path: bytes) -> bytes:
    """Where a link leads for whoever has the tree as root; nowhere where it leads in a circle."""
    where, ahead, steps = path.split(b"/")[:-1], [path.split(b"/")[-1]], 0
    while ahead:
        steps += 1
        if steps > 500:
            return b"nowhere"
        step = ahead.pop(0)
        node = tree.get(b"/".join([*where, step]), ("", 0, "", ""))
        if step == b"..":
            where = where[:-1]
        elif node[0] == "symlink":
            where = [] if node[2].startswith("/") else where
            ahead = [part for part in os.fsencode(node[2]).split(b"/") if part not in (b"", b".")] + ahead
        else:
            where = [*where, step]
    return b"/".join([root, *where])


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_the_compression_makes_no_difference(compression: Compression, trees: Trees, tmp_path: Path) -> None:
    unpack(tmp_path / "other", combined(), compression=compression)
    assert tree_of(tmp_path / "other") == trees[1]


def test_what_umoci_cannot_read_is_read_as_posix_says(tmp_path: Path) -> None:
    # umoci refuses global headers, which `git archive` writes, and contiguous files, which POSIX calls regular ones.
    comment = pax({"comment": "of a commit", "mtime": "12"}, b"g")
    unpack(tmp_path / "ours", [tar(comment, file("a", b"1"), header("b", b"7", size=1) + padded(b"2"))])
    assert (tmp_path / "ours/a").read_bytes() + (tmp_path / "ours/b").read_bytes() == b"12"


def test_times_of_files_links_and_directories_are_kept(tmp_path: Path) -> None:
    layers = [tar(directory("d"), file("d/f", b"1", mtime=1234), symlink("d/l", "f")), tar(file("d/g"))]
    unpack(tmp_path / "ours", layers)
    assert (tmp_path / "ours/d/f").stat().st_mtime == 1234
    assert (tmp_path / "ours/d").stat().st_mtime == MTIME
    assert (tmp_path / "ours/d/l").lstat().st_mtime == MTIME


def test_times_that_nobody_can_have_meant_are_no_reason_to_refuse(tmp_path: Path) -> None:
    # umoci refuses the first two.
    far = [header("a", mtime=2**80), pax({"mtime": "9" * 30}) + header("b"), pax({"mtime": "nan"}) + header("c")]
    near = [header("d", mtime=-5), pax({"mtime": "5.1234567891"}) + header("e"), header("f", b"5", mtime=2**33)]
    unpack(tmp_path / "ours", [tar(*far, *near)])
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "ours").iterdir()}
    assert times["a"] == times["b"] == times["c"] == 0
    assert (times["d"], times["e"], times["f"]) == (-5 * 10**9, 5_123_456_789, 2**33 * 10**9)


def test_attributes_that_give_rights_are_named_and_not_kept(tmp_path: Path) -> None:
    capability = {"SCHILY.xattr.security.capability": b"\x01\x00\x00\x02\x00\x04\x00\x00" + bytes(12)}
    others: dict[str, str | bytes] = {
        "SCHILY.xattr.user.note": b"x",
        "SCHILY.xattr.security.selinux": b"y",
        "mtime": "12",
    }
    many = [pax({"LIBARCHIVE.xattr.security.capability": b"AQ=="}) + header(f"bin/{index}") for index in range(9)]
    done = unpack(
        tmp_path / "ours",
        [tar(pax(capability) + header("bin/ping", mode=0o755), pax(others) + header("plain"), *many)],
    )
    assert done.dropped.count == 10
    assert str(done.dropped).startswith("security.capability of 'bin/ping', security.capability of 'bin/0'")
    assert str(done.dropped).endswith("and 5 more")
    assert "plain" not in str(done.dropped)
    assert os.listxattr(tmp_path / "ours/bin/ping") == []


def test_where_nothing_is_dropped_nothing_is_said(tmp_path: Path) -> None:
    assert str(unpack(tmp_path / "ours", [tar(file("a"))]).dropped) == ""
