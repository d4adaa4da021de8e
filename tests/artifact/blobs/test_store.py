"""Blobs on disk: fetched once, resumed where they broke, found out when damaged, collected when nobody needs them."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from tests.fetch.faults import Answer, Hang
from tests.fetch.images import Image
from tests.worker.shelf import DIRECTORY, Shelf, launcher, noise, said_by
from tests.worker.world import nothing, until

from enginehouse.artifact.blobs import partial
from enginehouse.artifact.blobs.partial import Partial, journal_of
from enginehouse.artifact.blobs.store import STILL_SECONDS, BlobStore
from enginehouse.artifact.images.contents import SPARE_BYTES
from enginehouse.core.artifact import Layer
from enginehouse.core.errors import EnginehouseError, Hopeless, Unavailable
from enginehouse.host import disk

PART_BYTES = 64 * 1024


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART_BYTES", PART_BYTES)


def layer_of(number: int, size_bytes: int) -> Layer:
    return Layer(digest=f"sha256:{number:064x}", size_bytes=size_bytes, compression="none")


def _flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


async def test_those_who_want_the_same_blobs_take_turns_and_never_wait_crosswise(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path / "blobs")
    layers = [layer_of(number, 10) for number in range(4)]
    inside = 0

    async def work(wanted: list[Layer]) -> None:
        nonlocal inside
        async with blobs.use(wanted):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for turn in range(20):
            group.create_task(work(layers if turn % 2 else layers[::-1]))


@pytest.mark.parametrize("digest", ["sha512:" + "0" * 128, "sha256:../../x", "", "sha256:" + "A" * 64])
def test_a_digest_that_is_none_never_becomes_a_path(tmp_path: Path, digest: str) -> None:
    with pytest.raises(Hopeless):
        BlobStore(tmp_path).path_of(digest)


async def test_collecting_takes_the_oldest_first_and_stops_at_the_cap(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    layers = [layer_of(number, 8192) for number in range(5)]
    for age, layer in enumerate(layers):
        blobs.path_of(layer.digest).write_bytes(b"x" * 8192)
        os.utime(blobs.path_of(layer.digest), (1000 + age, 1000 + age))
    stray = tmp_path / ("f" * 64 + ".part.journal")
    stray.write_bytes(b"")
    async with blobs.use([layers[1]]):
        told = blobs.collect([layers[0].digest], 3 * 8192)
        assert [blobs.has(layer) for layer in layers] == [True, True, False, False, True]
        assert (told.removed, told.freed_bytes, told.kept_bytes) == (2, 2 * 8192, 3 * 8192)
        assert blobs.collect([layers[0].digest], 0).removed == 1
    assert [blobs.has(layer) for layer in layers] == [True, True, False, False, False]
    assert blobs.collect((), 0).kept_bytes == 0
    assert not list(tmp_path.iterdir())


async def test_room_is_made_of_what_is_least_needed(tmp_path: Path) -> None:
    blobs = BlobStore(tmp_path)
    own, installed, *cached = [layer_of(number, 8192) for number in range(4)]
    for layer in (own, installed, *cached):
        blobs.path_of(layer.digest).write_bytes(b"x" * 8192)
    requests = ({own.digest, installed.digest}, {own.digest})
    blobs.make_room(8192, requests)
    assert sum(blobs.has(layer) for layer in cached) == 1
    blobs.make_room(2 * 8192, requests)
    assert [blobs.has(layer) for layer in (own, installed, *cached)] == [True, False, False, False]
    blobs.make_room(8192, requests)
    assert blobs.has(own)


FILES = {"run.sh": launcher("one"), "lib/a.so": noise(300_000, 1)}


async def test_ten_installs_at_once_fetch_a_blob_once(one: Shelf) -> None:
    image = await one.publish("engine:1", [FILES])
    one.proxy.bytes_per_second = 2_000_000
    async with asyncio.TaskGroup() as group:
        for number in range(10):
            request = one.request("engine:1", directory=f"engine-{number}")
            group.create_task(one.assembled.installer.install(request, one.report, nothing))
    assert one.proxy.bytes_sent(image.layers[0].digest) == image.layers[0].size_bytes
    assert {said_by(one.backends / f"engine-{number}") for number in range(10)} == {"one"}
    assert not one.residue()


async def test_an_image_whose_registry_hangs_holds_up_no_other_that_shares_a_layer_with_it(one: Shelf) -> None:
    stuck = await one.publish("stuck:1", [{"lib/a.so": noise(50_000, 7)}, FILES])
    await one.publish("engine:1", [{"lib/b.so": noise(50_000, 8)}, FILES])
    one.proxy.plan(Hang(), path=stuck.layers[0].digest, times=None)
    installer = one.assembled.installer
    async with asyncio.TaskGroup() as group:
        request = one.request("stuck:1", directory="stuck")
        hanging = group.create_task(installer.install(request, one.report, nothing))
        await until(lambda: bool(one.proxy.asked(stuck.layers[0].digest)))
        began = asyncio.get_running_loop().time()
        async with asyncio.timeout(10):
            await one.install(one.request("engine:1"))
        assert asyncio.get_running_loop().time() - began < STILL_SECONDS + 1.5
        assert said_by(one.tree) == "one"
        assert not hanging.done()
        hanging.cancel()
    resumable = {layer.digest.removeprefix("sha256:") + ".part" for layer in stuck.layers}
    assert set(one.blobs(".part")) <= resumable, "nothing is left beside"
    one.proxy.forget_plans()
    await installer.install(one.request("stuck:1", directory="stuck"), one.report, nothing)
    assert said_by(one.backends / "stuck") == "one"


@pytest.mark.parametrize("at", [0, 200_000])
async def test_a_damaged_blob_is_found_and_fetched_anew(one: Shelf, at: int) -> None:
    image = await one.publish("engine:1", [FILES])
    await one.install(one.request("engine:1"))
    _flip(one.assembled.blobs.path_of(image.layers[0].digest), at)
    one.again()
    await one.install(one.request("engine:1", force=True))
    assert (one.tree / "lib" / "a.so").read_bytes() == FILES["lib/a.so"]
    assert one.proxy.bytes_sent(image.layers[0].digest) == 2 * image.layers[0].size_bytes
    assert not one.residue()


async def test_a_damaged_part_of_a_blob_costs_that_blob(one: Shelf) -> None:
    image = await interrupted(one)
    digest = image.layers[0].digest
    # With a journal that fits: found by the digest of the whole, not by the checksum.
    damaged = Partial(one.assembled.blobs.partial_of(digest), image.layers[0].size_bytes)
    wrong = Partial(one.directory / "wrong.part", image.layers[0].size_bytes)
    wrong.write(0, [noise(PART_BYTES, 77)])
    damaged.close()
    wrong.close()
    content = bytearray(damaged.path.read_bytes())
    content[:PART_BYTES] = wrong.path.read_bytes()[:PART_BYTES]
    damaged.path.write_bytes(content)
    records = bytearray(journal_of(damaged.path).read_bytes())
    records[:12] = journal_of(wrong.path).read_bytes()[:12]
    journal_of(damaged.path).write_bytes(records)
    await one.install(one.request("engine:1"))
    assert (one.tree / "lib" / "a.so").read_bytes() == FILES["lib/a.so"]
    # Nobody can tell which byte was wrong: what was missing came, and then the whole blob once more.
    assert one.proxy.bytes_sent(digest) <= 3 * image.layers[0].size_bytes


async def interrupted(one: Shelf) -> Image:
    """An image of which the registry refused everything after the first requests."""
    image = await one.publish("engine:1", [FILES])
    one.proxy.plan(Answer(status=404), path=image.layers[0].digest, times=None, after=4)
    with pytest.raises(EnginehouseError):
        await one.install(one.request("engine:1"))
    one.proxy.forget_plans()
    assert one.blobs(".part")
    one.again()
    return image


async def test_an_interrupted_fetch_goes_on_where_it_was(one: Shelf) -> None:
    image = await interrupted(one)
    installed = await one.install(one.request("engine:1"))
    assert installed.reused_bytes > 0
    assert one.proxy.bytes_sent(image.layers[0].digest) <= image.layers[0].size_bytes + 4 * PART_BYTES
    assert said_by(one.tree) == "one"
    assert not one.blobs(".part")
    assert not one.blobs(".journal")


async def test_collecting_during_a_fetch_takes_nothing_that_is_being_fetched(one: Shelf) -> None:
    image = await one.publish("engine:1", [FILES])
    one.proxy.bytes_per_second = 300_000
    async with asyncio.TaskGroup() as group:
        task = group.create_task(one.install(one.request("engine:1")))
        await until(lambda: any(0 < done < total for _, done, total in one.progress))
        one.assembled.installer.collect(0)
        one.proxy.bytes_per_second = None
    assert task.result().fetched_bytes == image.layers[0].size_bytes == one.proxy.bytes_sent(image.layers[0].digest)
    assert said_by(one.tree) == "one"


async def test_collecting_keeps_what_is_installed_and_its_previous_version(one: Shelf) -> None:
    images = [
        await one.publish(f"engine:{number}", [{"run.sh": launcher(str(number)), "a": noise(9000, number)}])
        for number in range(4)
    ]
    for number in range(3):
        await one.install(one.request(f"engine:{number}"))
    await one.install(one.request("engine:3", directory="gone"))
    await one.assembled.installer.remove("gone")
    one.again()
    told = one.assembled.installer.collect(0)
    held = [one.assembled.blobs.path_of(image.layers[0].digest).exists() for image in images]
    assert held == [False, True, True, False]
    assert told.removed == 2
    await one.assembled.installer.roll_back(DIRECTORY, nothing)
    one.assembled.installer.collect(0)
    sent = one.proxy.bytes_sent("blobs")
    installed = await one.install(one.request("engine:2"))
    assert (installed.fetched_bytes, one.proxy.bytes_sent("blobs") - sent) == (0, images[2].config.size_bytes)


async def test_the_cap_holds_after_every_install(one: Shelf) -> None:
    one.again(cap_bytes=0)
    for number in range(4):
        await one.publish(f"engine:{number}", [{"run.sh": launcher(str(number)), "a": noise(9000, number)}])
        await one.install(one.request(f"engine:{number}"))
        assert len(one.blobs()) <= 2


async def test_a_full_disk_takes_back_cached_blobs_before_it_refuses(
    one: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = await one.publish("engine:1", [FILES])
    await one.publish("engine:2", [{"run.sh": launcher("two"), "lib/b.so": noise(200_000, 3)}])
    await one.install(one.request("engine:1"))
    needed = 2 * 200_000
    blob = one.assembled.blobs.path_of(image.layers[0].digest)

    def free(path: Path) -> int:
        return SPARE_BYTES + needed - 100_000 + (0 if blob.exists() else 300_000)

    monkeypatch.setattr(disk, "free_bytes", free)
    await one.install(one.request("engine:2", directory="other"))
    assert not blob.exists()
    monkeypatch.setattr(disk, "free_bytes", lambda path: SPARE_BYTES)
    with pytest.raises(Unavailable) as caught:
        await one.install(one.request("engine:1", directory="third"))
    assert caught.value.code == "insufficient_disk"
    assert said_by(one.tree) == "one"
