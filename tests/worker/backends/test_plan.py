"""What a plan says is what an install then does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fetch.faults import Answer
from tests.fetch.images import Compression, tar_of
from tests.fetch.real_registry import Registry
from tests.worker.shelf import Shelf, launcher, noise, shelf

from enginehouse.artifact.blobs import partial
from enginehouse.build_worker import open_local
from enginehouse.core.errors import EnginehouseError

TEXT = b"a line that is easily compressed\n" * 20_000
LAYERS = [{"run.sh": launcher("one"), "a": noise(300_000, 1)}, {"b": TEXT, "c": noise(100_000, 2)}]


def tar_bytes() -> int:
    return sum(len(tar_of(layer)) for layer in LAYERS)


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
async def test_a_plan_names_the_bytes_that_an_install_then_fetches(one: Shelf, compression: Compression) -> None:
    image = await one.publish("engine:1", LAYERS, compression=compression)
    planned = await one.plan("engine:1")
    total = sum(layer.size_bytes for layer in image.layers)
    assert (planned.total_bytes, planned.fetch_bytes, planned.reused_bytes) == (total, total, 0)
    assert (planned.digest, planned.source) == (image.digest, one.resolved("engine:1").uri)
    assert planned.unpacked_bytes == pytest.approx(tar_bytes(), rel=0.01)
    assert planned.free_after_bytes == planned.free_bytes - total - planned.unpacked_bytes
    assert not planned.is_current
    assert not one.backends.exists()
    sent = one.proxy.bytes_sent("blobs")
    # A few bytes of each layer say how large it is inside.
    assert sent <= image.config.size_bytes + 18 * len(image.layers)
    installed = await one.install(one.request("engine:1"))
    assert installed.fetched_bytes == planned.fetch_bytes
    assert installed.digest == planned.digest


async def test_what_is_here_already_is_planned_as_reused(one: Shelf) -> None:
    await one.publish("engine:1", LAYERS)
    await one.install(one.request("engine:1"))
    current = await one.plan("engine:1")
    assert (current.is_current, current.fetch_bytes) == (True, 0)
    assert current.free_after_bytes == current.free_bytes
    assert current.tree_bytes >= sum(len(content) for layer in LAYERS for content in layer.values())
    image = await one.publish("engine:2", [LAYERS[0], {"b": noise(50_000, 3)}])
    planned = await one.plan("engine:2")
    assert (planned.reused_bytes, planned.fetch_bytes) == (image.layers[0].size_bytes, image.layers[1].size_bytes)
    assert planned.installed_digest == current.digest
    installed = await one.install(one.request("engine:2"))
    assert (installed.reused_bytes, installed.fetched_bytes) == (planned.reused_bytes, planned.fetch_bytes)


async def test_an_interrupted_fetch_is_planned_as_far_as_it_came(one: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", 64 * 1024)
    image = await one.publish("engine:1", LAYERS)
    one.proxy.plan(Answer(status=404), path=image.layers[0].digest, times=None, after=4)
    with pytest.raises(EnginehouseError):
        await one.install(one.request("engine:1"))
    one.proxy.forget_plans()
    planned = await one.plan("engine:1")
    total = sum(layer.size_bytes for layer in image.layers)
    assert planned.reused_bytes > 0
    assert planned.fetch_bytes + planned.reused_bytes == planned.total_bytes == total
    assert [layer[:2] for layer in planned.layers] == [(layer.digest, layer.size_bytes) for layer in image.layers]
    assert sum(held for _, _, held in planned.layers) == planned.reused_bytes
    installed = await one.install(one.request("engine:1"))
    assert (installed.fetched_bytes, installed.reused_bytes) == (planned.fetch_bytes, planned.reused_bytes)


async def test_a_layer_that_occurs_twice_is_planned_once(one: Shelf) -> None:
    image = await one.publish("engine:1", [LAYERS[0], LAYERS[1], LAYERS[0]])
    planned = await one.plan("engine:1")
    assert planned.fetch_bytes == image.layers[0].size_bytes + image.layers[1].size_bytes
    installed = await one.install(one.request("engine:1"))
    assert (installed.fetched_bytes, installed.reused_bytes) == (planned.fetch_bytes, planned.reused_bytes)


async def test_an_image_on_this_disk_is_planned_without_a_byte_to_fetch(one: Shelf) -> None:
    image = await one.publish("engine:1", LAYERS)
    planned = await one.plan("", uri=f"ocifile://{image.directory}")
    assert planned.fetch_bytes == 0
    assert planned.unpacked_bytes == pytest.approx(tar_bytes(), rel=0.01)
    installed = await one.install(one.request("", uri=f"ocifile://{image.directory}"))
    assert installed.fetched_bytes == 0


async def test_a_plan_from_a_mirror_says_so(one: Shelf) -> None:
    await one.publish("engine:1", LAYERS)
    one.proxy.plan(Answer(status=500), times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    planned = await one.plan("engine:1", mirrors=(mirror,))
    assert planned.source == mirror


async def test_a_plan_needs_no_lock_and_changes_nothing(registry: Registry, tmp_path: Path) -> None:
    async with shelf(registry, tmp_path) as one:
        await one.publish("engine:1", LAYERS)
        await one.install(one.request("engine:1"))
        await one.publish("engine:2", [LAYERS[0]])
        async with open_local(one.options, os.environ, doing="hold the lock"):
            before = {path: path.stat().st_mtime_ns for path in one.backends.rglob("*")}
            async with open_local(one.options, os.environ, doing="plan", is_locked=False) as local:
                planned = await local.plan(one.resolved("engine:2"))
                assert not planned.is_current
                assert await local.newest_digest(one.resolved("engine:2")) == planned.digest
        assert {path: path.stat().st_mtime_ns for path in one.backends.rglob("*")} == before
