"""Trees that shared files while engines were confined are taken apart for a worker whose engines are not."""

from __future__ import annotations

import os
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from tests.artifact.archives import directory, file, hardlink, tar, tree_of
from tests.fetch.images import write_image
from tests.worker.shelf import launcher
from tests.worker.world import silent

from enginehouse.artifact.images import sharing as sharing_module
from enginehouse.build_worker import open_local
from enginehouse.core.backend import Resolved
from enginehouse.host import hardware
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.installer import Installed, InstallRequest
from enginehouse.worker.local import Local

LIBRARY = random.Random(3).randbytes(50_000)
LARGE = random.Random(4).randbytes(2_000_001)


@pytest.fixture(autouse=True)
def without_clones(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is links everywhere, whatever the file system of the test."""

    def refuse(made: int, source: int) -> None:
        raise OSError(95, "not here")

    monkeypatch.setattr(sharing_module, "_ficlone", refuse)


def local(place: Path, *, may_link: bool) -> AbstractAsyncContextManager[Local]:
    options = InstallerOptions(backends=place / "backends")
    return open_local(msgspec.structs.replace(options, may_link=may_link), os.environ, doing="test")


async def install(here: Local, place: Path, text: str) -> Installed:
    entries = [
        *(file("run.sh", launcher(text), 0o755), file("lib/a.so", LIBRARY), hardlink("lib/b.so", "lib/a.so")),
        *(file("large", LARGE, 0o444), directory("closed", 0o555), file("closed/c.so", LIBRARY[::-1], 0o400)),
    ]
    write_image(place / text, [tar(*entries)], platform=hardware.platform())
    resolved = Resolved(directory="engine", uri=f"ocifile://{place / text}", digest="")
    return await here.install(InstallRequest(resolved=resolved, upgrade=True), silent)


def contents(tree: Path) -> dict[bytes, tuple[str, int, str]]:
    return {path: node[:3] for path, node in tree_of(tree).items()}


async def test_trees_are_taken_apart_once_confinement_is_gone(tmp_path: Path) -> None:
    async with local(tmp_path, may_link=True) as here:
        await install(here, tmp_path, "one")
        second = await install(here, tmp_path, "two")
    assert second.sharing == "hard link"
    assert second.shared_bytes == 2 * len(LIBRARY) + len(LARGE)
    current, previous = tmp_path / "backends/engine", tmp_path / "backends/.enginehouse/previous/engine"
    assert (current / "large").samefile(previous / "large")
    before = contents(current), contents(previous)
    times = [path.lstat().st_mtime_ns for path in sorted(current.rglob("*"))]
    async with local(tmp_path, may_link=False):
        pass
    assert (contents(current), contents(previous)) == before
    assert [path.lstat().st_mtime_ns for path in sorted(current.rglob("*"))] == times
    for name in ("lib/a.so", "large", "closed/c.so"):
        assert not (current / name).samefile(previous / name)
    assert all((tree / "lib/a.so").samefile(tree / "lib/b.so") for tree in (current, previous))
    (current / "lib/a.so").write_bytes(b"written by an engine")
    assert (previous / "lib/a.so").read_bytes() == LIBRARY
    assert not list((tmp_path / "backends/.enginehouse/staging").iterdir())


async def test_two_files_of_one_tree_that_became_one_are_two_again(tmp_path: Path) -> None:
    """As earlier versions of this program left them."""
    async with local(tmp_path, may_link=True) as here:
        await install(here, tmp_path, "one")
    tree = tmp_path / "backends/engine"
    (tree / "closed/c.so").unlink()
    os.link(tree / "large", tree / "closed/c.so")
    async with local(tmp_path, may_link=False):
        pass
    assert not (tree / "large").samefile(tree / "closed/c.so")
    assert (tree / "lib/a.so").samefile(tree / "lib/b.so")


async def test_a_worker_without_confinement_looks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    walk = os.walk

    def counted(top: Path) -> object:
        looked.append(top)
        return walk(top)

    monkeypatch.setattr(os, "walk", counted)
    async with local(tmp_path, may_link=False) as here:
        await install(here, tmp_path, "one")
        assert (await install(here, tmp_path, "two")).shared_bytes == 0
    async with local(tmp_path, may_link=False):
        pass
    assert looked == []
    async with local(tmp_path, may_link=True) as here:
        await install(here, tmp_path, "three")
    async with local(tmp_path, may_link=False):
        pass
    assert len(looked) == 2  # the version in place and the one before
