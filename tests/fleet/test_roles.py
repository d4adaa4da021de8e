"""A database role without patience: everything that a cluster does fits into its limits. And two frontends that start
at
once on an empty database, which is done while the cluster with that role loads a model.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import psycopg
import pytest
from msgspec import Struct
from tests.fleet.cluster import Fleet
from tests.fleet.databases import socket_directory
from tests.fleet.engines import Serving, ask
from tests.fleet.sessions import LOOK_SECONDS, Sessions
from tests.fleet.warehouse import MEGABYTE, META_BUILD, Warehouse
from tests.worker.shelf import said_by

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
STARTS = 20 if IS_PROOF else 4
LIMITS = {"statement_timeout": "1s", "lock_timeout": "500ms", "idle_in_transaction_session_timeout": "1s"}
LOAD_SECONDS = 30.0
# A look may fall between two statements of a transaction, which a frontend without a core makes longer. This is half of
# what the role allows, and whoever waits for somebody else is not done so soon.
IDLE_SECONDS = 0.5
# Two frontends may want the same row, and one of them then waits until the other has committed: some milliseconds. Who
# waits for as long as this waits for something that is no commit. The role would end it a tenth of a second later.
LOCK_SECONDS = 0.4


def hasty_database(postgres: Callable[..., str]) -> tuple[str, str]:
    """An empty one: as its owner sees it, who has no patience, and as somebody who may see everything."""
    url, role = postgres("template1"), f"hasty{uuid.uuid4().hex[:8]}"
    database = urlsplit(url).path.strip("/")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f'create role "{role}" login'.encode())
        connection.execute(f'alter database "{database}" owner to "{role}"'.encode())
        for limit, value in LIMITS.items():
            connection.execute(f"alter role \"{role}\" set {limit} = '{value}'".encode())
    return f"postgresql://{role}@/{database}?host={socket_directory(url)}", url


class Asker:
    """One chat in a thread of its own, with a model that has to be loaded first."""

    def __init__(self, port: int, token: str, model: str) -> None:
        self.answer = (0, "")
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._ask, args=(port, token, model))
        self._thread.start()

    def _ask(self, port: int, token: str, model: str) -> None:
        began = time.monotonic()
        self.answer = ask(port, token, model, limit_seconds=3 * LOAD_SECONDS)
        self.seconds = time.monotonic() - began

    def join(self) -> None:
        self._thread.join(4 * LOAD_SECONDS)
        assert not self._thread.is_alive(), "the chat hangs"


class Hasty(Struct):
    """A cluster on such a database, with a model that is being loaded."""

    fleet: Fleet
    sessions: Sessions
    asker: Asker
    began: float


@pytest.fixture(scope="module")
def hasty(
    postgres: Callable[..., str], stocked: Warehouse, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hasty]:
    """The load begins with the first test of this file and is over with the last."""
    url, all_seeing_url = hasty_database(postgres)
    fleet = Fleet(tmp_path_factory.mktemp("hasty"), url, stocked.environment)
    serving = Serving(fleet, stocked)
    # Under a name that the gallery has and that no test of this file is given.
    serving.offer(META_BUILD, "late", start_seconds=LOAD_SECONDS)
    with Sessions(all_seeing_url) as sessions:
        began = time.monotonic()
        try:
            fleet.start(frontends=2, workers=1)  # both at once on an empty database, then the worker registers
            serving.add_model("late-speaker", META_BUILD)
            yield Hasty(fleet, sessions, Asker(fleet.first.port, serving.token, "late-speaker"), began)
        finally:
            stocked.calm()
            fleet.end()


def test_a_role_without_patience_is_enough_for_whatever_is_done_to_backends(
    hasty: Hasty, warehouse: Warehouse, name: str
) -> None:
    """F-039. While a model is being loaded, for longer than all limits together."""
    for limit, value in LIMITS.items():
        assert hasty.fleet.rows(f"show {limit}") == [(value,)]
    install_upgrade_and_delete(hasty.fleet, warehouse, name)


def test_two_frontends_that_start_at_once_on_an_empty_database_both_come_up(
    postgres: Callable[..., str], warehouse: Warehouse, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """F-043."""
    for _ in range(STARTS):
        twins = Fleet(tmp_path_factory.mktemp("twins"), postgres("template1"), warehouse.environment)
        try:
            twins.start(frontends=2, workers=0)
            assert len(twins.rows("select version_num from alembic_version")) == 1
            assert [twins.nodes(frontend) for frontend in twins.frontends] == [[], []]
        finally:
            twins.end()
        for frontend in twins.frontends:
            log = twins.log_of(frontend.name)
            assert not [line for line in log.splitlines() if " ERROR " in line or " WARNING " in line], log
            assert "Traceback" not in log


def test_a_role_without_patience_is_enough_for_a_long_load_and_nothing_waits_inside_a_transaction(hasty: Hasty) -> None:
    """F-039."""
    hasty.asker.join()
    assert hasty.asker.answer[0] == 200, hasty.asker.answer
    assert hasty.asker.seconds > LOAD_SECONDS
    hasty.fleet.done("delete", META_BUILD)
    sessions = hasty.sessions
    # An answer of the server takes its time too: a quarter of the looks is enough to see what lasts.
    assert sessions.looks > (time.monotonic() - hasty.began) / LOOK_SECONDS / 4
    assert sessions.longest_idle[0] < IDLE_SECONDS, sessions.longest_idle
    assert sessions.longest_lock[0] < LOCK_SECONDS, sessions.longest_lock
    assert sessions.ended == []
    for frontend in hasty.fleet.frontends:
        assert "store.failed" not in hasty.fleet.log_of(frontend.name)
        assert "Traceback" not in hasty.fleet.log_of(frontend.name)


def install_upgrade_and_delete(hasty: Fleet, warehouse: Warehouse, name: str) -> None:
    image = warehouse.publish(name, "one", megabytes=3)
    warehouse.proxy.bytes_per_second = MEGABYTE
    began = time.monotonic()
    hasty.done("install", name, ["worker-1"])
    assert time.monotonic() - began > 2.0, "an install that takes longer than any limit of the role"
    warehouse.calm()
    newer = warehouse.publish(name, "two", megabytes=3)
    assert newer.digest != image.digest
    hasty.first.post("/backends/upgrades/check")
    hasty.done("upgrade", name)
    assert said_by(hasty.backends_of("worker-1") / name) == "two"
    hasty.done("delete", name)
    assert not (hasty.backends_of("worker-1") / name).exists()
