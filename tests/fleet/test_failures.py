"""Failures: they keep to themselves, end where they must, and are told the same by everybody."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Answer, Hang
from tests.fleet.cluster import STALE_SECONDS, Fleet, Frontend, Process
from tests.fleet.guests import guest_stubs, restart, row_of
from tests.fleet.warehouse import MEGABYTE, Warehouse
from tests.worker.shelf import said_by

from enginehouse.core.intent import MAX_FAILURES

IS_PROOF = os.environ.get("ENGINEHOUSE_PROOF") == "1"
TEN = 10
LONG_AGO_SECONDS = 6 * 24 * 3600  # a day less than everything is kept for


@pytest.fixture
def crew(fleet: Fleet) -> Iterator[dict[str, Process]]:
    """Stub workers, as many as make ten with those that are there."""
    with guest_stubs(fleet, TEN - len(fleet.workers)) as made:
        yield made


def test_a_registry_that_never_answers_holds_up_nothing_else_on_that_worker(
    fleet: Fleet, warehouse: Warehouse, name: str, other: str
) -> None:
    """F-007."""
    bulk = warehouse.publish(name, "one").layers[0]
    warehouse.publish(other, "two", megabytes=1)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    alone = _seconds_of(fleet, other, ["worker-1"])
    warehouse.proxy.plan(Hang(), path=bulk.digest, times=None)
    stuck = fleet.request("install", name, ["worker-2"])
    wait_for("it to hang", lambda: warehouse.proxy.asked(bulk.digest))
    assert _seconds_of(fleet, other, ["worker-2"]) <= 1.5 * alone
    row = row_of(fleet.first.operation(stuck["jobID"]), "worker-2")
    assert (row["state"], row["attempt"]) == ("running", 1), "it hung all the while"
    fleet.first.post(f"/api/operations/{stuck['jobID']}/cancel", {})


def test_one_stopped_worker_of_ten_holds_up_no_other_and_does_its_part_later(
    fleet: Fleet, warehouse: Warehouse, name: str, other: str, crew: dict[str, Process]
) -> None:
    """F-008. Ten processes: five are real, five only wait."""
    for each in (name, other):
        warehouse.publish(each, "one", megabytes=0.5)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    ten, stopped = {**fleet.workers, **crew}, "worker-3"
    assert len(ten) == TEN
    alone = max(_seconds_of(fleet, other, [solo]) for solo in ("worker-1", "stub-1"))
    ten[stopped].pause()
    began = time.monotonic()
    operation = fleet.request("install", name, ten)

    def the_others_ended() -> bool:
        rows = fleet.second.operation(operation["jobID"])["nodes"]
        ended = [row["node_name"] for row in rows if row["status"] == "success"]
        return sorted(ended) == sorted(set(ten) - {stopped})

    wait_for("the others to be done", the_others_ended, alone + 10)
    taken = time.monotonic() - began
    assert taken <= alone + 2, f"{taken:.1f} s, one alone {alone:.1f} s"
    row = row_of(fleet.first.operation(operation["jobID"]), stopped)
    assert row["state"] in ("running", "waiting")

    def has_reason() -> bool:
        found = [row_of(frontend.operation(operation["jobID"]), stopped) for frontend in fleet.frontends]
        return all((row["status"], row.get("reason")) == ("queued", "node_away") for row in found)

    wait_for("the reason to be shown", has_reason, 4 * STALE_SECONDS)
    ten[stopped].resume()
    ended = fleet.ended(operation)
    assert ended["status"] == "succeeded", ended
    assert fleet.rows("select count(*) from operations where name = %s", name) == [(1,)], "nobody asked again"
    assert said_by(fleet.backends_of(stopped) / name) == "one"
    assert fleet.residue_of(stopped) == []


def history(frontend: Frontend) -> Iterator[dict[str, Any]]:
    """Page after page; a retention's worth at most."""
    path, more = "/api/operations/history?limit=500", ""
    for _ in range(10):
        page = frontend.get(path + more)
        yield from page["operations"]
        if "next" not in page:
            return
        more = f"&before={page['next']}"


def test_what_never_heals_ends_as_failed_is_kept_and_can_be_asked_for_anew(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-015. The waits between attempts are minutes; they are cut short in the database, and outside of the long proof
    all but two of the failures are counted there too.
    """
    warehouse.publish(name, "one")
    warehouse.proxy.plan(Answer(500), path=f"/v2/{name}/", times=None)
    operation = fleet.request("install", name, ["worker-4"])
    attempts = MAX_FAILURES if IS_PROOF else 2
    for attempt in range(1, attempts):

        def waits(attempt: int = attempt) -> dict[str, Any] | None:
            row = row_of(fleet.first.operation(operation["jobID"]), "worker-4")
            return row if (row["state"], row["attempt"]) == ("waiting", attempt) else None

        row = wait_for(f"attempt {attempt} to fail", waits, 30)
        assert (row["status"], row["reason"]) == ("queued", "upstream_error"), row
        assert "500" in row["error"]
        failures = attempt if IS_PROOF else MAX_FAILURES - 1
        fleet.rows("update intents set due_at = 0, failures = %s where id = %s", failures, row["intent"])
    ended = fleet.ended(operation)
    assert ended["status"] == "failed"
    kept = row_of(ended, "worker-4")
    assert (kept["status"], kept["reason"], kept["attempt"]) == ("error", "upstream_error", attempts)
    assert fleet.rows("select failures from intents where id = %s", kept["intent"]) == [(MAX_FAILURES,)]

    # A frontend cuts the past when it starts.
    for table in ("operations", "intents"):
        column = "created_at" if table == "operations" else "updated_at"
        key = operation["jobID"] if table == "operations" else kept["intent"]
        fleet.rows(f"update {table} set {column} = {column} - %s where id = %s", LONG_AGO_SECONDS, key)
    restart(fleet.first)
    for frontend in fleet.frontends:
        listed = frontend.get("/api/operations?limit=500")["operations"]
        found = next(one for one in listed if one["jobID"] == operation["jobID"])
        assert found["status"] == "failed"
        assert found["createdAt"]
        assert found["finishedAt"]
        # The end of the row is what was put into the past.
        assert row_of(found, "worker-4") | {"finishedAt": kept["finishedAt"]} == kept
        assert operation["jobID"] in [one["jobID"] for one in history(frontend)]

    warehouse.calm()
    again = fleet.second.post(f"/api/operations/{operation['jobID']}/retry", {})
    assert (again["retryOf"], again["jobID"] != operation["jobID"]) == (operation["jobID"], True)
    succeeded = fleet.ended(again)
    row = row_of(succeeded, "worker-4")
    assert (succeeded["status"], row["attempt"]) == ("succeeded", 1)
    assert fleet.rows("select failures from intents where id = %s", row["intent"]) == [(0,)]
    assert fleet.first.operation(operation["jobID"])["status"] == "failed", "what failed has failed"


def test_a_failure_is_the_same_on_every_frontend_before_and_after_a_restart(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-033."""
    image = warehouse.publish(name, "one")
    warehouse.proxy.plan(Answer(404), path=image.layers[0].digest, times=None)
    operation = fleet.request("install", name, ["worker-5"], frontend=fleet.first)
    fleet.ended(operation, fleet.first)

    def read(frontend: Any) -> tuple[object, ...]:
        found = frontend.operation(operation["jobID"])
        row = row_of(found, "worker-5")
        past = next(one for one in history(frontend) if one["jobID"] == operation["jobID"])
        return (
            *(found["status"], found["error"], found["finishedAt"]),
            *(row["reason"], row["error"], row["node_name"], row["node_id"], row["attempt"]),
            *(past["error"], past["outcome"]),
        )

    first = read(fleet.first)
    assert first[0] == "failed"
    assert first[3] == "not_found"
    assert image.layers[0].digest[:19] in str(first[4])
    assert str(first[1]) == f"worker-5: {first[4]}"
    assert first[7] == 1
    assert read(fleet.second) == first
    restart(fleet.first)
    assert read(fleet.first) == first


def _seconds_of(fleet: Fleet, name: str, nodes: list[str]) -> float:
    began = time.monotonic()
    fleet.done("install", name, nodes)
    return time.monotonic() - began
