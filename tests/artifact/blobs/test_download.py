"""How far a pull is, and how it ends before its time: progress, silence, cancellation."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.fetch.faults import Answer, Flip, Hang, Stall
from tests.fetch.images import Image
from tests.fetch.real_registry import Registry
from tests.worker.shelf import DIRECTORY, Shelf, launcher, noise, said_by, shelf, tree_of
from tests.worker.world import nothing, until

from enginehouse.artifact.blobs import partial
from enginehouse.artifact.blobs.download import CONNECTIONS
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, Upstream
from enginehouse.worker.backends.installer import InstallRequest

PART_BYTES = 128 * 1024
LAYERS = [{"run.sh": launcher("one"), "lib/a.so": noise(500_000, 1)}, {"lib/b.so": noise(300_000, 2)}]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", PART_BYTES)


@pytest.fixture
async def image(one: Shelf) -> Image:
    return await one.publish("engine:1", LAYERS)


def is_right(one: Shelf) -> bool:
    tree = tree_of(one.tree)
    contents = {name: content for name, (_, content) in tree.items() if name != "lib"}
    return contents == LAYERS[0] | LAYERS[1] and said_by(one.tree) == "one" and not one.residue()


async def test_numbers_never_fall_though_a_blob_comes_twice(one: Shelf, image: Image) -> None:
    one.proxy.plan(Flip(at_byte=400_000), path=image.layers[0].digest, times=None)
    mirror = one.registry.reference(one.named("engine:1"))
    await one.install(one.request("engine:1", mirrors=(mirror,)))
    assert [done for _, done, _ in one.progress] == sorted(done for _, done, _ in one.progress)


async def test_silence_ends_the_attempt_in_time_and_leaves_nothing(registry: Registry, tmp_path: Path) -> None:
    limit = 2.0
    async with shelf(registry, tmp_path, stall_seconds=limit) as one:
        image = await one.publish("engine:1", LAYERS)
        asked: list[float] = []
        digest = image.layers[0].digest
        one.proxy.on_request = lambda request: asked.append(time.monotonic()) if digest in request.path else None
        one.proxy.plan(Stall(after_bytes=40_000), path=digest, times=CONNECTIONS)
        one.proxy.plan(Hang(), path=digest, times=None, after=CONNECTIONS)
        with pytest.raises(Upstream) as caught:
            await one.install(one.request("engine:1"))
        ended = time.monotonic()
        assert caught.value.code == "stalled"
        # What was sent was sent at once, so the last byte came right after the last of the first requests.
        assert limit <= ended - asked[CONNECTIONS - 1] <= 1.2 * limit
        assert not one.residue()
        assert not one.tree.exists()
        one.proxy.forget_plans()
        installed = await one.install(one.request("engine:1"))
        assert installed.reused_bytes == CONNECTIONS * 40_000
        assert is_right(one)


async def test_a_silent_server_gives_way_to_a_mirror(registry: Registry, tmp_path: Path) -> None:
    async with shelf(registry, tmp_path, stall_seconds=0.3) as one:
        image = await one.publish("engine:1", LAYERS)
        one.proxy.plan(Stall(after_bytes=40_000), path=image.layers[0].digest, times=None)
        one.proxy.plan(Hang(), path=image.layers[1].digest, times=None)
        mirror = one.registry.reference(one.named("engine:1"))
        await one.install(one.request("engine:1", mirrors=(mirror,)))
        assert is_right(one)


async def test_one_silent_connection_among_others_is_only_opened_again(registry: Registry, tmp_path: Path) -> None:
    async with shelf(registry, tmp_path, stall_seconds=0.4) as one:
        image = await one.publish("engine:1", LAYERS)
        one.proxy.bytes_per_second = 150_000
        one.proxy.plan(Stall(after_bytes=10_000), path=image.layers[0].digest, times=1)
        await one.install(one.request("engine:1"))
        assert is_right(one)


@pytest.mark.parametrize("phase", ["resolving", "downloading", "extracting"])
async def test_cancelling_leaves_the_old_version_and_parts_of_blobs(one: Shelf, phase: str) -> None:
    await one.publish("engine:0", [{"run.sh": launcher("zero")}])
    await one.install(one.request("engine:0"))
    before = one.assembled.trees.inode_of(DIRECTORY)
    await one.publish("engine:1", LAYERS)
    reached = asyncio.Event()

    def report(now: str, file: str, done: int, total: int) -> None:
        if now == phase and (done or phase == "resolving"):
            reached.set()

    one.proxy.bytes_per_second = 400_000 if phase == "downloading" else None
    async with asyncio.TaskGroup() as group:
        task = group.create_task(one.assembled.installer.install(one.request("engine:1"), report, nothing))
        async with asyncio.timeout(20):
            await reached.wait()
        task.cancel()
    assert task.cancelled()
    # Past the swap a cancellation is too late, and then everything is in order all the same.
    assert said_by(one.tree) in (("zero", "one") if phase == "extracting" else ("zero",))
    assert phase == "extracting" or one.assembled.trees.inode_of(DIRECTORY) == before
    assert not one.residue()
    one.proxy.bytes_per_second = None
    await one.install(one.request("engine:1"))
    assert is_right(one)


async def test_whoever_cancels_during_the_switch_finds_it_complete(one: Shelf, image: Image) -> None:
    await one.publish("engine:0", [{"run.sh": launcher("zero")}])
    await one.install(one.request("engine:0"))
    dealt_with: list[str] = []

    async with asyncio.TaskGroup() as group:

        async def swapped() -> None:
            dealt_with.append(said_by(one.tree))
            task.cancel()
            await asyncio.sleep(0)

        request = one.request("engine:1", meta="named")
        task = group.create_task(one.assembled.installer.install(request, one.report, swapped))
    assert task.cancelled()
    assert dealt_with == ["one"]
    assert is_right(one)
    assert said_by(one.assembled.trees.previous_of(DIRECTORY)) == "zero"
    assert {backend.name for backend in one.assembled.trees.list_installed()} == {"engine", "named"}


async def test_progress_counts_the_whole_image_and_ends_at_its_end(one: Shelf, image: Image) -> None:
    one.proxy.bytes_per_second = 1_500_000
    await one.install(one.request("engine:1"))
    count = len(one.progress)
    total = sum(layer.size_bytes for layer in image.layers)
    phases = [phase for phase, _, _ in one.progress]
    assert list(dict.fromkeys(phases)) == ["resolving", "downloading", "extracting"]
    assert phases == sorted(phases, key=["resolving", "downloading", "extracting"].index)
    assert [done for _, done, _ in one.progress] == sorted(done for _, done, _ in one.progress)
    assert {whole for phase, _, whole in one.progress if phase != "resolving"} == {total}
    assert one.progress[-1] == ("extracting", total, total)
    assert len({done for _, done, _ in one.progress}) >= 4
    await until(lambda: not one.residue())
    assert len(one.progress) == count


async def test_a_slow_line_is_told_of_and_kept_though_a_part_takes_long(
    one: Shelf, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", 8 * 1024 * 1024)
    one.proxy.bytes_per_second = 350_000
    async with asyncio.TaskGroup() as group:
        task = group.create_task(one.install(one.request("engine:1")))
        await until(lambda: len({done for _, done, total in one.progress if 0 < done < total}) >= 3)
        # Not only told: on disk, where a kill cannot take it.
        held = sum(map(one.assembled.blobs.held_bytes, await layers_of(one)))
        assert held > 0
        assert not task.done()
        one.proxy.bytes_per_second = None
    assert is_right(one)


async def layers_of(one: Shelf) -> tuple[Layer, ...]:
    artifact, _ = await one.assembled.suppliers.resolve(one.resolved("engine:1"))
    return artifact.layers


async def test_what_came_before_an_interruption_counts_as_done_from_the_start(one: Shelf, image: Image) -> None:
    total = sum(layer.size_bytes for layer in image.layers)
    one.proxy.plan(Answer(status=403), path=image.layers[1].digest, times=None)
    with pytest.raises(EnginehouseError):
        await one.install(one.request("engine:1"))
    sent = one.proxy.bytes_sent("blobs") - image.config.size_bytes
    one.proxy.forget_plans()
    one.again()
    one.progress.clear()
    installed = await one.install(one.request("engine:1"))
    downloading = [done for phase, done, _ in one.progress if phase == "downloading"]
    assert downloading[0] == installed.reused_bytes > 0
    assert installed.fetched_bytes + installed.reused_bytes == total
    assert installed.reused_bytes >= sent - 4 * PART_BYTES
    assert is_right(one)


async def test_an_install_that_asks_for_nothing_new_reports_nothing_more(one: Shelf, image: Image) -> None:
    await one.install(one.request("engine:1"))
    one.progress.clear()
    installed = await one.install(InstallRequest(resolved=one.resolved("engine:1"), upgrade=True))
    assert not installed.changed
    assert one.progress == [("resolving", 0, 0)]
