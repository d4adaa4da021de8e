"""The rules for names, links and whiteouts, each alone and on anything at all."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.archive import check_mode, check_path, check_symlink, is_tangled, whiteout_target
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
    here = "/".join(place[:-1])
    steps = [posixpath.normpath(posixpath.join("root", here, *parts[:end])) for end in range(len(parts) + 1)]
    is_inside = all(step == "root" or step.startswith("root/") for step in steps)
    is_usable = bool(target) and not target.startswith("/") and len(target.encode()) < 4096
    try:
        check_symlink("/".join(place), target, absolute_links=False)
    except Hopeless:
        assert not (is_inside and is_usable)
    else:
        assert is_inside
        assert is_usable


def test_an_absolute_link_is_for_those_who_trust_the_source() -> None:
    assert check_symlink("a", "/etc", absolute_links=True) == "/etc"
    with pytest.raises(Hopeless) as raised:
        check_symlink("a", "/etc", absolute_links=False)
    assert "--absolute-links" in raised.value.message


@pytest.mark.parametrize(
    ("target", "tangled"),
    [("a", False), ("../../a/b", False), ("./../a", False), ("a/..", True), ("../a//./../b", True)],
)
def test_an_upward_step_after_a_name_may_lie(target: str, tangled: bool) -> None:
    assert is_tangled(target) == tangled


def test_modes_keep_their_permission_bits_and_no_file_is_set_id() -> None:
    assert check_mode("a", "file", 0o100755) == 0o755
    assert check_mode("a", "directory", 0o7755) == 0o1755
    for mode in (0o4755, 0o2755):
        with pytest.raises(Hopeless):
            check_mode("a", "file", mode)


def test_whiteouts_tell_what_they_hide() -> None:
    assert whiteout_target("a") is None
    assert whiteout_target(".wh.a") == "a"
    assert whiteout_target(".wh..wh..opq") == ""
    for name in (".wh.", ".wh..", ".wh..."):
        with pytest.raises(Hopeless):
            whiteout_target(name)
