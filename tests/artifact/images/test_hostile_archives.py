"""Everything that an archive must not do is refused with a stable code, and nothing outside the tree has changed.

Absolute links lead to places that are really there: a link that was followed would be seen in the canary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.artifact.archives import (
    Node,
    directory,
    file,
    hardlink,
    header,
    padded,
    pax,
    symlink,
    tar,
    tree_of,
    unpack,
)

from enginehouse.core.archive import ArchiveLimits
from enginehouse.core.errors import Hopeless

SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "99999999999"}


def chain(length: int) -> list[bytes]:
    """Links that lead to the directory "d", the last one through all others."""
    return [symlink("l1", "d"), *(symlink(f"l{index}", f"l{index - 1}") for index in range(2, length + 1))]


UNSAFE: dict[str, list[bytes]] = {
    "upwards": [tar(file("../x"))],
    "upwards and back": [tar(file("a/../../root/x"))],
    "upwards inside": [tar(file("a/../b"))],
    "a directory upwards": [tar(directory("a/.."))],
    "absolute": [tar(file("/x"))],
    "absolute with more slashes": [tar(file("//x"))],
    "an absolute directory": [tar(directory("/"))],
    "below a file": [tar(file("f")), tar(file("f/x"))],
    "a hard link upwards": [tar(hardlink("h", "../canary/file"))],
    "an absolute hard link": [tar(hardlink("h", "/etc/passwd"))],
    "a hard link to itself": [tar(file("a")), tar(hardlink("a", "a"))],
    "a hard link to a directory": [tar(directory("d"), hardlink("h", "d"))],
    "a hard link to the root": [tar(hardlink("h", "."))],
    "a hard link to nothing": [tar(hardlink("h", "a"), file("a"))],
    "a hard link to what was hidden": [tar(file("a")), tar(file(".wh.a"), hardlink("h", "a"))],
    "a hard link that takes a link to where it leads out": [tar(symlink("a/b/l", "../../x"), hardlink("l", "a/b/l"))],
    "a link out": [tar(symlink("l", "../x"))],
    "a link out by a detour": [tar(symlink("a/l", "b/../../../x"))],
    "a link out by way of another": [tar(symlink("a", "."), symlink("l", "a/../x"))],
    "a link out by way of one that comes later": [
        tar(directory("d/e"), symlink("l", "d/e/../../x")),
        tar(symlink("d/e", ".")),
    ],
    "a link out by way of a chain": [tar(symlink("d/up", ".."), symlink("m", "d/up"), symlink("d/l", "../m/../x"))],
    "a path out by way of links": [tar(symlink("d/up", ".."), symlink("m", "d/up")), tar(file("d/up/up/../x"))],
    "a path through a link that leads out": [tar(symlink("a", "."), symlink("l", "a/../x"), file("l/y"))],
    "a path below a link to a file": [tar(file("f"), symlink("l", "f")), tar(file("l/x"))],
    "a path through a circle": [tar(symlink("l", "m"), symlink("m", "l")), tar(file("l/x"))],
    "a path through 41 links": [tar(directory("d"), *chain(41)), tar(file("l41/x"))],
    "a path that becomes too deep by links": [tar(symlink("a/l", "b/" * 40)), tar(file("a/l/" + "c/" * 30 + "x"))],
    "a chain of 41 links": [tar(directory("d"), *chain(41))],
    "a chain of 100 links in any order": [tar(directory("d"), *chain(100)[::-1])],
    "41 links in one way": [tar(directory("d"), *chain(10), symlink("e", "l10/../" * 4 + "l10"))],
    "a chain that only another program could follow out": [
        tar(*(symlink(f"d/l{index}", f"l{index - 1}") for index in range(1, 60)), symlink("d/l0", "../../x"))
    ],
    "a link to nothing": [tar(symlink("l", ""))],
    "a link to a NUL": [tar(pax({"linkpath": "a\0b"}) + header("l", b"2"))],
    "a link too long": [tar(symlink("l", "x/" * 2048))],
    "a character device": [tar(header("d", b"3"))],
    "a block device": [tar(header("d", b"4"))],
    "a FIFO": [tar(header("p", b"6"))],
    "an unknown type": [tar(header("p", b"Z"))],
    "a NUL in a name": [tar(pax({"path": "a\0b"}) + header("x"))],
    "5000 characters": [tar(pax({"path": "a/" * 2500}) + header("x"))],
    "5000 characters as GNU writes them": [tar(file("a/" * 2500 + "x"))],
    "a component of 256 bytes": [tar(file("a" * 256))],
    "a component of 256 bytes in 128 characters": [tar(file("ä" * 128))],
    "65 levels": [tar(file("a/" * 64 + "x"))],
    "a pax name upwards": [tar(pax({"path": "../x"}) + header("fine"))],
    "a GNU name upwards": [tar(header("L", b"L", size=5) + padded(b"../x\0") + header("fine"))],
    "a pax target upwards": [tar(pax({"linkpath": "../x"}) + header("l", b"2", target="fine"))],
    "a prefix upwards": [tar(header("x", prefix=b".."))],
    "one name for all": [tar(pax({"path": "a"}, b"g"), file("b"))],
    "a whiteout of the parent": [tar(file("a/b/x")), tar(file("a/b/.wh..."))],
    "a whiteout of itself": [tar(file("a/b/x")), tar(file("a/b/.wh.."))],
    "a whiteout of no name": [tar(file("a/b/x")), tar(file("a/b/.wh."))],
    "a whiteout outside": [tar(file("../.wh.canary"))],
    "the root as a link": [tar(symlink(".", "t"))],
    "the root as a file": [tar(file("./"))],
    "the root as a hard link": [tar(file("a"), hardlink("./", "a"))],
    "no name": [tar(file(""))],
    "twice, as file and directory": [tar(file("a"), directory("a"))],
    "twice, as directory and file": [tar(file("a/b"), file("a"))],
    "twice, as link and file": [tar(symlink("a", "b"), file("a"))],
    "twice, as file and hard link": [tar(file("a"), file("b"), hardlink("a", "b"))],
    "a wrong checksum": [tar(header("a", checksum=1))],
    "garbage": [b"garbage" * 1000],
    "a cut header": [tar(file("a"), header("b")[:300], end=b"")],
    "cut contents": [tar(header("a", size=10_000) + b"x" * 512, end=b"")],
    "cut large contents": [tar(header("a", size=10_000_000) + b"x" * 5_000_000, end=b"")],
    "cut long name": [tar(header("L", b"L", size=600) + b"x" * 512, end=b"")],
    "a record without its entry": [tar(pax({"path": "a"}))],
    "a header after half an end mark": [tar(file("a"), end=bytes(512)) + tar(file("b"))],
    "a negative size": [tar(header("a", size=-512))],
    "a negative size of a record": [tar(header("L", b"L", size=-512), file("a"))],
    "a size beyond everything": [tar(header("a", size=2**70))],
    "a size with letters": [tar(header("a", size=b"0000000000z\0"))],
    "a size with a sign": [tar(header("a", size=b"-0000000512\0"))],
    "a pax size that is negative": [tar(pax({"size": "-1"}) + header("a"))],
    "a pax size that is larger": [tar(pax({"size": "99999999"}) + header("a", size=1) + padded(b"1"))],
    "a pax size with many digits": [tar(pax({"size": "9" * 5000}) + header("a"))],
    "a pax record longer than its header": [tar(header("x", b"x", size=12) + padded(b"99 path=abc\n"), file("a"))],
    "a pax record without a length": [tar(header("x", b"x", size=9) + padded(b"path=abc\n"), file("a"))],
    "a pax record without an end": [tar(header("x", b"x", size=11) + padded(b"11 path=abc"), file("a"))],
    "a record of megabytes": [tar(header("x", b"x", size=2 * 2**20) + bytes(2 * 2**20), file("a"))],
    "records without end": [tar(*[pax({"path": "a"})] * 100, file("a"))],
}
# Links to places that exist outside: whoever followed one as it is written would be seen in the canary.
ABSOLUTE: dict[str, Callable[[str], list[bytes]]] = {
    "through a link": lambda out: [tar(symlink("l", out), file("l/new"))],
    "through a link of a lower layer": lambda out: [tar(symlink("l", out)), tar(file("l/new"))],
    "over what a link shows": lambda out: [tar(symlink("l", out)), tar(file("l/file", b"changed"))],
    "a directory through a link": lambda out: [tar(symlink("l", out)), tar(directory("l/directory", 0o777))],
    "a whiteout behind a link": lambda out: [tar(symlink("l", out)), tar(file("l/.wh.file"))],
    "an opaque mark behind a link": lambda out: [tar(symlink("l", out)), tar(file("l/.wh..wh..opq"))],
    "a link that climbs above the root": lambda out: [tar(symlink("l", f"/../..{out}")), tar(file("l/new"))],
    "a link that is taken elsewhere by a hard link": lambda out: [
        tar(symlink("a/b/l", out), hardlink("l", "a/b/l")),
        tar(file("l/new")),
    ],
    "through two links": lambda out: [tar(symlink("d/l", out), symlink("m", "/d/l")), tar(file("m/new"))],
}
TOO_LARGE: dict[str, list[bytes]] = {
    "a sparse file of GNU": [tar(header("a", b"S", size=512) + bytes(512))],
    "a sparse file of pax": [tar(pax(SPARSE) + header("a", size=512) + bytes(512))],
    "too many entries": [tar(*(file(f"{index}") for index in range(101)))],
    "too many entries over several layers": [tar(*(file(f"{index}") for index in range(51)))] * 2,
    "too many names for one file": [tar(file("a"), *(hardlink(f"{index}", "a") for index in range(101)))],
    "too many bytes": [tar(file("a", bytes(2**20)))],
    "too many bytes over several layers": [tar(file("a", bytes(600_000)))] * 2,
    "too many bytes after the end mark": [tar(file("a"), end=bytes(2**21))],
}
SMALL = ArchiveLimits(total_bytes=2**20, entries=100)


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    place = tmp_path / "canary"
    (place / "directory").mkdir(parents=True)
    (place / "file").write_bytes(b"must stay as it is")
    return place


def refused(layers: list[bytes], canary: Path, limits: ArchiveLimits | None = None) -> str:
    """The code of the error; nothing beside the tree may have changed."""
    before = outside(canary)
    with pytest.raises(Hopeless) as raised:
        unpack(canary.parent / "root", layers, limits=limits)
    assert outside(canary) == before
    assert raised.value.message.startswith("cannot ")
    return raised.value.code


def outside(canary: Path) -> tuple[dict[bytes, Node], list[tuple[str, int, int]]]:
    """All that is beside the tree, with the times that no careless hand can leave as they were."""
    everything = [path for path in sorted(canary.parent.rglob("*")) if not path.is_relative_to(canary.parent / "root")]
    beside = {path: node for path, node in tree_of(canary.parent).items() if path.split(b"/")[0] != b"root"}
    return beside, [(path.name, path.lstat().st_ctime_ns, path.lstat().st_nlink) for path in everything]


@pytest.mark.parametrize("case", UNSAFE)
def test_what_is_unsafe_is_refused(case: str, canary: Path) -> None:
    """F-097."""
    assert refused(UNSAFE[case], canary) == "unsafe_archive"


@pytest.mark.parametrize("case", ABSOLUTE)
def test_an_absolute_link_leads_into_the_tree_and_never_to_where_it_says(case: str, canary: Path) -> None:
    root, before = canary.parent / "root", outside(canary)
    unpack(root, ABSOLUTE[case](str(canary)))
    assert outside(canary) == before
    links = [path for path in root.rglob("*") if path.is_symlink()]
    assert links
    assert all(not path.readlink().is_absolute() for path in links)
    assert all(Path(os.path.realpath(path)).is_relative_to(root) for path in links)
    made = [path.name for path in (root / str(canary)[1:]).glob("*")]
    assert made == [name for name in ("new", "file", "directory") if name in made]
    assert bool(made) == ("mark" not in case and "whiteout" not in case)


def test_what_is_behind_an_absolute_link_outside_is_not_there(canary: Path) -> None:
    assert refused([tar(symlink("l", str(canary)), hardlink("h", "l/file"))], canary) == "unsafe_archive"


@pytest.mark.parametrize(
    "case",
    ["a character device", "a FIFO", "65 levels", "a component of 256 bytes", "a link out", "absolute", "upwards"],
)
def test_what_is_only_against_our_rules_is_not_called_hostile(case: str, tmp_path: Path) -> None:
    with pytest.raises(Hopeless) as raised:
        unpack(tmp_path / "root", UNSAFE[case])
    assert "hostile" not in raised.value.message
    assert "docs/installing.md" in raised.value.message


@pytest.mark.parametrize("case", ["garbage", "cut contents", "a wrong checksum", "a whiteout of no name"])
def test_what_is_broken_is_called_so(case: str, tmp_path: Path) -> None:
    with pytest.raises(Hopeless, match="broken or hostile"):
        unpack(tmp_path / "root", UNSAFE[case])


@pytest.mark.parametrize("case", TOO_LARGE)
def test_what_is_too_large_is_refused(case: str, canary: Path) -> None:
    """F-098."""
    assert refused(TOO_LARGE[case], canary, SMALL) == "archive_too_large"
    written = sum(path.stat().st_size for path in (canary.parent / "root").rglob("*") if path.is_file())
    assert written <= SMALL.total_bytes


def test_whiteouts_of_one_directory_do_not_cost_the_square_of_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[int] = []
    really = os.listdir

    def counted(handle: int) -> list[str]:
        listed.append(handle)
        return really(handle)

    monkeypatch.setattr(os, "listdir", counted)
    own = [file(f"d/{index}") for index in range(50)]
    unpack(tmp_path / "root", [tar(file("d/old")), tar(*own, *[file(".wh.d")] * 50)])
    assert sorted(path.name for path in (tmp_path / "root/d").iterdir()) == sorted(str(index) for index in range(50))
    assert len(listed) < 5
