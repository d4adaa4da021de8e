"""What the source of a model means."""

from __future__ import annotations

import pytest

from enginehouse.core.errors import Invalid
from enginehouse.core.file_name import check_file_name
from enginehouse.core.model_source import ModelSource, is_repository, parse_source, plain_file_name


@pytest.mark.parametrize(
    ("text", "repository", "path", "revision", "quantization"),
    [
        ("hf:o/r", "o/r", "", "main", ""),
        ("hf://o/r/sub/f.gguf", "o/r", "sub/f.gguf", "main", ""),
        ("huggingface://o/r/f.gguf@v1", "o/r", "f.gguf", "v1", ""),
        ("hf.co/o/r:Q8_0", "o/r", "", "main", "Q8_0"),
        ("hf:o/r@refs/pr/3", "o/r", "", "refs/pr/3", ""),
        ("https://huggingface.co/o/r/resolve/abc/f%20x.gguf", "o/r", "f x.gguf", "abc", ""),
        ("https://huggingface.co/o/r/blob/main/f.gguf", "o/r", "f.gguf", "main", ""),
    ],
)
def test_hugging_face_in_all_its_spellings(
    text: str, repository: str, path: str, revision: str, quantization: str
) -> None:
    assert parse_source(text) == ModelSource(
        kind="huggingface",
        text=text,
        repository=repository,
        path=path,
        revision=revision,
        quantization=quantization,
    )


@pytest.mark.parametrize(
    ("text", "kind", "field", "value"),
    [
        ("https://host/a/b.gguf?x=1", "web", "url", "https://host/a/b.gguf?x=1"),
        ("github:o/r/f.gguf@main", "web", "url", "https://raw.githubusercontent.com/o/r/main/f.gguf"),
        ("ollama://gemma:2b", "ollama", "repository", "library/gemma"),
        ("ollama://me/gemma", "ollama", "revision", "latest"),
        ("oci://host:5000/a/b:1", "oci", "repository", "host:5000/a/b:1"),
        ("quay.io/a/b", "oci", "repository", "quay.io/a/b"),
        ("file:///srv/m%20x.gguf", "file", "path", "/srv/m x.gguf"),
        (f"upload:{'a' * 64}", "upload", "path", "a" * 64),
        ("http://host:8000", "endpoint", "url", "http://host:8000"),
        ("https://host/v1/", "endpoint", "url", "https://host"),
        ("pypi:x==1#y", "kept", "text", "pypi:x==1#y"),
    ],
)
def test_other_sources(text: str, kind: str, field: str, value: str) -> None:
    source = parse_source(text)
    assert (source.kind, getattr(source, field)) == (kind, value)


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "a b", "hf:", "hf:o", "hf:o/../x", "hf:o/r/../../x", "hf:o/r@../x", "hf:o/r:$(x)", "x.gguf"),
        *("ftp://h/x", "file://relative", "file:///a/../b", "ollama://a/b/c", "ollama://", "oci://UPPER", "upload:zz"),
        *("https://user:pw@host/x.gguf", "http://[", "javascript:x", "hf:o/r\nx", "./x.gguf", "http://"),
    ],
)
def test_what_is_no_source_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_source(text)
    assert caught.value.message.startswith("cannot use")
    assert "pw" not in caught.value.message


@pytest.mark.parametrize("name", ["", ".", "..", "a/../b", "/a", "a//b", "a/", "a\x00b", "a\\b", "x" * 300, "a/" * 20])
def test_a_name_never_leaves_its_directory(name: str) -> None:
    with pytest.raises(Invalid):
        check_file_name(name)
    assert check_file_name("sub/model-00001.safetensors")


def test_plain_names_and_repositories() -> None:
    assert plain_file_name("https://h/a/m%20x.gguf?download=true") == "m x.gguf"
    assert plain_file_name("https://h/a/..") == ""
    assert plain_file_name("https://h/a/x%2F..%2Fy") == "y"
    assert is_repository("org/name")
    assert not is_repository("dir/file.gguf")
    assert not is_repository("name")
