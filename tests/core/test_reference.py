"""URIs of backends and references to images, as docker reads them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.core.errors import Invalid
from enginehouse.core.reference import ImageReference, parse_image, parse_uri, shown_uri

DIGEST = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag", "digest"),
    [
        ("ubuntu", "docker.io", "library/ubuntu", "latest", ""),
        ("localai/localai-backends:v1", "docker.io", "localai/localai-backends", "v1", ""),
        ("docker.io/ubuntu:22.04", "docker.io", "library/ubuntu", "22.04", ""),
        ("index.docker.io/a/b", "docker.io", "a/b", "latest", ""),
        ("quay.io/go-skynet/local-ai:latest-cpu", "quay.io", "go-skynet/local-ai", "latest-cpu", ""),
        ("localhost/x", "localhost", "x", "latest", ""),
        ("localhost:5000/x/y/z:t", "localhost:5000", "x/y/z", "t", ""),
        ("127.0.0.1:5000/x", "127.0.0.1:5000", "x", "latest", ""),
        ("[::1]:5000/x:1", "[::1]:5000", "x", "1", ""),
        ("GHCR.io/a/b", "ghcr.io", "a/b", "latest", ""),
        (f"ghcr.io/a/b@{DIGEST}", "ghcr.io", "a/b", "", DIGEST),
        (f"ghcr.io/a/b:t@{DIGEST}", "ghcr.io", "a/b", "t", DIGEST),
    ],
)
def test_a_reference_is_read_as_docker_reads_it(text: str, host: str, repository: str, tag: str, digest: str) -> None:
    assert parse_image(text) == ImageReference(host=host, repository=repository, tag=tag, digest=digest)


def test_docker_hub_answers_under_another_name_and_a_digest_wins_over_a_tag() -> None:
    assert parse_image("ubuntu").registry == "registry-1.docker.io"
    assert parse_image("quay.io/a/b").registry == "quay.io"
    assert parse_image(f"a/b:t@{DIGEST}").wanted == DIGEST
    assert parse_image("a/b:t").wanted == "t"


_word = st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True)


@given(
    host=st.sampled_from(["", "quay.io/", "localhost:5000/", "registry.example.com/"]),
    parts=st.lists(_word, min_size=1, max_size=4),
    tag=st.one_of(st.just(""), st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,10}", fullmatch=True)),
    digest=st.sampled_from(["", DIGEST]),
)
def test_what_a_reference_says_of_itself_means_the_same(host: str, parts: list[str], tag: str, digest: str) -> None:
    text = host + "/".join(parts) + (f":{tag}" if tag else "") + (f"@{digest}" if digest else "")
    reference = parse_image(text)
    assert parse_image(str(reference)) == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Ubuntu",
        "a//b",
        "/",
        "quay.io/",
        "quay.io/A/b",
        "a/b:",
        "a/b:-x",
        "a/b:" + "t" * 129,
        "a/b@sha256:abc",
        "a/b@sha512:" + "a" * 128,
        "a/b@",
        "a/../b",
        "quay.io:0/a",
        "quay.io:99999/a",
        "quay.io:port/a",
        "user@quay.io/a",
        "a" * 300 + "/b",
        "-x.io/a",
        "a/b c",
    ],
)
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_image(text)
    assert caught.value.code == "invalid_uri"


@pytest.mark.parametrize(
    ("uri", "kind", "field", "value"),
    [
        ("oci://quay.io/a/b:1", "image", "image", parse_image("quay.io/a/b:1")),
        ("localai/localai-backends:latest", "image", "image", parse_image("localai/localai-backends:latest")),
        ("ocifile:///srv/x.tar", "ocifile", "path", "/srv/x.tar"),
        ("file:///srv/tree", "directory", "path", "/srv/tree"),
        ("/srv/tree", "directory", "path", "/srv/tree"),
        ("pypi:vllm==1.2", "package", "package", "vllm==1.2"),
        ("https://h/x.tar.gz", "archive", "compression", "gzip"),
        ("https://h/x.TGZ?signature=1", "archive", "compression", "gzip"),
        ("https://h/x.tar.zst", "archive", "compression", "zstd"),
        ("http://h/x.tar", "archive", "compression", "none"),
        ("https://h/x.zip", "archive", "form", "zip"),
    ],
)
def test_every_kind_of_uri_is_told_apart(uri: str, kind: str, field: str, value: object) -> None:
    source = parse_uri(uri)
    assert (source.kind, getattr(source, field)) == (kind, value)


@pytest.mark.parametrize(
    ("uri", "code"),
    [
        ("", "invalid_uri"),
        ("x" * 2049, "invalid_uri"),
        ("ocifile://relative", "invalid_uri"),
        ("file://host/path", "invalid_uri"),
        ("//server/share", "invalid_uri"),
        ("https://h/x.rar", "unsupported"),
        ("https://h/", "unsupported"),
        ("ftp://h/x.tar", "uri_not_allowed"),
        ("ollama://llama3", "uri_not_allowed"),
        ("gopher://h/x.tar", "uri_not_allowed"),
        ("oci://quay.io/a\r\nHost: x", "uri_not_allowed"),
        ("quay.io/a b", "uri_not_allowed"),
        ("https://h/x\0.tar", "uri_not_allowed"),
    ],
)
def test_a_uri_that_cannot_be_used_is_refused_with_its_code(uri: str, code: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_uri(uri)
    assert caught.value.code == code
    assert caught.value.message.startswith("cannot ")


@pytest.mark.parametrize(
    "uri",
    [
        "https://me:hunter2@h/x.rar",
        "https://h/x.rar?token=hunter2",
        "https://h/x.rar#hunter2",
        "me:hunter2@quay.io/A",
        "ftp://me:hunter2@h/",
        "oci://me:hunter2@quay.io/a/b",
    ],
)
def test_no_secret_of_a_uri_is_repeated_in_a_message(uri: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse_uri(uri)
    assert "hunter2" not in caught.value.message
    assert "hunter2" not in shown_uri(uri)
