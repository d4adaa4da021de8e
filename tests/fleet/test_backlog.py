"""A cluster with a long past and much that waits: what can be done is done as fast as ever, and the past is cut."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.backlog import ENDED, OLD, WAITING, Claims, age, seed, seed_nodes
from tests.fleet.cluster import Fleet
from tests.fleet.guests import restart
from tests.fleet.warehouse import Warehouse
from tests.worker.shelf import said_by

from enginehouse.frontend.operations.cancel import KEPT_SECONDS
from enginehouse.store.db import Store

CLAIMS, IDLE_CLAIMS = 200, 50
CLAIM_SECONDS = 0.05  # the 99th of a hundred
LIST_SECONDS = 0.2
# The machine that runs this has two cores and may do other things: an idle cluster beside says how slow it is.
SLOWNESS = 10.0
LISTS = (
    "/api/operations",
    "/api/operations?limit=100",
    "/api/operations?all=true",
    "/api/operations/history",
    "/api/operations/history?limit=100",
    "/api/nodes",
    "/backends",
    "/backends/upgrades",
    "/api/models",
)
# As many as may be asked for at once: five pages of a hundred.
LARGEST = ("/api/operations?all=true&limit=500", "/api/operations/history?limit=500")
ONE = ("/api/operations/waiting-1", "/backends/jobs/ended-1")
LOOKS = 3  # at each
PAGES = 5
INSTALL_SECONDS = 15.0
CUT_SECONDS = 60.0
TRANSACTION_SECONDS = 2.0  # the longest while the past is cut; a batch takes a tenth of a second


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, postgres: Callable[[], str], stocked: Warehouse
) -> Iterator[Fleet]:
    """A cluster with a past, and nobody in it yet."""
    made = Fleet(tmp_path_factory.mktemp("cluster"), postgres(), stocked.environment)
    try:
        asyncio.run(Store.open(made.database_url)).close()  # makes the tables
        seed(made.database_url)
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def inhabited(cluster: Fleet) -> Fleet:
    """The same with two frontends; no worker yet."""
    cluster.start(frontends=2, workers=0)
    return cluster


def p99_of_claims(url: str, count: int) -> float:
    async def measured() -> list[float]:
        store = await Store.open(url)
        try:
            return await Claims(store).seconds(count)
        finally:
            store.close()

    return sorted(asyncio.run(measured()))[int(count * 0.99) - 1]


def empty_database(postgres: Callable[[], str]) -> str:
    """The same nodes, and nothing that was ever asked of them."""
    url = postgres()
    asyncio.run(Store.open(url)).close()
    seed_nodes(url)
    return url


def test_a_claim_takes_no_longer_for_all_that_has_ended_or_waits(cluster: Fleet, postgres: Callable[[], str]) -> None:
    """F-042. Before there are frontends: they would claim what the test is to claim."""
    idle = p99_of_claims(empty_database(postgres), IDLE_CLAIMS)
    full = p99_of_claims(cluster.database_url, CLAIMS)
    assert full <= max(CLAIM_SECONDS, SLOWNESS * idle), f"{full:.4f} s, in an empty cluster {idle:.4f} s"


def seconds_of(fleet: Fleet, path: str) -> float:
    """The middle one of a few looks, at both frontends."""
    taken = []
    for number in range(LOOKS):
        began = time.perf_counter()
        fleet.frontends[number % 2].get(path)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def slow_lists(cluster: Fleet, idle: dict[str, float]) -> dict[str, str]:
    """What takes longer than it may."""
    found: dict[str, str] = {}
    taken = {path: seconds_of(cluster, path) for path in (*LISTS, *LARGEST, *ONE)}
    for path, seconds in taken.items():
        allowed = max(LIST_SECONDS, SLOWNESS * idle.get(path, 0.0))
        if path in LARGEST:
            allowed *= 5
        if seconds > allowed:
            found[path] = f"{seconds:.3f} s, allowed {allowed:.3f} s"
    return found


def slow_pages(cluster: Fleet, allowed: float) -> dict[str, str]:
    """Five pages of a hundred, one after the other; which of them took longer than they may."""
    found: dict[str, str] = {}
    for path in ("/api/operations?all=true&limit=100", "/api/operations/history?limit=100"):
        seen: list[str] = []
        more = ""
        for number in range(PAGES):
            page = cluster.frontends[number % 2].get(path + more)
            seconds = seconds_of(cluster, path + more)
            seen += [one["jobID"] for one in page["operations"]]
            more = f"&before={page['next']}"
            if seconds > allowed:
                found[f"{path}{more}"] = f"{seconds:.3f} s"
        assert len(set(seen)) == 100 * PAGES, "no operation twice"
    return found


def test_lists_come_at_once_and_an_install_is_done_beside_all_that_waits(
    inhabited: Fleet, fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-042."""
    cluster = inhabited
    idle = {path: seconds_of(fleet, path) for path in LISTS}
    assert slow_lists(cluster, idle) == {}
    assert slow_pages(cluster, max(LIST_SECONDS, SLOWNESS * idle["/api/operations?limit=100"])) == {}
    for path, count in (("/api/operations", 50), ("/api/operations/history?limit=500", 500)):
        listed = cluster.second.get(path)["operations"]
        assert len(listed) == count
        moments = [one.get("createdAt") or one["startedAt"] for one in listed]
        assert moments == sorted(moments, reverse=True), "the newest first"
    warehouse.publish(name, "one")
    cluster.add_worker("worker-1", cluster.first)
    cluster.until_healthy("worker-1")
    began = time.monotonic()
    cluster.done("install", name, ["worker-1"], frontend=cluster.second)
    assert time.monotonic() - began < INSTALL_SECONDS
    assert said_by(cluster.backends_of("worker-1") / name) == "one"


def counts(cluster: Fleet) -> dict[str, int]:
    """Operations of each group, by how their ids begin."""
    query = "select split_part(id, '-', 1), count(*) from operations where name = 'seeded' group by 1"
    return dict(cluster.rows(query))


def longest_transaction(cluster: Fleet) -> float:
    query = """select coalesce(max(extract(epoch from clock_timestamp() - xact_start)), 0) from pg_stat_activity
        where datname = current_database() and pid <> pg_backend_pid()"""
    return float(cluster.rows(query)[0][0])


def test_what_is_older_than_anything_is_kept_for_goes_in_small_steps_and_nothing_else_does(inhabited: Fleet) -> None:
    """F-042. A frontend cuts the past when it starts."""
    cluster = inhabited
    assert counts(cluster) == {"old": OLD, "ended": ENDED - OLD, "waiting": WAITING}, "all of it is young"
    age(cluster.database_url)
    before, left = time.time() - KEPT_SECONDS, [OLD]
    longest = 0.0

    def is_cut() -> bool:
        nonlocal longest
        longest = max(longest, longest_transaction(cluster))
        left.append(int(cluster.rows("select count(*) from operations where created_at < %s", before)[0][0]))
        return left[-1] == 0

    restart(cluster.first)
    wait_for("the past to be cut", is_cut, CUT_SECONDS)
    assert len(set(left)) > 3, "all at once"
    assert longest < TRANSACTION_SECONDS, f"{longest:.2f} s"
    assert counts(cluster) == {"ended": ENDED - OLD, "waiting": WAITING}
    assert cluster.rows("select count(*) from intents where id like 'old-%%'") == [(0,)]
    assert cluster.rows("select count(*) from operation_intents where intent_id like 'old-%%'") == [(0,)]
