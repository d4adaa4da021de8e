"""Directories that their owner may not enter, list or change, as images have them: everything still works for a worker
that is a plain user, whom modes bind. Root runs these tests as another user.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from tests.artifact.archives import directory, file, tar
from tests.fetch.images import write_image
from tests.worker.shelf import launcher
from tests.worker.world import silent

from enginehouse.build_worker import open_local
from enginehouse.core.backend import Resolved
from enginehouse.core.errors import EnginehouseError
from enginehouse.host import disk, hardware
from enginehouse.worker.backends.installation import InstallerOptions
from enginehouse.worker.backends.installer import InstallRequest
from enginehouse.worker.local import Local

NOBODY = 65534
CLOSED = (0o000, 0o111, 0o222, 0o333, 0o444, 0o555)


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Path]:
    """A directory of a plain user, who this process is meanwhile."""
    if os.geteuid() != 0:
        yield tmp_path
        disk.remove_tree(tmp_path / "backends")
        return
    place = Path(tempfile.mkdtemp(prefix="enginehouse-"))  # root's own temporary directories are closed to others
    os.chown(place, NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield place
    finally:
        os.seteuid(0)
        os.setegid(0)
        shutil.rmtree(place)


def image(place: Path, text: str) -> str:
    entries = [file("run.sh", launcher(text), 0o755), file("closed-file", b"x" * 5000, 0)]
    for mode in CLOSED:
        entries += [
            directory(f"d{mode:o}", mode),
            file(f"d{mode:o}/deep/f", b"y" * 2000),
            directory(f"d{mode:o}/e", mode),
        ]
    write_image(place, [tar(*entries)], platform=hardware.platform())
    return f"ocifile://{place}"


def local(place: Path) -> AbstractAsyncContextManager[Local]:
    return open_local(InstallerOptions(backends=place / "backends"), os.environ, doing="test")


def request(uri: str, name: str = "odd") -> InstallRequest:
    return InstallRequest(resolved=Resolved(directory=name, uri=uri, digest=""), upgrade=True)


async def test_versions_with_closed_directories_come_and_go(plain: Path) -> None:
    first, second = image(plain / "one", "one"), image(plain / "two", "two")
    async with local(plain) as here:
        await here.install(request(first), silent)
        await here.install(request(second), silent)
        await here.install(request(first), silent)  # which removes the first of the three
        await here.roll_back("odd")
        assert [one.name for one in here.list_backends()] == ["odd"]
        assert (await here.plan(request(first).resolved)).tree_bytes > 0
        await here.delete("odd")
        await here.collect(0)
    assert not [path for path in (plain / "backends").rglob("*") if "closed-file" in path.name]
    assert not list((plain / "backends/.enginehouse/staging").iterdir())


async def test_modes_of_directories_are_kept(plain: Path) -> None:
    async with local(plain) as here:
        await here.install(request(image(plain / "one", "one")), silent)
    modes = [stat.S_IMODE((plain / "backends/odd" / f"d{mode:o}").stat().st_mode) for mode in CLOSED]
    assert modes == list(CLOSED)


async def test_a_killed_install_with_closed_directories_is_cleaned_up_at_the_next_start(plain: Path) -> None:
    left = plain / "backends/.enginehouse/staging/odd"
    (left / "closed/e").mkdir(parents=True)
    (left / "closed").chmod(0)
    async with local(plain) as here:
        assert not left.exists()
        await here.install(request(image(plain / "one", "one")), silent)
        assert here.metadata_of("odd") is not None


async def test_what_cannot_be_removed_stops_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file of another user in a tree, for example: a leftover, not a reason to do nothing at all."""
    stuck = tmp_path / "backends/.enginehouse/staging/stuck"
    stuck.mkdir(parents=True)
    remove = disk.remove_tree

    def refusing(path: Path) -> None:
        if path == stuck:
            raise PermissionError(13, "Permission denied", str(path / "f"))
        remove(path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(disk, "remove_tree", refusing)
        async with local(tmp_path) as here:
            await here.install(request(image(tmp_path / "one", "one")), silent)
            with pytest.raises(EnginehouseError, match="cannot install stuck: Permission denied"):
                await here.install(request(image(tmp_path / "one", "one"), "stuck"), silent)
    assert "staging/stuck" in caplog.text


def test_a_link_in_a_tree_that_is_removed_opens_nothing_outside(plain: Path) -> None:
    (plain / "outside").mkdir(mode=0o500)
    (plain / "tree/closed").mkdir(parents=True)
    (plain / "tree/closed/link").symlink_to(plain / "outside")
    (plain / "tree/closed").chmod(0)
    (plain / "tree").chmod(0o500)
    disk.remove_tree(plain / "tree")
    assert os.listdir(plain) == ["outside"]
    assert stat.S_IMODE((plain / "outside").stat().st_mode) == 0o500


def test_a_tree_with_closed_directories_is_synced_file_by_file(plain: Path) -> None:
    (plain / "tree/closed").mkdir(parents=True)
    (plain / "tree/file").write_text("x")
    (plain / "tree/file").chmod(0)
    (plain / "tree/closed").chmod(0)
    disk.sync_tree(plain / "tree")
    disk.remove_tree(plain / "tree")
