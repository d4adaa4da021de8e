"""One registry with one image for all tests of fetching; a proxy and a client of ours per test."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
from tests.fetch.faulty import faulty
from tests.fetch.images import Image, write_image
from tests.fetch.pulling import FAST, LOOPBACK, STALL_SECONDS, Pull
from tests.fetch.real_registry import Registry

from enginehouse.fetch.http.client import Client
from enginehouse.fetch.registry.requests import Registries


@pytest.fixture(scope="session")
async def image(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """Two layers, the second of which is worth reading in ranges; pushed as backends/one:latest."""
    noise = random.Random(4).randbytes(700_000)
    layers = [{"run.sh": b"#!/bin/sh\n"}, {"lib/engine.so": noise}]
    made = write_image(tmp_path_factory.mktemp("image") / "layout", layers)
    assert await registry.push(made.directory, "backends/one:latest") == made.digest
    return made


@pytest.fixture
async def pull(registry: Registry, image: Image) -> AsyncIterator[Pull]:
    client = Client(LOOPBACK, stall_seconds=STALL_SECONDS)
    async with faulty(registry.address) as proxy:
        yield Pull(proxy, client, Registries(LOOPBACK, patience=FAST), image)
        await client.close()
