"""What may be the name and the source of a model's file."""

from __future__ import annotations

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.core.file_name import MAX_FILES, check_file_name, check_file_names, check_file_source

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "name", ["a.gguf", "text_encoder/model-00001-of-00002.safetensors", "a b/c", "ä.gguf", "x" * 200]
)
def test_a_relative_path_is_a_name(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.git/config", ".", "..", "a/..", "~\x00"),
        *("a\nb", "a\\b", "a\u202eb", "a/ b", "a /b", "x" * 256, "ä" * 128, "a/" * 600 + "b", "e\u0301"),
        *("model.json", "MODEL.json", "a.part", "a.sha256.target"),
    ],
)
def test_a_path_that_leads_elsewhere_or_is_the_workers_own_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="cannot use"):
        check_file_name(name)


def test_a_model_may_have_a_manifest_of_its_own_deeper_down() -> None:
    assert check_file_name("unet/model.json") == "unet/model.json"


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A"), ("a/b", "a"), ("a", "A/b"), ("straße", "STRASSE")])
def test_two_files_in_one_place_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(Invalid, match="another file of the model"):
        check_file_names(names)


def test_files_side_by_side_are_accepted_and_their_number_is_bounded() -> None:
    check_file_names(["a/b", "a/c", "a/d/e", "f"])
    with pytest.raises(Invalid, match="more than"):
        check_file_names(f"f{number}" for number in range(MAX_FILES + 1))


@pytest.mark.parametrize(
    "uri",
    [
        *("https://host/a", "http://host:1/a?b=c", f"oci://r/m@sha256:{DIGEST}", f"ollama://library/m@sha256:{DIGEST}"),
        *("file:///srv/a.gguf", f"upload:{DIGEST}", "builtin:tiny.gguf", "pypi:package#inner"),
    ],
)
def test_a_source_that_workers_can_fetch_is_accepted(uri: str) -> None:
    check_file_source("a", uri, DIGEST)
    check_file_source("a", uri, "")


@pytest.mark.parametrize(
    "uri",
    [
        *("", "ftp://host/a", "/srv/a", "file://host/a", "file:///srv/../etc/passwd", "https://me:secret@host/a"),
        *("oci://r/m:tag", "ollama://m", "upload:abc", f"upload:{'f' * 64}", f"oci://r/m@sha256:{'f' * 64}"),
        *("https://host/a b", "https://host/" + "a" * 3000),
    ],
)
def test_another_source_is_refused_without_its_secrets(uri: str) -> None:
    with pytest.raises(Invalid, match="cannot fetch") as caught:
        check_file_source("a", uri, DIGEST)
    assert "secret" not in caught.value.message


def test_a_digest_that_is_none_is_refused() -> None:
    for digest in ("abc", DIGEST.upper(), "sha256:" + DIGEST):
        with pytest.raises(Invalid, match="sha256"):
            check_file_source("a", "https://host/a", digest)
