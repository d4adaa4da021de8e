"""The rules for names, links and whiteouts, each alone and on anything at all."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from enginehouse.core.archive import check_path, check_symlink, kept_mode, whiteout_target
from enginehouse.core.errors import Hopeless

PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "ä", "x" * 255]), max_size=70)


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ("a", "a"),
        ("./a", "a"),
        ("a/", "a"),
        ("a//b/./c", "a/b/c"),
        (".", ""),
        ("./", ""),
        ("...", "..."),
        ("a..b/..c", "a..b/..c"),
        ("x" * 255, "x" * 255),
        ("a/" * 63 + "b", "a/" * 63 + "b"),
    ],
)
def test_a_name_gets_its_canonical_form(raw: str, path: str) -> None:
    assert check_path(raw) == path


@pytest.mark.parametrize(
    "raw", ["..", "a/..", "../a", "a/../b", "/a", "//", "a\0b", "x" * 256, "ä" * 128, "a/" * 65, "abc/" * 1025]
)
def test_a_name_that_could_lead_elsewhere_is_refused(raw: str) -> None:
    with pytest.raises(Hopeless) as raised:
        check_path(raw)
    assert raised.value.code == "unsafe_archive"


@given(PARTS)
def test_an_accepted_name_stays_inside_and_is_its_own_canonical_form(parts: list[str]) -> None:
    raw = "/".join(parts)
    try:
        path = check_path(raw)
    except Hopeless:
        return
    assert check_path(path) == path
    assert not path.startswith("/")
    assert ".." not in path.split("/")
    assert posixpath.normpath(raw or ".") == (path or ".")


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=5), PARTS)
def test_a_link_is_accepted_exactly_if_no_step_of_its_text_leads_out(place: list[str], parts: list[str]) -> None:
    target = "/".join(parts)
    assume(not target.startswith("/"))
    here = "/".join(place[:-1])
    steps = [posixpath.normpath(posixpath.join("root", here, *parts[:end])) for end in range(len(parts) + 1)]
    is_inside = all(step == "root" or step.startswith("root/") for step in steps)
    is_usable = bool(target) and len(target.encode()) < 4096
    try:
        assert check_symlink("/".join(place), target) == target
    except Hopeless:
        assert not (is_inside and is_usable)
    else:
        assert is_inside
        assert is_usable


@pytest.mark.parametrize(
    ("path", "target", "text"),
    [
        ("a", "/etc", "etc"),
        ("a", "/", "."),
        ("a/b", "/", ".."),
        ("a/b/c", "/etc//x/./y", "../../etc/x/y"),
        ("a/b", "/../../etc", "../etc"),
        ("a/b", "/x/../y", "../x/../y"),
    ],
)
def test_an_absolute_link_means_the_root_of_the_tree(path: str, target: str, text: str) -> None:
    assert check_symlink(path, target) == text


@pytest.mark.parametrize("target", ["/a/../../x", "/" + "x/" * 2046])
def test_an_absolute_link_that_cannot_be_said_inside_the_tree_is_refused(target: str) -> None:
    with pytest.raises(Hopeless):
        check_symlink("a/b/c", target)


def test_modes_keep_their_permission_bits_and_nothing_is_set_id() -> None:
    assert [kept_mode(mode) for mode in (0o100755, 0o7755, 0o4755, 0o2644)] == [0o755, 0o1755, 0o755, 0o644]


def test_whiteouts_tell_what_they_hide() -> None:
    assert whiteout_target("a") is None
    assert whiteout_target(".wh.a") == "a"
    assert whiteout_target(".wh..wh..opq") == ""
    for name in (".wh.", ".wh..", ".wh..."):
        with pytest.raises(Hopeless):
            whiteout_target(name)
