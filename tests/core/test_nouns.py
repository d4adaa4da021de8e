"""Names, sizes, process keys, galleries, operations: small decisions, each with its edge."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core import gallery, name, progress
from enginehouse.core.capability import capability_of, platform_of
from enginehouse.core.errors import EXIT_CODE, HTTP_STATUS, EnginehouseError, Hopeless, Invalid, NotFound, from_status
from enginehouse.core.gallery import Gallery, GalleryEntry
from enginehouse.core.progress import Progress
from enginehouse.core.replica import parse_process_key, process_key

LOCAL = Gallery(
    name="local",
    url="builtin:",
    backends=(
        GalleryEntry(name="llama-cpp", capabilities={"default": "cpu-build", "nvidia": "gpu-build"}),
        GalleryEntry(
            name="cpu-build", uri="pypi:x==1", capabilities={"default": "cpu-build"}, platforms=("linux/amd64",)
        ),
        GalleryEntry(name="gpu-only", capabilities={"nvidia": "gpu-build"}),
        GalleryEntry(name="cpu-build", uri="pypi:second==1"),
    ),
)


@pytest.mark.parametrize(
    "bad", ["", "*", ">", "a/b", "a b", "..", ".", ".hidden", "ends.", "a" * 300, "ä", "a\nb", "-x"]
)
def test_a_name_that_could_be_something_else_is_refused(bad: str) -> None:
    with pytest.raises(Invalid) as caught:
        name.check_name(bad, "node")
    assert caught.value.code == "invalid_name"
    assert len(caught.value.message) < 220
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("good", ["a", "worker-1", "host.example.org", "A_b", "a" * 128, "9"])
def test_a_plain_name_is_taken(good: str) -> None:
    assert name.check_name(good, "node") == good


@given(st.text(min_size=1, max_size=300), st.text(min_size=1, max_size=300))
def test_two_model_names_never_share_a_directory(first: str, second: str) -> None:
    one, two = name.model_directory(first), name.model_directory(second)
    assert (one == two) == (first == second)
    assert "/" not in one
    assert one not in (".", "..")
    assert len(one) <= 255
    assert name.model_in(one) == ("" if "%%" in one else first)


@given(st.text(max_size=300))
def test_a_directory_that_is_no_models_names_none(directory: str) -> None:
    named = name.model_in(directory)
    assert not named or name.model_directory(named) == directory


@given(st.integers(0, 2**62))
def test_sizes_are_read_back_as_they_are_written(count: int) -> None:
    again = progress.parse_bytes(progress.format_bytes(count))
    assert abs(again - count) <= max(1, count * 0.06)


def test_sizes_look_like_localais() -> None:
    assert progress.format_bytes(1023) == "1023 B"
    assert progress.format_bytes(432_327_885) == "412.3 MiB"
    assert progress.parse_bytes("a lot") == 0


def test_progress_of_an_older_attempt_or_number_is_no_news() -> None:
    known = Progress(attempt=2, sequence=5)
    assert progress.is_newer(Progress(attempt=2, sequence=6), known)
    assert progress.is_newer(Progress(attempt=3, sequence=1), known)
    assert not progress.is_newer(Progress(attempt=1, sequence=99), known)
    assert not progress.is_newer(known, known)


def test_less_of_the_same_attempt_is_no_news_whatever_its_number() -> None:
    known = Progress(attempt=2, sequence=3, done_bytes=800)
    assert not progress.is_newer(Progress(attempt=2, sequence=4, done_bytes=600), known)
    assert progress.is_newer(Progress(attempt=2, sequence=4, done_bytes=800), known)
    assert progress.is_newer(Progress(attempt=3, sequence=1), known)


def test_a_process_key_splits_at_the_last_sign() -> None:
    assert parse_process_key(process_key("a#b/c", 3)) == ("a#b/c", 3)
    for bad in ("a", "#1", "a#", "a#x", "a#-1", "a#" + "9" * 5000, "a#\u0661"):
        with pytest.raises(Invalid):
            parse_process_key(bad)


def test_a_meta_entry_resolves_to_the_build_for_the_machine() -> None:
    resolved = gallery.resolve([LOCAL], "LLAMA-cpp", "vulkan", "linux/amd64")
    assert (resolved.directory, resolved.meta, resolved.uri) == ("cpu-build", "llama-cpp", "pypi:x==1")


def test_a_gallery_can_be_named_and_never_becomes_a_directory() -> None:
    assert gallery.resolve([LOCAL], "local@llama-cpp", "default", "linux/amd64").directory == "cpu-build"
    with pytest.raises(NotFound):
        gallery.resolve([LOCAL], "other@llama-cpp", "default", "linux/amd64")


@pytest.mark.parametrize(
    ("wanted", "platform", "code", "told"),
    [
        ("gpu-only", "linux/amd64", "unsupported", "builds for nvidia, none for default"),
        ("llama-cpp", "linux/riscv64", "unsupported_platform", "builds for linux/amd64, none for linux/riscv64"),
    ],
)
def test_what_does_not_fit_says_what_there_is(wanted: str, platform: str, code: str, told: str) -> None:
    with pytest.raises(Hopeless) as caught:
        gallery.resolve([LOCAL], wanted, "default", platform)
    assert caught.value.code == code
    assert told in caught.value.message


def test_platforms_and_capabilities_use_the_words_of_images_and_galleries() -> None:
    assert platform_of("Linux", "x86_64") == "linux/amd64"
    assert platform_of("Darwin", "arm64") == "darwin/arm64"
    assert capability_of("darwin/arm64", "", 0) == "metal"
    assert capability_of("linux/amd64", "nvidia", 2 * 1024**3) == "default"
    assert capability_of("linux/amd64", "nvidia", 24 * 1024**3) == "nvidia"


def _subclasses(kind: type[EnginehouseError]) -> set[type[EnginehouseError]]:
    return {kind}.union(*(_subclasses(one) for one in kind.__subclasses__()))


def test_every_error_class_has_a_status_and_an_exit_code() -> None:
    # One that an adapter derives counts as the class it was derived from.
    own = {kind for kind in _subclasses(EnginehouseError) if kind.__module__ == EnginehouseError.__module__}
    assert own == HTTP_STATUS.keys() == EXIT_CODE.keys()


def test_an_error_survives_the_way_over_http() -> None:
    for kind, status in HTTP_STATUS.items():
        again = from_status(status, "cannot do it", code="some_code")
        if kind not in (EnginehouseError, Hopeless):
            assert type(again) is kind
        assert (again.message, again.code) == ("cannot do it", "some_code")
