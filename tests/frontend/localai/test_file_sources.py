"""Where a frontend reads the files from that it pushes: servers outside, its own uploads, the package."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fetch.faults import IgnoreRange
from tests.fetch.models.hub import Hub, hub
from tests.fetch.pulling import FAST, LOOPBACK

from enginehouse.core.errors import EnginehouseError, NotFound
from enginehouse.core.model import ModelFile
from enginehouse.fetch.galleries.sources import load_builtin
from enginehouse.fetch.registry.requests import Registries
from enginehouse.frontend.localai.file_sources import FileSources, ReadableFile

CONTENT = bytes(range(256)) * 5000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
async def here() -> AsyncIterator[Hub]:
    async with hub() as made:
        made.server.files["/f"] = CONTENT
        yield made


def sources(here: Hub, uploads: Path) -> FileSources:
    async def find_upload(sha256: str) -> Path:
        if not (uploads / sha256).exists():
            raise NotFound("cannot find it")
        return uploads / sha256

    return FileSources(
        client=here.sources.client,
        registries=Registries(LOOPBACK, environment={}, credentials={}, patience=FAST),
        headers=lambda name: {"authorization": f"Bearer {name}"} if name else {},
        find_upload=find_upload,
        patience=FAST,
    )


async def read(file: ReadableFile, start: int, end: int) -> bytes:
    return b"".join([piece async for piece in file.read(start, end)])


@pytest.mark.parametrize("has_ranges", [True, False], ids=["ranges", "no-ranges"])
async def test_a_file_of_a_web_server_is_read_from_its_middle(here: Hub, tmp_path: Path, has_ranges: bool) -> None:
    if not has_ranges:
        here.server.plan(IgnoreRange(), path="/f", times=None)
    file = ModelFile("f", f"{here.server.url}/f", DIGEST, credential="secret")
    found = await sources(here, tmp_path).open(file)
    assert await found.size() == len(CONTENT)
    assert await read(found, 1_000_000, len(CONTENT)) == CONTENT[1_000_000:]
    assert await read(found, 10, 20) == CONTENT[10:20]
    assert here.server.requests[-1].headers["authorization"] == "Bearer secret"


async def test_an_upload_is_read_from_this_frontend_s_disk_or_waited_for(here: Hub, tmp_path: Path) -> None:
    file = ModelFile("f", f"upload:{DIGEST}", DIGEST, len(CONTENT))
    with pytest.raises(EnginehouseError) as caught:
        await sources(here, tmp_path).open(file)
    assert caught.value.code == "upload_elsewhere"
    (tmp_path / DIGEST).write_bytes(CONTENT)
    found = await sources(here, tmp_path).open(file)
    assert (await found.size(), await read(found, 5, len(CONTENT))) == (len(CONTENT), CONTENT[5:])


async def test_a_built_in_file_is_read_from_the_package(here: Hub, tmp_path: Path) -> None:
    file = next(one for model in load_builtin().models for one in model.files if one.uri.startswith("builtin:"))
    found = await sources(here, tmp_path).open(file)
    assert hashlib.sha256(await read(found, 0, await found.size())).hexdigest() == file.sha256


@pytest.mark.parametrize("uri", ["file:///srv/f", "pypi:package==1#f", "builtin:absent"])
async def test_what_a_frontend_cannot_read_is_refused_for_good(here: Hub, tmp_path: Path, uri: str) -> None:
    with pytest.raises(EnginehouseError) as caught:
        await sources(here, tmp_path).open(ModelFile("f", uri, DIGEST, 3))
    assert caught.value.code in ("unsupported", "not_found")
