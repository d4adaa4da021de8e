"""Everything is restarted in turn under load: frontends, workers, NATS, PostgreSQL. No request fails."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet
from tests.fleet.databases import Server, running_server
from tests.fleet.engines import Serving, asking, ports
from tests.fleet.guests import until_stocked
from tests.fleet.proxies import balanced
from tests.fleet.test_wanted import on_so_many
from tests.fleet.warehouse import Warehouse

LIMIT_SECONDS = 60.0
MODEL = "tiny-chat"
WORKERS = ("worker-1", "worker-2")


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as made:
        yield made


@pytest.fixture
def small(tmp_path_factory: pytest.TempPathFactory, server: Server, stocked: Warehouse) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("restarts"), server.make_database(), stocked.environment)
    try:
        made.nats.start()
        for name in ("frontend-1", "frontend-2"):
            until_stocked(made.add_frontend(name))
        for name in WORKERS:
            made.add_worker(name, made.first)
        made.until_healthy()
        yield made
    finally:
        made.end()


def test_everything_is_restarted_in_turn_and_no_request_fails(
    small: Fleet, server: Server, warehouse: Warehouse
) -> None:
    """With the engine that comes with the package: it checks its key, so no frontend has to ask the bus who it is."""
    serving = Serving(small, warehouse)
    for worker in WORKERS:
        serving.load(MODEL, worker)
    both = partial(on_so_many, small, MODEL, 2)
    with balanced(warehouse, ports(small)) as balancer:
        wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
        port = int(balancer.url.rpartition(":")[2])
        with asking([port], serving.token, MODEL, rate=60.0) as load:
            for frontend in small.frontends:
                assert frontend.stop() == 0
                wait_for("the balancer to notice", lambda: len(balancer.ready) == 1)
                frontend.start()
                wait_for("the balancer to know both", lambda: len(balancer.ready) == 2)
            assert load.failures == [], "frontends"
            for worker in WORKERS:
                assert small.workers[worker].stop() == 0
                small.workers[worker].start()
                small.until_healthy()
                wait_for("two replicas again", both, LIMIT_SECONDS)
            assert load.failures == [], "workers"
            small.nats.stop()
            load.until_more(30)
            small.nats.start()
            small.until_healthy()
            assert load.failures == [], "NATS"
            assert load.per_second >= 50.0
    # Without a database no frontend is ready, so the balancer has nobody to send requests to.
    with asking(ports(small), serving.token, MODEL, rate=60.0) as load:
        server.stop()
        load.until_more(60)
        server.start()
        small.until_ready()
        load.until_more(60)
    assert load.failures == []
    wait_for("two replicas still", both, LIMIT_SECONDS)
