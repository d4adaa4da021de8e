"""One fleet for all tests of this directory: two frontends, five workers, whole again before every test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.fleet.cluster import Fleet
from tests.fleet.engines import Serving
from tests.fleet.warehouse import META, META_BUILD, Warehouse, open_warehouse
from tests.fleet.wheels import PACKAGE, PACKAGED

_USED: pytest.StashKey[dict[str, str]] = pytest.StashKey()
# What tests publish versions of; a gallery is read when a frontend starts.
NAMES = tuple(f"engine-{number:02d}" for number in range(160))


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warehouse]:
    with open_warehouse(tmp_path_factory.mktemp("warehouse")) as made:
        for name in NAMES:
            made.offer(name, made.proxy.reference(f"{name}:latest"))
        made.offer(META_BUILD, made.proxy.reference(f"{META_BUILD}:latest"))
        made.offer_meta(META, META_BUILD)
        made.offer_package(PACKAGED, f"{PACKAGE}==2.0", "0" * 64)
        yield made


@pytest.fixture(scope="session")
def running_fleet(
    tmp_path_factory: pytest.TempPathFactory, postgres: Callable[..., str], stocked: Warehouse
) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("fleet"), postgres("template1"), stocked.environment)
    try:
        made.start(frontends=2, workers=5)
        yield made
    finally:
        made.end()


@pytest.fixture
def fleet(running_fleet: Fleet, stocked: Warehouse) -> Fleet:
    """Whole again, whatever the test before did."""
    stocked.calm()
    running_fleet.mend()
    return running_fleet


@pytest.fixture
def warehouse(stocked: Warehouse) -> Warehouse:
    return stocked


@pytest.fixture
def serving(fleet: Fleet, warehouse: Warehouse) -> Iterator[Serving]:
    made = Serving(fleet, warehouse)
    yield made
    warehouse.calm()
    for node in fleet.nodes():
        if node["drained"]:
            fleet.first.post(f"/api/nodes/{node['name']}/resume")
    fleet.mend()
    made.end()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """The name of a backend that no other test uses."""
    return _unused(request, "")


@pytest.fixture
def other(request: pytest.FixtureRequest) -> str:
    """A second one."""
    return _unused(request, "other")


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Callable[[int], list[str]]:
    """So many more."""
    return lambda count: [_unused(request, f"number {number}") for number in range(count)]


def _unused(request: pytest.FixtureRequest, which: str) -> str:
    used: dict[str, str] = request.config.stash.setdefault(_USED, {})
    return used.setdefault(f"{request.node.nodeid} {which}", NAMES[len(used)])
