"""One real install of the engine for the whole run; every test links it into a place of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.worker.world import World, link_tree, nothing, running_world, silent, tiny_chat, xllamacpp

from enginehouse.worker.backends.installer import InstallRequest


@pytest.fixture(scope="session")
def installed_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in engine, installed from the package index by uv."""
    world = World(tmp_path_factory.mktemp("installed"))
    asyncio.run(world.installer.install(InstallRequest(resolved=xllamacpp(), generation=1), silent, nothing))
    return world.place.backends / "xllamacpp"


@pytest.fixture
async def world(tmp_path: Path, installed_tree: Path) -> AsyncIterator[World]:
    """A worker's parts with the engine installed and the tiny model placed."""
    async with running_world(tmp_path) as made:
        link_tree(installed_tree, made.place.backends / "xllamacpp")
        await made.models.pull(tiny_chat(), 1, silent)
        yield made
