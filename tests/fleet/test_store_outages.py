"""The database is away for a while, frozen or gone: who asks is told so at once, warm requests go on for a while, and
all is well again soon after; and frontends that are started before it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests.e2e.conftest import wait_for
from tests.fleet.cluster import Fleet, Frontend
from tests.fleet.databases import Server, running_server
from tests.fleet.engines import Serving, ask
from tests.fleet.guests import guest_worker, until_stocked
from tests.fleet.proxies import strait_to_database
from tests.fleet.warehouse import Warehouse

from enginehouse.core.errors import EnginehouseError, Unavailable

MEMORY_SECONDS = 14.0  # for which warm requests go on; 60 in earnest
REFUSED_SECONDS = 5.0
UNREADY_SECONDS = 10.0
BACK_SECONDS = 5.0
LINES = 12  # of one frontend for one outage: a line per change of the store, of its nodes, and what led to them


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as made:
        yield made


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, server: Server, stocked: Warehouse) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("outages"), server.make_database(), stocked.environment)
    try:
        made.nats.start()
        for name in ("frontend-1", "frontend-2"):
            until_stocked(made.add_frontend(name, "--route-memory", f"{MEMORY_SECONDS}s"))
        made.add_worker("worker-1", made.first)
        made.until_healthy()
        yield made
    finally:
        made.end()


def refusal(fleet: Fleet, frontend: Frontend) -> str:
    """The code with which a request is refused, within the limit."""
    began = time.monotonic()
    with pytest.raises(Unavailable) as refused:
        fleet.request("install", "refused", ["worker-1"], frontend=frontend, uri="oci://127.0.0.1/none:1")
    assert time.monotonic() - began < REFUSED_SECONDS
    return refused.value.code


def is_unready(frontend: Frontend) -> bool:
    return not frontend.is_ready()


@pytest.mark.parametrize("how", ["frozen", "gone"])
def test_a_database_that_is_away_is_noticed_and_what_was_refused_is_not_done_later(
    small: Fleet, server: Server, warehouse: Warehouse, name: str, how: str
) -> None:
    serving = Serving(small, warehouse)
    model = f"speaker-{how}"

    def is_answered(frontend: Frontend, model: str, status: int) -> bool:
        return ask(frontend.port, serving.token, model)[0] == status

    serving.offer(name, "one")
    serving.add_model(model, name)
    serving.load(model, "worker-1")
    small.until_ready()
    told = [len(small.log_of(frontend.name).splitlines()) for frontend in small.frontends]
    pids = [frontend.pid for frontend in small.frontends]
    began = time.monotonic()
    server.freeze() if how == "frozen" else server.stop()
    try:
        for frontend in small.frontends:
            assert refusal(small, frontend) == "store_unavailable"
        assert time.monotonic() - began < MEMORY_SECONDS, "too late to see that warm requests go on"
        for frontend in small.frontends:
            assert ask(frontend.port, serving.token, model)[0] == 200, "from memory"
            left = UNREADY_SECONDS - (time.monotonic() - began)
            wait_for("it to say that it is not ready", partial(is_unready, frontend), left)
        for frontend in small.frontends:
            wait_for(
                "routes to be too old to be used",
                partial(is_answered, frontend, model, 503),
                MEMORY_SECONDS + REFUSED_SECONDS,
            )
        assert time.monotonic() - began > MEMORY_SECONDS * 0.8
        assert refusal(small, small.first) == "store_unavailable"
    finally:
        server.thaw() if how == "frozen" else server.start()
    back = time.monotonic()
    small.until_ready()
    for frontend in small.frontends:
        wait_for("it to serve", partial(is_answered, frontend, model, 200))
    assert time.monotonic() - back < BACK_SECONDS
    small.until_healthy()
    assert small.rows("select count(*) from operations where name = 'refused'") == [(0,)]
    assert [frontend.pid for frontend in small.frontends] == pids
    for frontend, before in zip(small.frontends, told, strict=True):
        lines = small.log_of(frontend.name).splitlines()[before:]
        assert sum("store.lost" in line for line in lines) == sum("store.recovered" in line for line in lines) == 1, (
            lines
        )
        assert len(lines) <= LINES, lines
    serving.end()


def test_a_node_that_is_removed_while_one_frontend_has_no_database_is_asked_no_longer_than_routes_are_remembered(
    small: Fleet, server: Server, warehouse: Warehouse, name: str, tmp_path: Path
) -> None:
    serving = Serving(small, warehouse)
    serving.offer(name, "one")
    serving.add_model("leaving-speaker", name)
    url = small.database_url.replace(server.socket_directory, str(tmp_path))
    with strait_to_database(warehouse, tmp_path, server.socket_directory) as way:
        cut_off = small.add_frontend("cut-off", "--route-memory", "6s", environment={"ENGINEHOUSE_DATABASE_URL": url})
        try:
            until_stocked(cut_off)
            with guest_worker(small, "leaving"):
                serving.load("leaving-speaker", "leaving")
                said = ask(cut_off.port, serving.token, "leaving-speaker")
                assert said[0] == 200
                warehouse.call(way.close)
                began = time.monotonic()
                small.first.delete("/api/nodes/leaving?force=true")
                wait_for(
                    "its routes to be too old",
                    lambda: ask(cut_off.port, serving.token, "leaving-speaker") != said,
                    6.0 + REFUSED_SECONDS + 2.0,
                )
                assert ask(cut_off.port, serving.token, "leaving-speaker")[0] == 503
                assert time.monotonic() - began < 6.0 + 2 * REFUSED_SECONDS
                warehouse.call(way.open)
                wait_for("it to be ready again", cut_off.is_ready, BACK_SECONDS)
                assert ask(cut_off.port, serving.token, "leaving-speaker") != said
        finally:
            cut_off.stop()
            small.frontends.remove(cut_off)
            cut_off.client.close()
    serving.end()


def reasons(frontend: Frontend) -> str:
    try:
        frontend.client.request_bytes("GET", "/readyz", timeout_seconds=5.0)
    except EnginehouseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", ["database", "bus"])
def test_a_frontend_that_is_started_first_waits_and_says_for_what(small: Fleet, server: Server, what: str) -> None:
    server.stop() if what == "database" else small.nats.kill()
    late = small.add_frontend(f"early-{what}")
    try:
        try:
            wait_for("it to say that it is not ready", lambda: "503" in reasons(late) or what in reasons(late))
            late.client.request_bytes("GET", "/healthz", timeout_seconds=5.0)
            with pytest.raises(Unavailable):
                late.get("/api/nodes")
            assert late.is_alive
        finally:
            server.start() if what == "database" else small.nats.start()
        wait_for("it to be ready", late.is_ready, 15.0)
        assert late.get("/api/nodes")
    finally:
        late.stop()
        small.frontends.remove(late)
        late.client.close()
    small.until_ready()
    small.until_healthy()


def test_a_frontend_that_is_started_and_stopped_while_it_waits_ends(small: Fleet, server: Server) -> None:
    server.stop()
    late = small.add_frontend("impatient")
    try:
        wait_for("it to wait", lambda: "store.waiting" in small.log_of("impatient"))
        assert late.stop(10.0) in (0, -signal.SIGTERM)
    finally:
        server.start()
        small.frontends.remove(late)
        late.client.close()
    small.until_ready()
