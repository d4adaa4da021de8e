"""What is seen of an operation while it runs: never backwards, never too much, the same on every frontend, whatever the
bus loses, repeats or reorders.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tests.e2e.conftest import wait_for
from tests.fetch.faults import Cut, Fault, Header, WrongLength
from tests.fleet.cluster import OPEN, Fleet, Frontend
from tests.fleet.guests import Clock, guest_frontend, guest_worker, row_of, watch
from tests.fleet.tap import Leak, leaking, tapped
from tests.fleet.warehouse import MEGABYTE, Warehouse

from enginehouse.core.wire import ProgressEvent
from enginehouse.ports import Message

BUDGET_SECONDS = 2.0
QUIET = "worker-quiet"
STALENESS_SECONDS = 2.0


@pytest.fixture(scope="module")
def hasty(running_fleet: Fleet) -> Iterator[Frontend]:
    """A frontend that expects a worker to speak within two seconds."""
    with guest_frontend(running_fleet, "hasty", "--backend-install-timeout", f"{BUDGET_SECONDS}s") as made:
        yield made


@pytest.fixture(scope="module")
def quiet(running_fleet: Fleet, stocked: Warehouse) -> Iterator[Leak]:
    """The way to the bus of a worker of which no progress is ever heard."""
    with (
        leaking(running_fleet, stocked, lambda subject: subject.endswith(".progress")) as leak,
        guest_worker(running_fleet, QUIET, "--nats-url", leak.url),
    ):
        yield leak


def test_what_is_slow_but_moves_is_never_called_failed_and_never_sent_twice(
    fleet: Fleet, warehouse: Warehouse, hasty: Frontend, name: str
) -> None:
    """F-004."""
    warehouse.publish(name, "one", megabytes=2)
    warehouse.proxy.bytes_per_second = 0.4 * MEGABYTE
    pace = Clock(0.1)
    with tapped(fleet, warehouse) as tap:
        began = time.monotonic()
        operation = fleet.request("install", name, ["worker-1"], frontend=hasty)
        statuses = {one.name: [str(operation["status"])] for one in fleet.frontends}
        while any(seen[-1] in OPEN for seen in statuses.values()) and time.monotonic() - began < 30:
            for frontend in fleet.frontends:
                found = frontend.operation(operation["jobID"])
                row = row_of(found, "worker-1")
                statuses[frontend.name].append(found["status"])
                assert row["status"] in ("queued", "downloading", "success"), row
                assert row["attempt"] <= 1, row
            pace.tick()
        assert time.monotonic() - began > 2 * BUDGET_SECONDS, "it took longer than the budget"
        for seen in statuses.values():
            assert set(seen) <= {*OPEN, "succeeded"}
            assert seen[-1] == "succeeded"
        assert tap.sent_to(fleet.node("worker-1")["id"]) == ["backend.install"]
    assert fleet.began("worker-1", f"install {name}") == 1


def test_a_silent_worker_is_shown_as_running_there_until_its_success_is_known(
    fleet: Fleet, warehouse: Warehouse, hasty: Frontend, quiet: Leak, name: str
) -> None:
    """F-004, where nothing is heard at all."""
    warehouse.publish(name, "one", megabytes=1.5)
    warehouse.proxy.bytes_per_second = 0.4 * MEGABYTE
    with tapped(fleet, warehouse) as tap:
        operation = fleet.request("install", name, [QUIET], frontend=hasty)

        def shown() -> dict[str, Any] | None:
            row = row_of(hasty.operation(operation["jobID"]), QUIET)
            assert row["status"] in ("queued", "downloading", "running_on_worker"), row
            return row if row["status"] == "running_on_worker" else None

        row = wait_for("the silence to be shown", shown, BUDGET_SECONDS + 3)
        assert (row["state"], row["attempt"]) == ("running", 1)
        assert "no progress for" in row["error"]
        ended = fleet.ended(operation, hasty)
        node_id = fleet.node(QUIET)["id"]
        assert tap.sent_to(node_id) == ["backend.install"]
        assert tap.progress_of(node_id) == []
    row = row_of(ended, QUIET)
    assert (ended["status"], row["status"], row["attempt"]) == ("succeeded", "success", 1)
    assert "error" not in row
    assert quiet.lost, "it said something, which was lost"


def test_progress_that_is_heard_twice_or_late_or_after_the_end_changes_nothing(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-030."""
    warehouse.publish(name, "one", megabytes=1.5)
    warehouse.proxy.bytes_per_second = 0.6 * MEGABYTE
    node_id = fleet.node("worker-2")["id"]
    percentages: dict[str, list[float]] = {"frontend-1": [], "frontend-2": []}
    with tapped(fleet, warehouse) as tap:
        operation = fleet.request("install", name, ["worker-2"])

        def is_over() -> bool:
            # All of it so far, twice, the newest first.
            for message in reversed(tap.progress_of(node_id)[:20]):
                tap.say(message.subject, message.payload)
            for frontend in (fleet.first, fleet.second):
                row = row_of(frontend.operation(operation["jobID"]), "worker-2")
                percentages[frontend.name].append(row["percentage"])
            return str(row["state"]) == "succeeded"

        ends: list[list[dict[str, Any]]] = [[], []]
        for frontend, seen in zip((fleet.first, fleet.second), ends, strict=True):
            _listen(frontend, seen, operation)
        wait_for("the install to end", is_over, 20)
        wait_for("both to tell of the end", lambda: all(_end_in(seen) for seen in ends), 10)
        for shown in percentages.values():
            assert shown == sorted(shown)
            assert any(0 < one < 100 for one in shown), "the test saw it under way"
        ended = [_settled(frontend.operation(operation["jobID"])) for frontend in (fleet.first, fleet.second)]
        kept = _intents(fleet, operation)
        captured = tap.progress_of(node_id)
        assert captured
        told: list[dict[str, Any]] = []
        _listen(fleet.second, told, until_on="worker-4")
        for message in [*captured, *reversed(captured), _later(captured[-1])]:
            tap.say(message.subject, message.payload)
        tap.settle()
        warehouse.calm()
        # What is said after the replay is heard, written and told after it too.
        fleet.done("install", name, ["worker-4"])
        wait_for("the watcher to hear of the last install", lambda: _end_in(told), 10)
        assert [_settled(one.operation(operation["jobID"])) for one in (fleet.first, fleet.second)] == ended
        assert _intents(fleet, operation) == kept
        assert [one for one in told if one["jobID"] == operation["jobID"] and one["status"] in OPEN] == []


def test_an_operation_ends_everywhere_though_all_its_progress_is_lost(
    fleet: Fleet, warehouse: Warehouse, quiet: Leak, name: str
) -> None:
    """F-031."""
    warehouse.publish(name, "one", megabytes=0.5)
    warehouse.proxy.bytes_per_second = 0.5 * MEGABYTE
    operation = fleet.request("install", name, [QUIET])
    told: dict[str, list[dict[str, Any]]] = {one.name: [] for one in fleet.frontends}
    for frontend in fleet.frontends:
        _listen(frontend, told[frontend.name], operation)
    for frontend in fleet.frontends:
        assert fleet.ended(operation, frontend)["status"] == "succeeded"
    wait_for("all watchers to hear of the end", lambda: all(_end_in(seen) for seen in told.values()), 10)
    (committed,) = fleet.rows(
        "select max(i.updated_at) from intents i join operation_intents o on o.intent_id = i.id"
        " where o.operation_id = %s",
        operation["jobID"],
    )
    for frontend in fleet.frontends:
        assert _end_in(told[frontend.name])["heard_at"] - committed[0] <= STALENESS_SECONDS
        listed = frontend.get("/api/operations")["operations"]
        assert operation["jobID"] not in [one["jobID"] for one in listed]
    assert quiet.lost


def test_who_asks_two_frontends_in_turn_always_sees_the_operation_and_never_back_in_time(
    fleet: Fleet, warehouse: Warehouse, name: str
) -> None:
    """F-032."""
    warehouse.publish(name, "one", megabytes=1.5)
    warehouse.proxy.bytes_per_second = 0.6 * MEGABYTE
    operation = fleet.request("install", name, ["worker-3", "worker-4"], frontend=fleet.first)
    order = ["queued", "running", "succeeded"]
    first_seen: dict[tuple[int, float], float] = {}
    pace, polls = Clock(0.1), 0
    deadline = time.monotonic() + 20
    latest = ""
    while latest != "succeeded":
        assert time.monotonic() < deadline
        frontend = (fleet.first, fleet.second)[polls % 2]
        listed = frontend.get("/api/operations?all=true")["operations"]
        found = [one for one in listed if one["jobID"] == operation["jobID"]]
        assert len(found) == 1, "it is there in every poll"
        latest = found[0]["status"]
        seen = (order.index(latest), sum(row["percentage"] for row in found[0]["nodes"]))
        now = time.monotonic()
        newer = [at for state, at in first_seen.items() if state > seen]
        assert all(now - at <= STALENESS_SECONDS for at in newer), f"{seen} after {first_seen}"
        first_seen.setdefault(seen, now)
        polls += 1
        pace.tick()
    assert polls > 10
    assert {state for state, _ in first_seen} >= {1, 2}


@pytest.mark.parametrize(
    "kind",
    ["cut twice", "without a length", "announced too long", "announced too short"],
)
def test_numbers_stay_within_their_bounds_whatever_the_registry_claims(
    fleet: Fleet, warehouse: Warehouse, name: str, kind: str
) -> None:
    """F-034."""
    image = warehouse.publish(name, "one", megabytes=0.6)
    warehouse.proxy.bytes_per_second = 1.0 * MEGABYTE
    bulk = image.layers[0]
    faults: dict[str, list[tuple[Fault, int]]] = {
        "cut twice": [(Cut(after_bytes=bulk.size_bytes // 3), 2)],
        # A body without a length ends with its connection.
        "without a length": [(Header("content-length"), 1), (Cut(after_bytes=bulk.size_bytes), 1)],
        "announced too long": [(WrongLength(+50_000), 1)],
        "announced too short": [(WrongLength(-50_000), 1)],
    }
    for fault, times in faults[kind]:
        warehouse.proxy.plan(fault, path=bulk.digest, method="GET", times=times)
    node_id = fleet.node("worker-5")["id"]
    shown: list[dict[str, Any]] = []
    with tapped(fleet, warehouse) as tap:
        operation = fleet.request("install", name, ["worker-5"])

        def is_over() -> bool:
            shown.append(row_of(fleet.first.operation(operation["jobID"]), "worker-5"))
            return shown[-1]["state"] not in ("accepted", "running", "waiting")

        wait_for("the install to end", is_over, 30)
        said = [msgspec.json.decode(one.payload, type=ProgressEvent) for one in tap.progress_of(node_id)]
    assert shown[-1]["state"] == "succeeded", shown[-1]
    size = sum(layer.size_bytes for layer in image.layers)
    totals = [event.progress.total_bytes for event in said if event.progress is not None]
    assert {0, *totals} - {0}, "it told how much there is"
    for event in said:
        assert event.progress is not None
        assert 0 <= event.progress.done_bytes <= max(event.progress.total_bytes, 0)
        assert 0 <= event.percentage < 100
    assert max(totals) < size + 10_000, "the total is that of the image, not of what a server claims"
    for row in shown:
        assert 0 <= row["percentage"] <= 100
        assert row.get("current_bytes", 0) <= row.get("total_bytes", 0)
        assert row.get("total_bytes", 1) > 0, "an unknown total is absent, not zero"
        assert row["percentage"] < 100 or row["state"] == "succeeded", "not all of it before it was verified"


def _listen(
    frontend: Frontend, told: list[dict[str, Any]], operation: dict[str, Any] | None = None, until_on: str = ""
) -> None:
    """Keep what a watcher is told from now on, and when: of one operation until it ends, or of all of them until one
    ends on that node.
    """
    listening = threading.Event()
    path = f"/api/events?operation={operation['jobID']}" if operation else "/api/events"

    def keep() -> None:
        for kind, body in watch(frontend, path):
            listening.set()
            if kind == "operation":
                told.append({**body, "heard_at": time.time()})
                nodes = [row["node_name"] for row in body.get("nodes", ())]
                if body["status"] not in OPEN and (operation is not None or until_on in nodes):
                    return

    threading.Thread(target=keep, daemon=True).start()
    assert listening.wait(5)


def _end_in(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The last that was told, if it is an end."""
    return told[-1] if told and told[-1]["status"] not in OPEN else {}


def _intents(fleet: Fleet, operation: dict[str, Any]) -> list[tuple[Any, ...]]:
    return fleet.rows(
        "select i.* from intents i join operation_intents o on o.intent_id = i.id where o.operation_id = %s",
        operation["jobID"],
    )


def _settled(operation: dict[str, Any]) -> tuple[object, ...]:
    return operation["status"], operation["progress"], operation.get("finishedAt"), operation["nodes"]


def _later(message: Message) -> Message:
    """The same event as if much more had been said before it."""
    event = msgspec.json.decode(message.payload, type=ProgressEvent)
    assert event.progress is not None
    again = msgspec.structs.replace(event.progress, sequence=1_000_000, done_bytes=1)
    return Message(message.subject, msgspec.json.encode(msgspec.structs.replace(event, progress=again, percentage=1.0)))
