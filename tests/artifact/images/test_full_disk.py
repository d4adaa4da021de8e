"""A disk that fills up while something is unpacked: told as such, given back, and nothing that works is harmed.

The backends directory is on a small file system in memory. Where that cannot be mounted these tests fail: they are
part of what is promised.
"""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.fetch.real_registry import Registry
from tests.worker.shelf import Shelf, launcher, noise, said_by, shelf, tree_of
from tests.worker.world import nothing, until

from enginehouse.artifact.images.contents import SPARE_BYTES
from enginehouse.core.errors import Unavailable
from enginehouse.host import disk

MEGABYTE = 1024 * 1024
DISK_BYTES = SPARE_BYTES + 40 * MEGABYTE


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    # With the right that set-up needed to install the tools.
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={DISK_BYTES},mode=755,uid={os.geteuid()}"
    subprocess.run([*as_root, "mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run([*as_root, "umount", "--lazy", place], check=True)


@pytest.fixture
async def small(registry: Registry, tmp_path: Path, small_disk: Path) -> AsyncIterator[Shelf]:
    """A directory on the small disk with one version installed, and a larger one to be had."""
    async with shelf(registry, tmp_path, backends=small_disk / "backends") as made:
        await made.publish("engine:1", [{"run.sh": launcher("one"), "a": noise(500_000, 1)}])
        files = {f"lib/{number}.so": noise(MEGABYTE, 10 + number) for number in range(14)}
        await made.publish("engine:2", [files | {"run.sh": launcher("two")}], compression="none")
        await made.install(made.request("engine:1"))
        yield made


def fill(place: Path) -> Path:
    """Another program that takes all the rest."""
    filler = place / "filler"
    with filler.open("wb") as file:
        for _ in range(1000):
            try:
                os.posix_fallocate(file.fileno(), 0, disk.free_bytes(place))
            except OSError as error:  # the install took some of it since the look
                if error.errno != errno.ENOSPC:
                    raise
            else:
                return filler
    raise AssertionError("the disk was never full")


async def test_a_disk_that_fills_up_during_an_install_harms_nothing(small: Shelf, small_disk: Path) -> None:
    """F-108."""
    before, free = tree_of(small.tree), disk.free_bytes(small_disk)
    small.proxy.bytes_per_second = 4 * MEGABYTE

    async def refused() -> str:
        with pytest.raises(Unavailable) as caught:
            await small.install(small.request("engine:2"))
        return caught.value.code

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        task = group.create_task(refused())
        await until(lambda: (small.worker / "staging" / "engine" / "lib" / "3.so").exists())
        filler = fill(small_disk)
        small.proxy.bytes_per_second = None
    assert task.result() == "insufficient_disk"
    assert not small.residue()
    assert tree_of(small.tree) == before
    assert said_by(small.tree) == "one"
    filler.unlink()
    blobs = sum(path.stat().st_blocks * 512 for path in (small.worker / "blobs").iterdir())
    # All but the parts of blobs that need not be fetched again.
    assert disk.free_bytes(small_disk) >= free - blobs - MEGABYTE
    installed = await small.install(small.request("engine:2"))
    assert said_by(small.tree) == "two"
    assert installed.reused_bytes > 0
    assert said_by(small.assembled.trees.previous_of("engine")) == "one"


async def test_a_disk_without_room_even_for_a_record_is_told_as_such(small: Shelf, small_disk: Path) -> None:
    before = tree_of(small.tree)
    filler = fill(small_disk)
    for _ in range(2):
        with pytest.raises(Unavailable) as caught:
            await small.install(small.request("engine:2"))
        assert caught.value.code == "insufficient_disk"
    assert tree_of(small.tree) == before
    assert not small.residue()
    filler.unlink()
    small.again()
    await small.install(small.request("engine:2"))
    assert said_by(small.tree) == "two"


async def test_a_disk_that_is_full_when_the_tree_is_put_in_place_keeps_the_old_version(
    small: Shelf, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree_of(small.tree)
    real, fillers = small.assembled.trees.reach, list[Path]()

    def reach(directory: str, step: str) -> None:
        real(directory, step)  # type: ignore[arg-type]
        if step == "verified" and not fillers:
            fillers.append(fill(small_disk))

    monkeypatch.setattr(small.assembled.trees, "reach", reach)
    with pytest.raises(Unavailable) as caught:
        await small.assembled.installer.install(small.request("engine:2"), small.report, nothing)
    assert caught.value.code == "insufficient_disk"
    assert tree_of(small.tree) == before
    fillers[0].unlink()
    assert not small.residue()
    await small.install(small.request("engine:2"))
    assert said_by(small.tree) == "two"


async def test_a_disk_that_is_full_after_the_swap_gets_the_old_version_back(small: Shelf, small_disk: Path) -> None:
    await small.publish("engine:1", [{"run.sh": launcher("one"), "a": noise(500_000, 2)}])
    await small.install(small.request("engine:1", meta="named", version="1"))
    before, pointer = tree_of(small.tree), small.assembled.trees.pointers.known("named")
    seen, fillers = list[str](), list[Path]()

    async def swapped() -> None:
        seen.append(said_by(small.tree))
        fillers.append(fill(small_disk))

    with pytest.raises(Unavailable) as caught:
        await small.assembled.installer.install(
            small.request("engine:2", meta="named", version="2"), small.report, swapped
        )
    assert caught.value.code == "insufficient_disk"
    assert seen == ["two"]
    assert tree_of(small.tree) == before
    assert said_by(small.assembled.trees.previous_of("engine")) == "one"
    assert small.assembled.trees.pointers.known("named") == pointer
    assert not small.residue()
    fillers[0].unlink()
    await small.install(small.request("engine:2", meta="named", version="2"))
    assert said_by(small.tree) == "two"


async def test_what_cannot_fit_is_refused_before_a_byte_is_fetched(small: Shelf) -> None:
    files = {"run.sh": launcher("three"), "large": noise(25 * MEGABYTE, 3)}
    image = await small.publish("engine:3", [files], compression="none")
    with pytest.raises(Unavailable, match=r"needs \d+ MiB, \d+ MiB free") as caught:
        await small.install(small.request("engine:3"))
    assert caught.value.code == "insufficient_disk"
    assert not small.proxy.asked(image.layers[0].digest)
    assert said_by(small.tree) == "one"
