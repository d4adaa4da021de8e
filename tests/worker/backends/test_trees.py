"""Versions of a backend: upgraded, rolled back, deleted, listed and repaired; LocalAI's directories too."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
from tests.fetch.images import digest_of, tar_of, write_image, write_index
from tests.worker.shelf import (
    DIRECTORY,
    Shelf,
    Tree,
    five_layers,
    launcher,
    listed,
    noise,
    said_by,
    tree_of,
    write_backend,
    write_metadata,
)
from tests.worker.world import nothing

from enginehouse.build_worker import open_local
from enginehouse.core.errors import Invalid, NotFound
from enginehouse.host import disk, hardware


async def test_a_forced_install_makes_the_tree_anew_without_fetching_a_byte(one: Shelf) -> None:
    image = await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1"))
    before = one.assembled.trees.inode_of(DIRECTORY)
    one.again()
    installed = await one.install(one.request("engine:1", force=True))
    assert (installed.fetched_bytes, installed.reused_bytes) == (0, sum(layer.size_bytes for layer in image.layers))
    assert one.assembled.trees.inode_of(DIRECTORY) != before
    for layer in image.layers:
        assert one.proxy.bytes_sent(layer.digest) == layer.size_bytes
    assert said_by(one.tree) == "one"


async def test_an_upgrade_of_one_layer_of_five_fetches_that_layer(one: Shelf) -> None:
    await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1"))
    sent = one.proxy.bytes_sent()
    image = await one.publish("engine:2", five_layers(changed=2))
    installed = await one.install(one.request("engine:2"))
    changed = image.layers[2].size_bytes
    assert installed.fetched_bytes == changed
    documents = len(image.document) + image.config.size_bytes
    assert one.proxy.bytes_sent() - sent - documents <= 1.01 * changed
    assert (one.tree / "lib" / "2.so").read_bytes() == noise(60_000, 102)


async def test_two_versions_share_the_files_they_have_in_common(one: Shelf) -> None:
    def whole(changed: int) -> dict[str, bytes]:
        return {name: content for layer in five_layers(changed) for name, content in layer.items()}

    await one.publish("engine:1", [whole(-1)])
    await one.publish("engine:2", [whole(2)])
    await one.install(one.request("engine:1"))
    installed = await one.install(one.request("engine:2"))
    assert installed.shared_bytes == 4 * 60_000
    assert installed.written_bytes == 60_000 + len(launcher("one"))
    assert tree_of(one.assembled.trees.previous_of(DIRECTORY))["lib/2.so"][1] == noise(60_000, 2)


async def test_the_same_tag_is_upgraded_when_it_has_moved_and_only_then(one: Shelf) -> None:
    await one.publish("engine:latest", five_layers())
    await one.install(one.request("engine:latest"))
    assert not (await one.install(one.request("engine:latest"))).changed
    image = await one.publish("engine:latest", five_layers(text="two"))
    # An install that is no upgrade is content with what is there.
    assert not (await one.install(one.request("engine:latest", upgrade=False))).changed
    assert said_by(one.tree) == "one"
    installed = await one.install(one.request("engine:latest"))
    assert (installed.changed, installed.digest) == (True, image.digest)
    assert said_by(one.tree) == "two"


async def test_an_install_that_keeps_what_is_there_brings_another_version_only_where_there_is_none(one: Shelf) -> None:
    await one.publish("engine:latest", five_layers())
    await one.install(one.request("engine:latest"))
    image = await one.publish("engine:latest", five_layers(text="two"))
    exact = one.request("engine:latest", upgrade=False, digest=image.digest, meta="the-engine", version="2")
    newest = msgspec.structs.replace(exact, keep=True)
    assert not (await one.install(newest)).changed
    assert said_by(one.tree) == "one"
    pointer = one.assembled.trees.pointers.known("the-engine")
    assert pointer is not None
    assert (pointer.meta_backend_for, pointer.version) == (DIRECTORY, ""), "of what is there"
    await one.assembled.installer.remove(DIRECTORY)
    assert (await one.install(newest)).digest == image.digest
    assert said_by(one.tree) == "two"


async def test_an_index_rebuilt_for_another_machine_is_no_upgrade(one: Shelf) -> None:
    place = one.directory / "images" / "index"
    mine = write_image(place, five_layers(), platform=hardware.platform())
    for text in ("first", "second"):
        other = write_image(place, [{"run.sh": launcher(text)}], platform="linux/s390x")
        index = write_index(place, [other, mine])
        await one.registry.push(place, one.named("engine:latest"))
        installed = await one.install(one.request("engine:latest"))
        assert installed.changed == (text == "first")
        assert installed.digest == mine.digest
        assert one.metadata().index_digest == index.digest


async def test_an_archive_with_another_sha256_is_another_version(one: Shelf) -> None:
    uri = f"{one.proxy.url}/engine.tar"
    for text in ("one", "two"):
        tar = tar_of({"run.sh": launcher(text)})
        one.proxy.files["/engine.tar"] = tar
        request = one.request("", upgrade=False, uri=uri, sha256=digest_of(tar).removeprefix("sha256:"))
        assert (await one.install(request)).changed
        assert not (await one.install(request)).changed
        assert said_by(one.tree) == text


async def test_a_local_directory_is_installed_again_when_anything_in_it_changed(one: Shelf) -> None:
    source = one.directory / "source"
    write_backend(source, "one")
    request = one.request("", uri=str(source))
    first = await one.install(request)
    (source / "lib").mkdir()
    second = await one.install(request)
    assert first.digest != second.digest
    assert said_by(one.tree) == "one"
    assert (one.tree / "lib").is_dir()


async def two_versions(one: Shelf) -> tuple[Tree, Tree]:
    trees = []
    for number, text in enumerate(("one", "two")):
        await one.publish(f"engine:{number}", five_layers(text=text))
        await one.install(one.request(f"engine:{number}", meta="named", version=text))
        trees.append(tree_of(one.tree))
    return trees[0], trees[1]


@pytest.mark.parametrize("can_exchange", [True, False])
async def test_rolling_back_needs_no_network_and_can_be_undone(
    one: Shelf, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    old, new = await two_versions(one)
    requests = len(one.proxy.requests)
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda first, second: False)
    one.again()
    for tree, text in ((old, "one"), (new, "two"), (old, "one")):
        began = time.monotonic()
        metadata = await one.assembled.installer.roll_back(DIRECTORY, nothing)
        assert time.monotonic() - began < 1
        assert (tree_of(one.tree), said_by(one.tree), metadata.version) == (tree, text, text)
        assert one.metadata() == metadata
    assert len(one.proxy.requests) == requests
    assert not one.residue()
    lines = await listed(one)
    assert (lines[DIRECTORY].version, lines[DIRECTORY].previous_version) == ("one", "two")
    assert lines["named"].leads_to == DIRECTORY


async def test_an_install_of_the_previous_version_swaps_it_back_without_a_byte(one: Shelf) -> None:
    first = await one.publish("engine:1", five_layers(text="one"))
    await one.install(one.request("engine:1"))
    second = await one.publish("engine:2", five_layers(0, text="two"))
    await one.install(one.request("engine:2"))
    inode = os.stat(one.worker / "previous" / DIRECTORY).st_ino
    asked = len(one.proxy.asked(""))
    for number, (image, text) in enumerate(((first, "one"), (second, "two"), (first, "one"))):
        swapped: list[str] = []

        async def note(text: str = text, swapped: list[str] = swapped) -> None:
            swapped.append(said_by(one.tree))

        request = one.request("engine:1", digest=image.digest, meta="named")
        request = msgspec.structs.replace(request, generation=number + 5)
        installed = await one.assembled.installer.install(request, one.report, note)
        assert (installed.digest, installed.changed, installed.fetched_bytes) == (image.digest, True, 0)
        assert swapped == [text], "after the swap, so that the caller can stop what is old"
        assert (one.metadata().digest, one.metadata().generation) == (image.digest, number + 5)
        listed = {backend.name: backend for backend in one.assembled.trees.list_installed()}
        assert listed["named"].meta_backend_for == DIRECTORY
        replaced = second if image is first else first
        assert listed[DIRECTORY].previous_digest == replaced.digest, "a frontend can ask for it"
        assert listed["named"].previous_digest == ""
        assert not one.residue()
    assert os.stat(one.tree).st_ino == inode, "the very same tree"
    assert len(one.proxy.asked("")) == asked, "nobody was asked"
    again = await one.install(one.request("engine:2", digest=second.digest, force=True))
    assert again.written_bytes + again.shared_bytes > 0, "a forced install builds the tree anew"


async def test_a_backend_without_a_previous_version_cannot_be_rolled_back(one: Shelf) -> None:
    await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1"))
    with pytest.raises(NotFound, match="no previous version"):
        await one.assembled.installer.roll_back(DIRECTORY, nothing)
    assert said_by(one.tree) == "one"


async def test_deleting_takes_the_pointers_and_the_previous_version_along(one: Shelf) -> None:
    await two_versions(one)
    write_metadata(one.backends / "lab@mock", name="lab@mock", meta_backend_for=DIRECTORY)
    async with open_local(one.options, os.environ, doing="delete") as local:
        assert await local.delete("lab@mock") == DIRECTORY
        assert local.list_backends() == []
        with pytest.raises(NotFound):
            await local.delete("named")
    assert [path.name for path in one.backends.iterdir()] == [".enginehouse"]
    assert not list((one.worker / "previous").iterdir())
    assert not list((one.worker / "state").iterdir())


async def test_a_pointer_that_leads_nowhere_is_broken_and_can_be_deleted(one: Shelf) -> None:
    write_metadata(one.backends / "named", name="named", meta_backend_for="gone")
    assert (await listed(one))["named"].kind == "broken"
    async with open_local(one.options, os.environ, doing="delete") as local:
        await local.delete("named")
        assert local.list_backends() == []


async def test_backends_of_the_system_are_listed_and_never_deleted(one: Shelf) -> None:
    system = one.directory / "system"
    write_backend(system / "engine", "system")
    write_backend(system / "other", "system")
    (system / "empty").mkdir()
    one.options = msgspec.structs.replace(one.options, system=system)
    assert {name: line.kind for name, line in (await listed(one)).items()} == {"engine": "system", "other": "system"}
    one.again(system=system)
    await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1"))
    assert {name: line.kind for name, line in (await listed(one)).items()} == {"engine": "installed", "other": "system"}
    with pytest.raises(Invalid, match="belongs to the system"):
        await one.assembled.installer.remove("other")
    await one.assembled.installer.remove("engine")
    assert {name: line.kind for name, line in (await listed(one)).items()} == {"engine": "system", "other": "system"}
    assert said_by(system / "engine") == "system"


def _empty_launcher(tree: Path) -> None:
    (tree / "run.sh").write_bytes(b"")


def _closed_launcher(tree: Path) -> None:
    (tree / "run.sh").chmod(0)


def _no_launcher(tree: Path) -> None:
    (tree / "run.sh").unlink()


def _directory_as_launcher(tree: Path) -> None:
    (tree / "run.sh").unlink()
    (tree / "run.sh").mkdir()


@pytest.mark.parametrize("spoil", [_empty_launcher, _closed_launcher, _no_launcher, _directory_as_launcher])
async def test_a_backend_that_cannot_be_started_is_broken_until_it_is_installed(one: Shelf, spoil: object) -> None:
    await one.publish("engine:0", five_layers(text="older"))
    await one.install(one.request("engine:0"))
    await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1", meta="named"))
    assert callable(spoil)
    spoil(one.tree)
    assert {name: line.kind for name, line in (await listed(one)).items()} == {"engine": "broken", "named": "broken"}
    installed = await one.install(one.request("engine:1", upgrade=False))
    assert (installed.changed, installed.fetched_bytes) == (True, 0)
    assert {name: line.kind for name, line in (await listed(one)).items()} == {"engine": "installed", "named": "meta"}
    assert said_by(one.tree) == "one"
    # What could not be started is worth less than the version before it.
    assert said_by(one.assembled.trees.previous_of(DIRECTORY)) == "older"
    assert not one.residue()


async def test_an_install_finishes_what_an_earlier_one_left_beside(one: Shelf) -> None:
    old, _ = await two_versions(one)

    async def fails() -> None:
        raise OSError("the process could not be stopped")

    await one.publish("engine:2", five_layers(text="three"))
    with pytest.raises(Exception, match="could not be stopped"):
        await one.assembled.installer.install(one.request("engine:2"), one.report, fails)
    assert said_by(one.tree) == "three"
    assert said_by(one.assembled.trees.previous_of(DIRECTORY)) == "two"
    assert not one.residue()
    shutil.rmtree(one.tree)
    await one.install(one.request("engine:0"))
    assert tree_of(one.tree) == old
