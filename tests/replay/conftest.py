"""One lab, one bus and two workers of ours for all tests of this directory, clean again before every test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from tests.bus.server import plain_server
from tests.fleet.cluster import Fleet
from tests.replay.frontends import Frontends, open_frontends
from tests.replay.go_worker import Pair
from tests.replay.lab import Lab, open_lab
from tests.replay.workers import GoFrontend, go_frontend


@pytest.fixture(scope="session")
async def lab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Lab]:
    async with open_lab(tmp_path_factory.mktemp("lab")) as made:
        yield made


@pytest.fixture(scope="session")
def workers(tmp_path_factory: pytest.TempPathFactory, postgres: Callable[[], str], lab: Lab) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("replay"), postgres(), lab.environment)
    try:
        made.start(frontends=1, workers=2)
        yield made
    finally:
        made.end()
        for frontend in made.frontends:
            frontend.client.close()


@pytest.fixture
async def go(workers: Fleet, lab: Lab) -> AsyncIterator[GoFrontend]:
    """A Go frontend, as it were, and two empty workers of ours."""
    async with go_frontend(workers, lab) as made:
        yield made


@pytest.fixture(scope="session")
async def bus_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    async with plain_server(tmp_path_factory.mktemp("bus")) as address:
        yield f"nats://{address}"


@pytest.fixture
async def frontends(sqlite_url: str, bus_url: str, lab: Lab, tmp_path: Path) -> AsyncIterator[Frontends]:
    """Two frontends of ours that share a database, without a node."""
    await lab.move_tag(lab.old)
    async with open_frontends(sqlite_url, bus_url, lab, tmp_path) as made:
        yield made


@pytest.fixture
async def pair(frontends: Frontends, lab: Lab) -> AsyncIterator[Pair]:
    """Two Go workers, as it were, that have nothing and know every verb."""
    async with Pair.opened(frontends, lab) as made:
        yield made
