"""The built-in gallery is right, and a list of galleries means what LocalAI means by it."""

from __future__ import annotations

import hashlib

import pytest

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.gallery import find_model, resolve
from enginehouse.core.gallery_source import LOCALAI, GallerySource, candidates, decode_sources, encode_sources, location
from enginehouse.core.name import check_name
from enginehouse.fetch.galleries.sources import builtin_directory, load_builtin
from enginehouse.fetch.pypi import check_requirement

# The built-in one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("platform", ["linux/amd64", "linux/arm64", "darwin/arm64"])
@pytest.mark.parametrize("capability", ["default", "nvidia", "amd", "intel", "vulkan", "metal"])
def test_llama_cpp_is_there_for_every_listed_machine(platform: str, capability: str) -> None:
    resolved = resolve((load_builtin(),), "llama-cpp", capability, platform)
    assert (resolved.directory, resolved.meta, resolved.alias) == ("xllamacpp", "llama-cpp", "llama-cpp")
    assert [check_requirement(line).split("==")[0] for line in resolved.requirements] == ["xllamacpp", "pykdtree"]
    assert resolved.uri.removeprefix("pypi:") == resolved.requirements[0].split()[0]
    assert builtin_directory().joinpath("launchers", f"{resolved.launcher}.py").is_file()


def test_a_machine_without_a_build_is_told() -> None:
    with pytest.raises(Hopeless, match="none for windows/amd64"):
        resolve((load_builtin(),), "llama-cpp", "default", "windows/amd64")


def test_the_model_that_comes_along_is_the_one_described() -> None:
    model = find_model((load_builtin(),), "tiny-chat")
    assert model is not None
    (file,) = model.files
    shipped = builtin_directory().joinpath(file.uri.removeprefix("builtin:")).read_bytes()
    assert (len(shipped), hashlib.sha256(shipped).hexdigest()) == (file.size_bytes, file.sha256)
    assert "toy" in model.description


def test_every_model_of_the_gallery_can_be_fetched_and_run() -> None:
    gallery = load_builtin()
    for model in gallery.models:
        assert resolve((gallery,), model.backend, "default", "linux/amd64")
        for file in model.files:
            check_name(file.name, "file")
            if file.uri.startswith("pypi:"):
                assert check_requirement(file.requirement).startswith(file.uri[5:].partition("#")[0] + " ")


# Where galleries come from ------------------------------------------------------------------------


def test_localais_list_is_understood_and_written_again() -> None:
    text = encode_sources((LOCALAI,))
    assert decode_sources(text) == (LOCALAI,)
    (again,) = decode_sources('[{"name":"a","url":"file:///x","mirrors":null,"verification":null,"future":1}]')
    assert again == GallerySource(name="a", url="file:///x")
    assert decode_sources("[]") == ()
    assert decode_sources([{"name": "a", "url": "file:///x"}]) == (again,)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        '[{"name":"a"}]',
        '[{"name":"a","url":""}]',
        '[{"name":"a b","url":"file:///x"}]',
        '[{"name":"enginehouse","url":"file:///x"}]',
        '[{"name":"a","url":"file:///x"},{"name":"a","url":"file:///y"}]',
        '[{"name":"a","url":"ftp://x/y"}]',
        '[{"name":"a","url":"file:///x","mirrors":["nonsense"]}]',
        '[{"name":"a","url":"https://user:word@host/x"}]',
        "[" * 5000,
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        decode_sources(text)


@pytest.mark.parametrize(
    ("url", "meaning"),
    [
        (
            "github:mudler/LocalAI/backend/index.yaml@master",
            "https://raw.githubusercontent.com/mudler/LocalAI/master/backend/index.yaml",
        ),
        ("github://org/repo/a/b.yaml", "https://raw.githubusercontent.com/org/repo/main/a/b.yaml"),
        ("github:org/repo/b.yaml@feature/x", "https://raw.githubusercontent.com/org/repo/feature/x/b.yaml"),
        ("file:///etc/x.yaml", "file:///etc/x.yaml"),
        ("file:/etc/x.yaml", "file:///etc/x.yaml"),
        ("file://localhost/etc/x.yaml", "file:///etc/x.yaml"),
        ("HTTPS://Host/x", "https://Host/x"),
    ],
)
def test_a_location_means_what_localai_means_by_it(url: str, meaning: str) -> None:
    assert location(url) == meaning


@pytest.mark.parametrize(
    "url",
    [
        "file://host/x",
        "file:x",
        "github:org/repo",
        "github:o/r/../../x",
        "github:o/r/x?y",
        "x",
        "",
        "https:",
        "http://a b",
    ],
)
def test_a_location_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        location(url)
    assert caught.value.code == "invalid_uri"


def test_every_place_is_tried_once() -> None:
    source = GallerySource(name="a", url="file:///a", mirrors=("file:///b", "", "file:///a", "file:///b"))
    assert candidates(source) == ("file:///a", "file:///b")
