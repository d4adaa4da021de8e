"""From a reference to an artifact: which manifest, which layers, and everything that is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fetch.faults import Answer, Drop, Flip, Hang, Header
from tests.fetch.images import (
    digest_of,
    run,
    write_image,
    write_index,
)
from tests.fetch.pulling import Pull
from tests.fetch.real_registry import Registry

from enginehouse.core.errors import EnginehouseError, Hopeless, NotFound, Upstream
from enginehouse.fetch.http.retries import RetryPolicy

LINUX = "linux/amd64"


async def refusal(pull: Pull, name: str = "backends/one:latest", platform: str = LINUX) -> EnginehouseError:
    with pytest.raises(EnginehouseError) as caught:
        await pull.origin(name).resolve(platform)
    assert caught.value.message.startswith("cannot ")
    return caught.value


async def test_a_tag_becomes_digests_sizes_and_layers(pull: Pull) -> None:
    artifact = await pull.origin().resolve(LINUX)
    image = pull.image
    assert artifact.uri == pull.proxy.reference("backends/one:latest")
    assert (artifact.digest, artifact.index_digest, artifact.platform) == (image.digest, "", LINUX)
    assert [(layer.digest, layer.size_bytes, layer.diff_id, layer.compression) for layer in artifact.layers] == [
        (blob.digest, blob.size_bytes, blob.diff_id, "gzip") for blob in image.layers
    ]
    assert artifact.size_bytes == sum(blob.size_bytes for blob in image.layers)


async def test_a_digest_is_asked_for_as_it_is(pull: Pull) -> None:
    artifact = await pull.origin(f"backends/one:ignored@{pull.image.digest}").resolve(LINUX)
    assert artifact.digest == pull.image.digest
    assert not pull.proxy.asked("ignored")


async def test_an_index_gives_the_manifest_of_the_platform(pull: Pull, registry: Registry, tmp_path: Path) -> None:
    layout = tmp_path / "layout"
    amd = write_image(layout, [{"a": b"amd"}], compression="zstd")
    arm = write_image(layout, [{"a": b"arm"}], compression="none", platform="linux/arm64")
    index = write_index(layout, [arm, amd])
    await registry.push(layout, "backends/two:latest")
    for image, compression in ((amd, "zstd"), (arm, "none")):
        artifact = await pull.origin("backends/two:latest").resolve(image.platform)
        assert (artifact.digest, artifact.index_digest) == (image.digest, index.digest)
        assert [layer.compression for layer in artifact.layers] == [compression]
    error = await refusal(pull, "backends/two:latest", "darwin/arm64")
    assert (type(error), error.code) == (Hopeless, "unsupported_platform")
    assert all(word in error.message for word in ("darwin/arm64", "linux/amd64", "linux/arm64"))


async def test_a_manifest_of_dockers_kind_is_understood(pull: Pull, registry: Registry) -> None:
    await run(
        *("skopeo", "--insecure-policy", "copy", "--quiet", "--format", "v2s2", "--dest-tls-verify=false"),
        *(f"oci:{pull.image.directory}", f"docker://{registry.reference('backends/docker:1')}"),
    )
    artifact = await pull.origin("backends/docker:1").resolve(LINUX)
    assert [layer.diff_id for layer in artifact.layers] == [blob.diff_id for blob in pull.image.layers]
    assert pull.proxy.asked("manifests/1")[0].status == 200
    assert artifact.digest != pull.image.digest


async def test_a_single_manifest_for_another_machine_is_refused(pull: Pull) -> None:
    error = await refusal(pull, platform="linux/arm64")
    assert error.code == "unsupported_platform"
    assert "linux/arm64" in error.message
    assert "linux/amd64" in error.message


async def test_what_is_missing_is_not_replaced_by_a_neighbour(pull: Pull) -> None:
    for name in ("backends/one:lates", "backends/one:v1", f"backends/one@sha256:{'0' * 64}", "backends/none:latest"):
        error = await refusal(pull, name)
        assert (type(error), error.code) == (NotFound, "not_found")
        assert name in error.message
    assert not pull.proxy.asked("manifests/latest", "GET")[1:]


async def test_a_tag_that_moves_after_it_was_resolved_changes_nothing(
    pull: Pull, registry: Registry, tmp_path: Path
) -> None:
    first = write_image(tmp_path / "first", [{"a": b"1"}])
    second = write_image(tmp_path / "second", [{"a": b"2"}])
    await registry.push(first.directory, "backends/moving:latest")
    origin = pull.origin("backends/moving:latest")
    artifact = await origin.resolve(LINUX)
    await registry.push(second.directory, "backends/moving:latest")
    content = b"".join([piece async for piece in origin.read(artifact.layers[0], 0, None)])
    assert (artifact.digest, digest_of(content)) == (first.digest, first.layers[0].digest)
    by_tag = [request for request in pull.proxy.requests if "sha256:" not in request.path]
    assert len(by_tag) == 1


@pytest.mark.parametrize("part", ["manifest", "configuration"])
async def test_one_wrong_byte_in_a_document_is_a_digest_mismatch(pull: Pull, part: str) -> None:
    path = pull.image.digest if part == "manifest" else pull.image.config.digest
    pull.proxy.plan(Flip(20), path=path, times=None)
    error = await refusal(pull, f"backends/one@{pull.image.digest}")
    assert (type(error), error.code) == (Hopeless, "digest_mismatch")


async def test_a_registry_that_tells_another_digest_than_it_sends_is_not_believed(pull: Pull) -> None:
    pull.proxy.plan(Header("docker-content-digest", "sha256:" + "0" * 64), path="manifests/")
    assert (await refusal(pull)).code == "digest_mismatch"


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_registry_is_asked_again(pull: Pull, status: int) -> None:
    pull.proxy.plan(Answer(status, headers={"Retry-After": "1"}), path="manifests/", times=3)
    assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest
    assert len(pull.proxy.asked("manifests/")) == 4


async def test_a_registry_that_stays_busy_is_given_up_with_its_own_waiting_time(pull: Pull) -> None:
    pull.proxy.plan(Answer(429, headers={"Retry-After": "3"}), times=None)
    error = await refusal(pull)
    assert (type(error), error.code, error.retry_after_seconds) == (Upstream, "upstream_error", 3)
    assert len(pull.proxy.requests) == 4


async def test_a_registry_that_never_answers_is_waited_for_once(pull: Pull) -> None:
    pull.proxy.plan(Hang(), path="manifests/", times=None)
    error = await refusal(pull)
    assert (type(error), error.code) == (Upstream, "stalled")
    assert len(pull.proxy.asked("manifests/")) == 1


def test_pauses_grow_and_a_servers_own_waiting_time_counts_up_to_a_minute() -> None:
    busy = Upstream("cannot")
    assert [RetryPolicy().pause_seconds(attempt, busy) for attempt in range(3)] == [0.5, 1, 2]
    for told, pause in ((0.1, 0.5), (7, 7), (3600, 60)):
        busy.retry_after_seconds = told
        assert RetryPolicy().pause_seconds(0, busy) == pause


async def test_a_connection_that_breaks_is_made_again(pull: Pull) -> None:
    pull.proxy.plan(Drop(), times=3)
    assert (await pull.origin().resolve(LINUX)).digest == pull.image.digest
