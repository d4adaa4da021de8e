"""Archives from web servers."""

from __future__ import annotations

import hashlib
import random

import pytest
from tests.fetch.faults import Answer, Cut, Header, IgnoreRange, Redirect
from tests.fetch.faulty import faulty
from tests.fetch.pulling import Pull, read_all

from enginehouse.core.artifact import Artifact
from enginehouse.core.errors import EnginehouseError, Hopeless, Invalid, NotFound, Upstream
from enginehouse.fetch.origins import Origin

CONTENT = random.Random(5).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


async def opened(pull: Pull, name: str = "x.tar.gz") -> tuple[Origin, Artifact]:
    pull.proxy.files[f"/{name}"] = CONTENT
    origin = pull.elsewhere(f"{pull.proxy.url}/{name}", SHA256)
    return origin, await origin.resolve("linux/amd64")


async def refusal(pull: Pull, origin: Origin, artifact: Artifact, start: int, end: int | None) -> EnginehouseError:
    with pytest.raises(EnginehouseError) as caught:
        await read_all(origin, artifact.layers[0], start, end)
    return caught.value


@pytest.mark.parametrize(
    ("name", "form", "compression", "diff_id"),
    [
        ("x.tar.gz", "tar", "gzip", ""),
        ("x.tgz", "tar", "gzip", ""),
        ("x.tar.zst", "tar", "zstd", ""),
        ("x.tar", "tar", "none", f"sha256:{SHA256}"),
        ("x.zip", "zip", "none", ""),
    ],
)
async def test_an_archive_is_one_layer(pull: Pull, name: str, form: str, compression: str, diff_id: str) -> None:
    origin, artifact = await opened(pull, name)
    (layer,) = artifact.layers
    assert artifact.digest == layer.digest == f"sha256:{SHA256}"
    assert (layer.form, layer.compression, layer.diff_id, layer.size_bytes) == (form, compression, diff_id, 300_000)
    assert await read_all(origin, layer) == CONTENT
    assert await read_all(origin, layer, 100, 5000) == CONTENT[100:5000]
    assert [request.method for request in pull.proxy.requests] == ["HEAD", "GET", "GET"]


@pytest.mark.parametrize("sha256", ["", "abc", "sha256:", "g" * 64, SHA256 + "0"])
async def test_an_archive_without_its_sha256_is_refused(pull: Pull, sha256: str) -> None:
    with pytest.raises(Invalid) as caught:
        pull.elsewhere(f"{pull.proxy.url}/x.tar", sha256)
    assert caught.value.code == "invalid_uri"
    assert "sha256" in caught.value.message


async def test_the_sha256_may_be_written_either_way(pull: Pull) -> None:
    for text in (SHA256, SHA256.upper(), f"sha256:{SHA256}"):
        pull.elsewhere(f"{pull.proxy.url}/x.tar", text)


@pytest.mark.parametrize("fault", [Answer(405), Answer(403), Header("content-length")])
@pytest.mark.parametrize("has_ranges", [True, False])
async def test_the_size_is_had_without_head_too(pull: Pull, fault: Answer | Header, has_ranges: bool) -> None:
    pull.proxy.plan(fault, method="HEAD")
    if not has_ranges:
        pull.proxy.plan(IgnoreRange(), method="GET")
    origin, artifact = await opened(pull)
    assert artifact.size_bytes == len(CONTENT)
    assert await read_all(origin, artifact.layers[0]) == CONTENT


async def test_a_server_that_never_says_the_size_is_refused(pull: Pull) -> None:
    pull.proxy.plan(Answer(200, b"", {"Content-Length": "", "Transfer-Encoding": "chunked"}), times=None)
    with pytest.raises(Hopeless) as caught:
        await opened(pull)
    assert caught.value.code == "unsupported"


async def test_a_missing_archive_is_not_found_and_a_busy_server_is_asked_again(pull: Pull) -> None:
    with pytest.raises(NotFound):
        await pull.elsewhere(f"{pull.proxy.url}/v2/none.tar", SHA256).resolve("linux/amd64")
    pull.proxy.plan(Answer(503), times=5)
    assert (await opened(pull))[1].size_bytes == len(CONTENT)


async def test_a_cut_transfer_goes_on_where_it_was(pull: Pull) -> None:
    origin, artifact = await opened(pull)
    layer = artifact.layers[0]
    pull.proxy.plan(Cut(1000), method="GET")
    with pytest.raises(Upstream):
        await read_all(origin, layer)
    assert await read_all(origin, layer, 1000) == CONTENT[1000:]
    assert pull.proxy.requests[-1].headers["if-range"].startswith('"')


async def test_bytes_of_two_versions_never_meet(pull: Pull) -> None:
    origin, artifact = await opened(pull)
    layer = artifact.layers[0]
    assert await read_all(origin, layer, 0, 1000) == CONTENT[:1000]
    changed = bytes(reversed(CONTENT))
    pull.proxy.files["/x.tar.gz"] = changed
    error = await refusal(pull, origin, artifact, 1000, 2000)
    assert (type(error), error.code) == (Upstream, "no_ranges")
    assert not origin.supports_ranges
    assert (await refusal(pull, origin, artifact, 1000, 2000)).code == "no_ranges"
    assert await read_all(origin, layer) == changed


async def test_a_server_that_ignores_if_range_is_noticed_by_its_etag(pull: Pull) -> None:
    origin, artifact = await opened(pull)
    pull.proxy.plan(Header("etag", '"another"'))
    assert (await refusal(pull, origin, artifact, 1000, 2000)).code == "no_ranges"


async def test_a_weak_etag_is_no_promise(pull: Pull) -> None:
    pull.proxy.plan(Header("etag", 'W/"1"'), times=None)
    origin, artifact = await opened(pull)
    assert await read_all(origin, artifact.layers[0], 1000, 2000) == CONTENT[1000:2000]
    assert "if-range" not in pull.proxy.requests[-1].headers


async def test_a_server_without_ranges_sends_the_whole(pull: Pull) -> None:
    origin, artifact = await opened(pull)
    pull.proxy.plan(IgnoreRange(), times=None)
    assert (await refusal(pull, origin, artifact, 5, None)).code == "no_ranges"
    assert await read_all(origin, artifact.layers[0]) == CONTENT


async def test_an_archive_may_be_sent_from_elsewhere(pull: Pull) -> None:
    async with faulty() as other:
        other.files["/x.tar.gz"] = CONTENT
        pull.proxy.plan(Redirect(other.url), times=None)
        origin, artifact = await opened(pull)
        assert await read_all(origin, artifact.layers[0], 10, 20) == CONTENT[10:20]
        pull.proxy.forget_plans()
        pull.proxy.plan(Redirect("http://10.0.0.1"), times=None)
        assert (await refusal(pull, origin, artifact, 10, 20)).code == "uri_not_allowed"


@pytest.mark.parametrize("uri", ["/srv/tree", "file:///srv/tree", "pypi:vllm==1"])
async def test_what_is_installed_in_another_way_is_not_an_origin(pull: Pull, uri: str) -> None:
    with pytest.raises(Invalid) as caught:
        pull.elsewhere(uri)
    assert caught.value.code == "unsupported"
