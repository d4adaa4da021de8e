"""Documents of registries that are hostile, odd, or legal in ways that few use."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.fetch.faults import Answer
from tests.fetch.images import DOCKER_MANIFEST, OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, digest_of
from tests.fetch.pulling import Pull

from enginehouse.core.artifact import Artifact
from enginehouse.core.errors import Hopeless

LINUX = "linux/amd64"


def manifest(**changes: Any) -> dict[str, Any]:
    digest = "sha256:" + "1" * 64
    document: dict[str, Any] = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": digest, "size": 2},
        "layers": [{"mediaType": OCI_LAYER, "digest": digest, "size": 2}],
    }
    document.update(changes)
    return {name: value for name, value in document.items() if value is not None}


def layer(**changes: Any) -> dict[str, Any]:
    return {"mediaType": OCI_LAYER, "digest": "sha256:" + "1" * 64, "size": 2} | changes


SELF = {"mediaType": OCI_INDEX, "digest": "sha256:" + "2" * 64, "size": 5}
PLAIN = manifest(config={"mediaType": "application/vnd.oci.empty.v1+json", "digest": SELF["digest"], "size": 2})

HOSTILE: list[tuple[str, bytes | dict[str, Any], str, str]] = [
    ("an index and a manifest in one", manifest(manifests=[]), OCI_MANIFEST, "unsafe_archive"),
    ("another type than it was sent as", manifest(), OCI_INDEX, "unsafe_archive"),
    ("dockers type inside, ours outside", manifest(mediaType=DOCKER_MANIFEST), OCI_MANIFEST, "unsafe_archive"),
    ("an index that calls itself a manifest", {"manifests": []}, OCI_MANIFEST, "unsafe_archive"),
    ("a manifest that calls itself an index", manifest(mediaType=OCI_INDEX), OCI_INDEX, "unsafe_archive"),
    ("a layer to be had elsewhere", manifest(layers=[layer(urls=["http://x/y"])]), OCI_MANIFEST, "unsafe_archive"),
    (
        "a layer not to be distributed",
        manifest(layers=[layer(mediaType="application/vnd.oci.image.layer.nondistributable.v1.tar")], config=None)
        | {"config": {"mediaType": "application/vnd.oci.empty.v1+json", "digest": SELF["digest"], "size": 2}},
        OCI_MANIFEST,
        "unsafe_archive",
    ),
    ("two hundred layers", manifest(layers=[layer()] * 200), OCI_MANIFEST, "archive_too_large"),
    ("five megabytes", b" " * 5_000_000, OCI_MANIFEST, "archive_too_large"),
    ("schema one", {"schemaVersion": 1, "fsLayers": []}, "application/json", "unsupported"),
    ("a web page", b"<html>", "text/html", "unsafe_archive"),
    ("no media type at all", manifest(mediaType=None), "", "unsupported"),
    ("a chart", manifest(mediaType=None), "application/vnd.cncf.helm.chart.v1.tar", "unsupported"),
    ("a list", b"[]", OCI_MANIFEST, "unsafe_archive"),
    ("a key twice", json.dumps(PLAIN).encode().replace(b"{", b'{"layers":[],', 1), OCI_MANIFEST, "unsafe_archive"),
    ("deep brackets", b"[" * 100_000, OCI_MANIFEST, "unsafe_archive"),
    ("not a number", b'{"schemaVersion":NaN}', OCI_MANIFEST, "unsafe_archive"),
    ("a digest of another kind", manifest(layers=[layer(digest="md5:1")]), OCI_MANIFEST, "unsafe_archive"),
    ("a path for a digest", manifest(layers=[layer(digest="sha256:../../x")]), OCI_MANIFEST, "unsafe_archive"),
    ("a negative size", manifest(layers=[layer(size=-1)]), OCI_MANIFEST, "unsafe_archive"),
    ("a size that is a word", manifest(layers=[layer(size="big")]), OCI_MANIFEST, "unsafe_archive"),
    ("neither layers nor manifests", {"schemaVersion": 2}, OCI_MANIFEST, "unsafe_archive"),
]


@pytest.mark.parametrize(
    ("document", "sent_as", "code"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE]
)
async def test_a_hostile_document_is_refused_with_its_code(
    pull: Pull, document: bytes | dict[str, Any], sent_as: str, code: str
) -> None:
    """F-101."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    pull.proxy.plan(Answer(200, body, {"Content-Type": sent_as}), path="manifests/")
    pull.proxy.plan(Answer(200, b"{}"), path="blobs/")
    with pytest.raises(Hopeless) as caught:
        await pull.origin().resolve(LINUX)
    assert caught.value.code == code
    assert caught.value.message.startswith("cannot ")


async def resolved(pull: Pull, *documents: tuple[dict[str, Any], str], config: bytes = b"") -> Artifact:
    """What becomes of made-up documents: the first is the tag's, the others are found by their digests."""
    for position, (document, kind) in enumerate(documents):
        body = json.dumps(document).encode()
        path = "manifests/latest" if position == 0 else digest_of(body)
        pull.proxy.plan(Answer(200, body, {"Content-Type": kind}), path=path, times=None)
    pull.proxy.plan(Answer(200, config), path="blobs/", times=None)
    return await pull.origin().resolve(LINUX)


def child(document: dict[str, Any], kind: str = OCI_MANIFEST, **changes: Any) -> dict[str, Any]:
    body = json.dumps(document).encode()
    return {"mediaType": kind, "digest": digest_of(body), "size": len(body)} | changes


AMD = {"os": "linux", "architecture": "amd64"}


def index(*children: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": list(children)}


async def test_something_that_is_not_an_image_has_layers_of_unknown_content(pull: Pull) -> None:
    artifact = await resolved(pull, (PLAIN, OCI_MANIFEST))
    assert [layer.diff_id for layer in artifact.layers] == [""]


async def test_attestations_and_unknown_platforms_are_passed_over(pull: Pull) -> None:
    attestation = child(PLAIN, platform={"os": "unknown", "architecture": "unknown"})
    signature = child(PLAIN, annotations={"vnd.docker.reference.type": "attestation-manifest"})
    other = manifest(**PLAIN, annotations={"a": "b"})
    chosen = child(other, platform=AMD | {"variant": "v2"})
    artifact = await resolved(pull, (index(attestation, signature, chosen), OCI_INDEX), (other, OCI_MANIFEST))
    assert artifact.digest == chosen["digest"]
    pull.proxy.forget_plans()
    with pytest.raises(Hopeless) as caught:
        await resolved(pull, (index(attestation, signature), OCI_INDEX))
    assert caught.value.code == "unsupported_platform"
    assert "unknown" not in caught.value.message


async def test_an_entry_without_a_platform_counts_as_localai_counts_it(pull: Pull) -> None:
    artifact = await resolved(pull, (index(child(PLAIN)), OCI_INDEX), (PLAIN, OCI_MANIFEST))
    assert artifact.digest == child(PLAIN)["digest"]


async def test_an_index_in_an_index_is_looked_into_and_no_deeper(pull: Pull) -> None:
    inner = index(child(PLAIN, platform=AMD))
    middle = index(child(inner, OCI_INDEX))
    artifact = await resolved(pull, (middle, OCI_INDEX), (inner, OCI_INDEX), (PLAIN, OCI_MANIFEST))
    assert artifact.digest == child(PLAIN)["digest"]
    pull.proxy.forget_plans()
    outer = index(child(middle, OCI_INDEX))
    with pytest.raises(Hopeless) as caught:
        await resolved(pull, (outer, OCI_INDEX), (middle, OCI_INDEX), (inner, OCI_INDEX), (PLAIN, OCI_MANIFEST))
    assert caught.value.code == "unsafe_archive"


async def test_an_index_that_is_its_own_child_is_refused(pull: Pull) -> None:
    """F-101."""
    loop = index(SELF)
    body = json.dumps(loop).encode()
    pull.proxy.plan(Answer(200, body, {"Content-Type": OCI_INDEX}), path="manifests/", times=None)
    with pytest.raises(Hopeless) as caught:
        await pull.origin().resolve(LINUX)
    assert caught.value.code == "digest_mismatch"
    assert len(pull.proxy.requests) == 2


async def test_a_child_of_another_type_than_its_index_says_is_refused(pull: Pull) -> None:
    lied = child(PLAIN, DOCKER_MANIFEST, platform=AMD)
    with pytest.raises(Hopeless) as caught:
        await resolved(pull, (index(lied), OCI_INDEX), (PLAIN, OCI_MANIFEST))
    assert caught.value.code == "unsafe_archive"


@pytest.mark.parametrize(
    "config",
    [
        b'{"rootfs":{"diff_ids":["sha256:0000000000000000000000000000000000000000000000000000000000000000"]}}',
        b'{"rootfs":{"diff_ids":[]}}',
        b'{"rootfs":{"diff_ids":["x"]}}',
        b'{"rootfs":7}',
        b"<",
        b"{}",
    ],
)
async def test_a_configuration_that_does_not_fit_its_layers_is_refused(pull: Pull, config: bytes) -> None:
    described = {"mediaType": OCI_CONFIG, "digest": digest_of(config), "size": len(config)}
    with pytest.raises(Hopeless) as caught:
        await resolved(pull, (manifest(config=described), OCI_MANIFEST), config=config)
    assert caught.value.code == "unsafe_archive"
