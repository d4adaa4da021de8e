"""LocalAI's model galleries, in every form of their documents: read, merged, skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fetch.pulling import LOOPBACK

from enginehouse.core.errors import Invalid
from enginehouse.core.gallery_entry import Gallery
from enginehouse.core.model_gallery import GalleryChanges, ModelEntry, VariantCandidate, choose_variant, configured
from enginehouse.fetch.galleries.documents import read_mappings, write_mapping
from enginehouse.fetch.galleries.model_index import BaseDocuments, opened, with_models
from enginehouse.fetch.http.client import Client

GIB = 1024**3
EMPTY = Gallery(name="g", url="file:///g.yaml")


def entries(text: str) -> Gallery:
    return with_models(EMPTY, text.encode())


def test_entries_are_read_and_unusable_ones_are_skipped_with_the_reason() -> None:
    gallery = entries("""
- &one
  name: one
  url: github:o/r/gallery/base.yaml@master
  license: 2.0
  tags: [a, 1]
  icon: null
  size: 3GB
  last_checked: 2024-01-01
  overrides: {parameters: {model: one.gguf}, context_size: 10}
  files: [{filename: one.gguf, uri: "huggingface://o/r/one.gguf", sha256: ab}]
- !!merge <<: *one
  name: two
  variants: [{model: one}]
- {name: ONE}
- {url: x}
- {name: " bad "}
- {name: odd, overrides: [1]}
- {name: fine, files: text}
""")
    assert [entry.name for entry in gallery.offers] == ["one", "two", "fine"]
    assert gallery.offers[1].overrides == gallery.offers[0].overrides
    assert (gallery.offers[0].license, gallery.offers[0].tags) == ("2.0", ("a", "1"))
    reasons = {one.entry: one.reason for one in gallery.skipped}
    assert set(reasons) == {"ONE", "#4", " bad ", "odd"}
    assert "the same name" in reasons["ONE"]
    with pytest.raises(Invalid, match="no usable entries"):
        entries("- {url: x}")
    with pytest.raises(Invalid, match="as YAML"):
        entries("- {name: ")


def test_overrides_win_map_by_map_and_files_and_templates_are_collected() -> None:
    base = opened(
        b"name: base\nlicense: mit\nconfig_file: |\n  backend: llama-cpp\n  context_size: 4096\n"
        b"  parameters: {temperature: 0.2, model: x}\n  template: {chat: t}\n"
        b"files: [{filename: a, uri: 'https://h/a'}]\nprompt_templates: [{name: t, content: hello}]\n",
        "base.yaml",
    )
    entry = ModelEntry(
        name="one",
        overrides={"parameters": {"model": "one.gguf"}, "context_size": 10},
        files=({"filename": "one.gguf", "uri": "https://h/one.gguf"}, {"filename": "a", "uri": "https://h/newer"}),
        description="about",
    )
    changes = GalleryChanges(name="mine", overrides={"context_size": 20}, files=({"filename": "b", "uri": "hf:o/r/b"},))
    assert configured(entry, [base], changes) == {
        "license": "mit",
        "description": "about",
        "backend": "llama-cpp",
        "context_size": 20,
        "parameters": {"temperature": 0.2, "model": "one.gguf"},
        "template": {"chat": "t"},
        "name": "mine",
        "download_files": [
            {"filename": "a", "uri": "https://h/newer"},
            {"filename": "one.gguf", "uri": "https://h/one.gguf"},
            {"filename": "b", "uri": "hf:o/r/b"},
        ],
        "prompt_templates": [{"name": "t", "content": "hello"}],
    }


@pytest.mark.parametrize(
    ("body", "config"),
    [
        (b"config_file:\n  backend: a\n", {"backend": "a"}),
        (b'config_file: "backend: a"', {"backend": "a"}),
        (b"config_file: ''", {}),
        (b"name: virtual", {}),
        (b"", {}),
        (b"backend: a\nparameters: {model: m}\n", {"backend": "a", "parameters": {"model": "m"}}),
        (b'config_file: |\n  template:\n    chat: "it\\\'s"\n', {"template": {"chat": "it's"}}),
    ],
)
def test_base_documents_in_their_forms(body: bytes, config: dict[str, object]) -> None:
    assert opened(body, "base.yaml")["config_file"] == config


@pytest.mark.parametrize("body", [b"[1]", b"a: 1\n---\nb: 2", b"config_file: '- 1'", b'x: "\\q"'])
def test_a_base_document_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(Invalid):
        opened(body, "base.yaml")


def test_numbers_and_booleans_have_their_types_and_survive_writing() -> None:
    text = b"a: 1\nb: 0.5\nc: true\nd: 'true'\ne: 1.10.0\nf: 2024-01-01\n"
    text += b"g: on\nh: 1e-5\ni: 0x10\nj: 007\nk: ~\nl: -1\nm: 1e999\n"
    (found,) = read_mappings(text, "x")
    assert found == {
        **{"a": 1, "b": 0.5, "c": True, "d": "true", "e": "1.10.0", "f": "2024-01-01", "g": "on", "h": 1e-5},
        **{"i": 16, "j": "007", "k": None, "l": -1, "m": "1e999"},
    }
    assert read_mappings(write_mapping(found).encode(), "x") == [found]


async def test_documents_on_this_disk_are_for_galleries_on_this_disk_alone(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("config_file: {backend: a}\n")
    client = Client(LOOPBACK)
    documents = BaseDocuments(client)
    url = f"file://{tmp_path}/base.yaml"
    assert (await documents.read(url, may_read_files=True))["config_file"] == {"backend": "a"}
    with pytest.raises(Invalid, match="only galleries on this machine"):
        await documents.read(url, may_read_files=False)
    with pytest.raises(Invalid, match="not a public address"):
        await documents.read("http://10.0.0.1/base.yaml", may_read_files=False)
    await client.close()


def test_the_largest_variant_that_fits_is_chosen() -> None:
    own, small, large = (ModelEntry(name=name) for name in ("own", "small", "large"))
    candidates = [
        VariantCandidate(entry=own),
        VariantCandidate(entry=small, size_bytes=2 * GIB),
        VariantCandidate(entry=large, size_bytes=9 * GIB),
    ]
    assert choose_variant(candidates, [4 * GIB])[0] is small
    assert choose_variant(candidates, [64 * GIB])[0] is large
    assert choose_variant(candidates, [GIB])[0] is own
    assert choose_variant(candidates, [])[0] is own
    assert choose_variant(candidates, [GIB], "LARGE")[0] is large
    with pytest.raises(Invalid, match="there are own, small, large"):
        choose_variant(candidates, [], "other")
