"""Galleries: the built-in one is right, and a bad entry hides only itself."""

from __future__ import annotations

import hashlib
import logging

import pytest

from enginehouse.core.errors import Hopeless, Invalid
from enginehouse.core.gallery import find_model, resolve
from enginehouse.core.name import check_name
from enginehouse.fetch.galleries import builtin_directory, load_builtin, parse_backends, parse_models
from enginehouse.fetch.pypi import check_requirement


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


def test_a_bad_entry_is_skipped_and_named(caplog: pytest.LogCaptureFixture) -> None:
    document = b"""
- {name: good, uri: x}
- name: 7
- uri: nameless
- plain text
- name: ../bad
- {name: good2, future: 1}
"""
    with caplog.at_level(logging.WARNING):
        assert [entry.name for entry in parse_backends(document, "g")] == ["good", "good2"]
    assert [record.getMessage().split(" error")[0] for record in caplog.records] == [
        "gallery.entry_skipped gallery=g entry=7",
        "gallery.entry_skipped gallery=g entry=#2",
        "gallery.entry_skipped gallery=g entry=#3",
        "gallery.entry_skipped gallery=g entry='../bad'",
    ]


def test_anchors_and_merges_of_localai_work() -> None:
    document = b"""
- &common
  name: a
  license: MIT
- !!merge <<: *common
  name: b
- <<: *common
  name: c
"""
    assert [(entry.name, entry.license) for entry in parse_backends(document, "g")] == [
        ("a", "MIT"),
        ("b", "MIT"),
        ("c", "MIT"),
    ]


@pytest.mark.parametrize(
    "document",
    [
        b"name: not a list",
        b"- name: a\n  name: b",
        b"- {",
        b"\xff\xfe",
        b"- !!python/object:os.system {}",
        b"- &a [" + b"x," * 400 + b"]\n- &b [" + b"*a," * 400 + b"]\n- [" + b"*b," * 400 + b"]",
        b"- &a [*a]",
        b"#" * (5 * 1024 * 1024 + 1),
    ],
)
def test_a_document_that_cannot_be_read_or_explodes_is_refused(document: bytes) -> None:
    with pytest.raises(Invalid) as caught:
        parse_backends(document, "g")
    assert caught.value.message.startswith("cannot read the gallery g: ")


def test_an_empty_document_is_an_empty_gallery() -> None:
    assert parse_backends(b"", "g") == ()
    assert parse_models(b"# nothing\n", "g") == ()
