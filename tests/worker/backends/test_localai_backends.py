"""Directories that LocalAI made, and ours as LocalAI sees them."""

from __future__ import annotations

import json
import os

import pytest
from tests.fetch.images import Image, write_index
from tests.worker.shelf import DIRECTORY, Shelf, five_layers, launcher, listed, said_by, write_backend, write_metadata

from enginehouse.build_worker import open_local
from enginehouse.core.installation import METADATA_FILE
from enginehouse.host import disk
from enginehouse.worker.local import resolved_from


async def test_the_digest_of_an_index_in_metadata_of_localai_is_understood(one: Shelf) -> None:
    image = await one.publish("engine:1", five_layers())
    index = write_index(image.directory, [image])
    await one.registry.push(image.directory, one.named("engine:1"))
    write_backend(one.tree, "theirs", name=DIRECTORY, uri=one.resolved("engine:1").uri, digest=index.digest)
    assert (await one.plan("engine:1")).is_current
    installed = await one.install(one.request("engine:1"))
    assert not installed.changed
    assert said_by(one.tree) == "theirs"
    # From now on by the machine's own digest, so that a rebuild for others is no upgrade.
    assert installed.digest == one.metadata().digest == image.digest
    assert one.metadata().index_digest == index.digest


async def make_localai_directory(one: Shelf) -> Image:
    """What a LocalAI worker may leave: builds of every age, and an install that was cut off."""
    image = await one.publish("engine:1", five_layers(text="ours"))
    uri = one.resolved("engine:1").uri
    write_backend(one.tree, "theirs", name=DIRECTORY, alias="llama", uri=uri, digest="sha256:" + "0" * 64)
    write_backend(one.backends / "bare", "bare")
    (one.backends / "flat").write_bytes(launcher("flat"))
    write_backend(one.backends / "half.install-tmp", "half")
    write_backend(one.backends / "saved.install-backup", "saved", name="saved")
    write_backend(one.backends / "engine.backup", "older", name=DIRECTORY)
    write_metadata(one.backends / "lab@mock", name="lab@mock", meta_backend_for=DIRECTORY, installed_at="2026-01-01")
    return image


async def test_a_directory_of_localai_is_listed_and_taken_over(one: Shelf) -> None:
    await make_localai_directory(one)
    one.again()
    lines = await listed(one)
    kinds = {name: line.kind for name, line in lines.items()}
    assert kinds == {"bare": "installed", "engine": "installed", "lab@mock": "meta", "saved": "installed"}
    assert lines["lab@mock"].leads_to == DIRECTORY
    assert said_by(one.backends / "saved") == "saved"
    assert sorted(path.name for path in one.backends.iterdir()) == [
        ".enginehouse", "bare", "engine", "flat", "lab@mock", "saved",
    ]  # fmt: skip


async def test_backends_of_localai_are_upgraded_and_can_be_rolled_back(one: Shelf) -> None:
    image = await make_localai_directory(one)
    async with open_local(one.options, os.environ, doing="upgrade") as local:
        directory = local.directory_of("lab@mock")
        metadata = local.metadata_of(directory)
        assert metadata is not None
        installed = await local.upgrade(resolved_from(metadata, directory), one.report)
        assert (installed.changed, installed.digest) == (True, image.digest)
        assert said_by(one.tree) == "ours"
        assert one.metadata().alias == "llama"
        await local.roll_back("lab@mock")
        assert said_by(one.tree) == "theirs"
    assert not one.residue()


@pytest.mark.parametrize("name", ["bare", "flat"])
@pytest.mark.parametrize("can_exchange", [True, False])
async def test_what_has_no_metadata_or_is_only_a_file_gives_way_to_an_install(
    one: Shelf, monkeypatch: pytest.MonkeyPatch, name: str, can_exchange: bool
) -> None:
    await make_localai_directory(one)
    if not can_exchange:
        monkeypatch.setattr(disk, "exchange", lambda first, second: False)
    one.again()
    await one.install(one.request("engine:1", directory=name, upgrade=False))
    assert said_by(one.backends / name) == "ours"
    assert one.assembled.trees.previous_of(name).exists() == (name == "bare")
    assert not one.residue()


async def test_a_link_where_a_backend_should_be_is_replaced_and_not_followed(one: Shelf) -> None:
    elsewhere = one.directory / "elsewhere"
    write_backend(elsewhere, "elsewhere", name=DIRECTORY)
    one.backends.mkdir()
    one.tree.symlink_to(elsewhere)
    await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1", force=True))
    assert said_by(one.tree) == "one"
    assert not one.tree.is_symlink()
    assert said_by(elsewhere) == "elsewhere"
    one.tree.rename(one.backends / "aside")
    one.tree.symlink_to(one.directory / "nowhere")
    await one.install(one.request("engine:1"))
    assert said_by(one.tree) == "one"
    assert not one.residue()


async def test_a_directory_made_here_is_understood_by_localai(one: Shelf) -> None:
    image = await one.publish("engine:1", five_layers())
    await one.install(one.request("engine:1", meta="named", alias="llama", gallery_url="file:///index", version="7"))
    written = json.loads((one.tree / METADATA_FILE).read_text())
    assert {
        "name": "engine",
        "alias": "llama",
        "gallery_url": "file:///index",
        "version": "7",
    }.items() <= written.items()
    assert (written["uri"], written["digest"]) == (one.resolved("engine:1").uri, image.digest)
    assert (one.tree / METADATA_FILE).read_text().startswith('{\n  "name"')
    assert (one.tree / METADATA_FILE).stat().st_mode & 0o777 == 0o644
    assert one.tree.stat().st_mode & 0o777 == 0o750
    pointer = json.loads((one.backends / "named" / METADATA_FILE).read_text())
    assert (pointer["name"], pointer["meta_backend_for"]) == ("named", DIRECTORY)
    assert [path.name for path in (one.backends / "named").iterdir()] == [METADATA_FILE]
